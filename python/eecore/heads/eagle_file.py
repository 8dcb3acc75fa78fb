"""Published EAGLE-3 heads: config.json and safetensors.

There are two layouts: the raw layout of SafeAILab, SpecForge and AngelSlim (``midlayer.*``), and
the layout of ``speculators`` (``layers.0.*``). ``eagle_aux_hidden_state_layer_ids`` counts
differently in them: in raw files the layer, from 0, after which the state is taken; in
``speculators`` the number of layers that have run. ``norm_output`` differs, too: in raw files it
is the norm before the LM head, there unless it is false; in ``speculators`` it means that each step
takes the normed state of the step before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eecore.config import MAX_POSITIONS, MAX_VOCAB, ModelConfig
from eecore.errors import CheckpointError
from eecore.files.tensors import shown_name
from eecore.heads.eagle import EagleHead, EagleSettings
from eecore.heads.files import (
    check_shapes,
    check_size,
    draft_tokens,
    verifier_of,
)
from eecore.models.llama import LlamaModel
from eecore.models.readers.checkpoint import Checkpoint
from eecore.models.readers.config_fields import ConfigFields
from eecore.models.readers.config_json import layers_config

MAX_TAPS = 16
RAW = "midlayer."
"""The prefix of the layer's tensors in raw files."""
LISTED = "layers.0."
"""The prefix of the layer's tensors in files of speculators."""
LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
SIZES: dict[str, dict[str, Any]] = {
    "llama": LLAMA_SIZES,
    "qwen3": {
        **LLAMA_SIZES,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
}
"""Defaults of transformers' classes, for fields that a ``transformer_layer_config`` leaves out."""


WINDOWS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
"""Fields about sliding windows; a head has a window only if layer_types says so."""


def read_settings(fields: ConfigFields, target: ModelConfig) -> EagleSettings:
    """The settings in a head's ``config.json``, checked against the model that it drafts for.

    Raises:
        ModelError: the head is not for this model, or has a feature that is not supported.
    """
    own = fields.inner("transformer_layer_config")
    inner = fields.inner("eagle_config") or fields.replaced({})
    if own is None:  # raw: the layer's sizes are the file's own fields
        if not inner.flag("use_aux_hidden_state", True):
            raise inner.unsupported("use_aux_hidden_state", "true, several states", False)
        layer = fields.replaced({"model_type": "llama", **fields.values})
        ids, first = inner, 1
    else:
        sizes = SIZES.get(str(own.values.get("model_type")), {})
        layer = own.replaced({**sizes, **own.values})
        ids, first = fields, 0
    slides = "sliding_attention" in layer.texts("layer_types", ())
    window = layer.integer("sliding_window", 1, MAX_POSITIONS) if slides else 0
    values = {name: value for name, value in layer.values.items() if name not in WINDOWS}
    config = layers_config(layer.replaced(values))
    if config.num_layers != 1:
        raise layer.unsupported("num_hidden_layers", "1, a head of one layer", config.num_layers)
    target_size = fields.integer("target_hidden_size", 1, default=config.hidden_size)
    for name, got in (("hidden_size", target_size), ("vocab_size", config.vocab_size)):
        said = "target_hidden_size" if name in fields and name != "vocab_size" else name
        check_size(layer, said, got, getattr(target, name))
    normed = fields.flag("norm_output", own is None)
    fc_norm = fields.flag("fc_norm", False)
    norm_before_fc = fields.flag("norm_before_fc", False)
    if fc_norm and norm_before_fc:
        raise fields.wrong("norm_before_fc", "false beside fc_norm", norm_before_fc)
    return EagleSettings(
        kind="EAGLE-3.1" if fc_norm else "EAGLE-3",
        # The head drafts at all positions of the model, even if it was trained on shorter texts.
        config=replace(
            config,
            max_position=max(config.max_position, target.max_position),
            layer_windows=(window,),
        ),
        taps=_taps(ids, first, target.num_layers),
        target_size=target_size,
        draft_vocab_size=fields.integer(
            "draft_vocab_size", 2, MAX_VOCAB, 32000 if own is not None else config.vocab_size
        ),
        norm_before_residual=fields.flag("norm_before_residual", False),
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_logits=normed or own is not None,
        norm_output=normed and own is not None,
        verifier=verifier_of(fields),
    )


def _taps(ids: ConfigFields, first: int, num_layers: int) -> tuple[int, ...]:
    """Layers after which the states are taken; ``first``: added to each layer's stored number."""
    name = "eagle_aux_hidden_state_layer_ids"
    given = ids.integers(name, 1 - first, num_layers - first, None, most=MAX_TAPS)
    if not given:
        taps = (2, num_layers // 2, num_layers - 3)
        if not 1 <= taps[0] < taps[1] < taps[2]:
            raise ids.wrong(name, f"layers of the {num_layers} that the model has", None)
        return taps
    return tuple(layer + first for layer in given)


def load(stored: Checkpoint, fields: ConfigFields, network: LlamaModel) -> EagleHead:
    """The head in a directory.

    Raises:
        ModelError: the head is not for this model, or not whole. Raised before the head's tensors
            are read.
    """
    settings = read_settings(fields, network.config)
    prefix = RAW if any(name.startswith(RAW) for name in stored.names) else LISTED
    names = {name.replace(RAW, prefix): name for name in settings.shapes}
    shapes = {stored_name: settings.shapes[name] for stored_name, name in names.items()}
    own = "embed_tokens.weight"
    size = settings.config.vocab_size, settings.config.hidden_size
    if own in stored:
        names[own], shapes[own] = own, size
    elif settings.config.hidden_size != settings.target_size:
        raise fields.wrong(
            "hidden_size",
            f"{settings.target_size}, as the model has it, of a head without {own}",
            settings.config.hidden_size,
        )
    check_shapes(stored, shapes)
    _refuse_others(stored, shapes, prefix)
    tokens = draft_tokens(stored, settings.draft_vocab_size, settings.config.vocab_size)
    tensors = {name: stored.tensor(theirs) for theirs, name in names.items()}
    return EagleHead(network, stored.place, settings, tensors, tokens)


def _refuse_others(stored: Checkpoint, shapes: dict[str, tuple[int, ...]], prefix: str) -> None:
    """Raise if the layers have other tensors."""
    for name in sorted(stored.names):
        if name.startswith((prefix, "layers.")) and name not in shapes:
            raise CheckpointError(
                f"{stored.path_of(name)}: expected no tensor {shown_name(name)}, of which "
                "config.json says nothing, got one"
            )
