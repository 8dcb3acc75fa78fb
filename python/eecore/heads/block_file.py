"""Files of heads that draft a block: DFlash and DSpark as z-lab, SpecForge, DeepSpec and
speculators write them.

config.json tells the formats apart. They count layers differently: z-lab, SpecForge and DeepSpec
name the layer, from 0, after which a state is taken, speculators the number of layers before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from eecore import ops
from eecore.config import ModelConfig
from eecore.errors import CheckpointError
from eecore.files.readable import shown_path
from eecore.heads.block import (
    BlockHead,
    BlockSettings,
    BlockWeights,
    Markov,
)
from eecore.heads.files import (
    check_shapes,
    check_size,
    draft_tokens,
    new_weights,
    verifier_of,
)
from eecore.models.llama import LlamaModel, LlamaWeights
from eecore.models.readers.checkpoint import Checkpoint
from eecore.models.readers.config_fields import ConfigFields
from eecore.models.readers.config_json import layers_config
from eecore.models.weights import Care, NewWeights, WeightView
from eecore.ops import Matrix

MAX_BLOCK = 64
MAX_RANK = 1 << 14
SHARED = frozenset({"embed_tokens.weight", "lm_head.weight", "t2d", "d2t"})
"""Tensors that may be there without being read: the model's, or not needed."""


@dataclass(frozen=True)
class _Kind:
    """One format of heads."""

    kind: str
    """``DFlash`` or ``DSpark``."""
    inner: str = ""
    """The object of config.json with the head's own fields; empty: config.json itself."""
    layers: str = ""
    """The object of config.json with the fields of the layers; empty: config.json itself."""
    taps: str = "target_layer_ids"
    """The field with the layers after which states are taken."""
    after: int = 1
    """Added to a number in that field to get the number of layers before the state."""
    from_last: bool = False
    """Whether the position of the text's last token gives a draft where no field says so."""
    has_confidence: bool = False
    """Whether by default the head predicts how likely a draft is to be accepted."""


_SPECULATORS = replace(
    _Kind("DFlash", layers="transformer_layer_config"), taps="aux_hidden_state_layer_ids", after=0
)
BLOCK_KINDS: Mapping[str, _Kind] = {
    "DFlashDraftModel": _Kind("DFlash", inner="dflash_config"),
    "DSparkDraftModel": _Kind("DSpark", inner="dflash_config"),
    "Qwen3DSparkModel": _Kind("DSpark", from_last=True),
    "dflash": _SPECULATORS,
    "dspark": replace(_SPECULATORS, kind="DSpark", from_last=True, has_confidence=True),
}
"""The formats that are read, by architecture or speculators_model_type."""


def _kind_of(fields: ConfigFields) -> _Kind:
    name = fields.text("speculators_model_type", "")
    name = name or (fields.texts("architectures", ()) or ("",))[0]
    inner = fields.inner("dflash_config")
    if name == "DFlashDraftModel" and inner and inner.text("projector_type", "") == "dspark":
        name = "DSparkDraftModel"  # as early files of SpecForge say
    return BLOCK_KINDS[name]


def read_settings(fields: ConfigFields, model: ModelConfig) -> BlockSettings:
    """The settings in a head's config.json.

    Raises:
        ModelError: the head is for another model, or has a feature that is not supported.
    """
    kind = _kind_of(fields)
    own = (fields.inner(kind.inner) if kind.inner else None) or fields
    given = fields.inner(kind.layers) if kind.layers else fields
    if given is None:
        raise fields.wrong(kind.layers, "the config of its layers", None)
    config = _layers(given, model)
    for name in ("hidden_size", "vocab_size"):
        check_size(given, name, getattr(config, name), getattr(model, name))
    if "num_target_layers" in fields:
        num_layers = fields.integer("num_target_layers")
        check_size(fields, "num_target_layers", num_layers, model.num_layers)
    block_size = _either(fields, own, "block_size").integer("block_size", 2, MAX_BLOCK)
    rank = own.integer("markov_rank", 0, MAX_RANK, 256 if kind.layers else 0)
    rank = rank if kind.kind == "DSpark" else 0
    if rank:
        own.choice("markov_head_type", ("vanilla",), "vanilla")
    alpha = own.number("confidence_head_alpha", 0.0, default=float(kind.has_confidence))
    confident = kind.kind == "DSpark" and own.flag("enable_confidence_head", alpha > 0.0)
    sees = bool(confident and own.flag("confidence_head_with_markov", kind.has_confidence))
    if sees and not rank:
        raise own.wrong("markov_rank", "a rank with confidence_head_with_markov", rank)
    draft_vocab = fields.integer("draft_vocab_size", 2, model.vocab_size, model.vocab_size)
    return BlockSettings(
        kind="DSpark" if rank or confident else "DFlash",
        config=replace(config, max_position=model.max_position + block_size),
        taps=_taps(own if kind.taps in own else fields, kind, model, config.num_layers),
        block_size=block_size,
        mask_token=_either(fields, own, "mask_token_id").integer(
            "mask_token_id", 0, model.vocab_size - 1
        ),
        from_last=own.flag("sample_from_anchor", kind.from_last),
        draft_vocab_size=draft_vocab,
        markov_rank=rank,
        has_confidence=bool(confident),
        confidence_sees_token=sees,
        verifier=verifier_of(fields),
    )


def _either(fields: ConfigFields, own: ConfigFields, name: str) -> ConfigFields:
    """The object with a field that may be in either of two."""
    return fields if name in fields else own


def _layers(fields: ConfigFields, model: ModelConfig) -> ModelConfig:
    """The config of the head's layers, which are Qwen3's."""
    fields.choice("model_type", ("qwen3",), "qwen3")
    usual = {"max_position_embeddings": model.max_position}
    own = {"model_type": "qwen3", "tie_word_embeddings": False}
    config = layers_config(fields.replaced({**usual, **fields.values, **own}))
    if any(config.layer_windows):
        raise fields.unsupported("layer_types", "full_attention", "sliding_attention")
    return config


def _taps(
    fields: ConfigFields, kind: _Kind, model: ModelConfig, num_layers: int
) -> tuple[int, ...]:
    """Layers after which the head takes the state; z-lab's defaults if none are named."""
    last, first = model.num_layers - kind.after, 1 - kind.after
    named = fields.integers(kind.taps, first, last, None, most=model.num_layers)
    if named is None and not kind.layers:
        end = model.num_layers - 3
        steps = [round(1 + k * (end - 1) / max(num_layers - 1, 1)) for k in range(num_layers)]
        named = tuple(steps) if num_layers > 1 else (model.num_layers // 2,)
    if not named or len(set(named)) != len(named):
        raise fields.wrong(kind.taps, "numbers of layers, each once", list(named or ()))
    return tuple(layer + kind.after for layer in named)


def load(files: Checkpoint, fields: ConfigFields, network: LlamaModel) -> BlockHead:
    """The head in a directory.

    Raises:
        ModelError: the head is not whole, is for another model, or has a feature that is not
            supported; raised before memory is allocated.
    """
    settings = read_settings(fields, network.config)
    shapes = _shapes(settings, network)
    check_shapes(files, shapes)
    others = set(files.names) - set(shapes) - SHARED
    others = {name for name in others if not name.endswith(".inv_freq")}
    if others:
        raise CheckpointError(
            f"{shown_path(files.place)}: expected the tensors of a {settings.kind}, got "
            f"{min(others)}, too"
        )
    return BlockHead(settings, _weights(files, settings, network), files.place)


def _is_cut(settings: BlockSettings) -> bool:
    """Whether the head has an LM head of its own, for some tokens."""
    return settings.draft_vocab_size != settings.config.vocab_size


def _shapes(settings: BlockSettings, network: LlamaModel) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors that are read."""
    hidden, rank = settings.config.hidden_size, settings.markov_rank
    _, views = _new_layers(settings, network, NewWeights("meta", torch.float32))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(settings.taps) * hidden),
        "hidden_norm.weight": (hidden,),
        **{name: tuple(view.weight.shape) for name, view in views.items()},
    }
    if rank:
        shapes["markov_head.markov_w1.weight"] = (settings.config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (settings.draft_vocab_size, rank)
    if settings.has_confidence:
        seen = hidden + rank * settings.confidence_sees_token
        shapes["confidence_head.proj.weight"] = (1, seen)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def _new_layers(
    settings: BlockSettings, network: LlamaModel, new: NewWeights
) -> tuple[LlamaWeights, dict[str, WeightView]]:
    """Uninitialised weights of the layers, with the model's embeddings, and what the tensors of a
    head's files fill of them.
    """
    config, lm_head = settings.config, network.weights.lm_head
    if _is_cut(settings):
        shape = settings.draft_vocab_size, config.hidden_size
        lm_head = new.matrix("lm_head", *shape, is_head=True)
    layers = LlamaWeights.empty(config, new, (network.weights.embed_tokens, lm_head))
    views = {
        name.removeprefix("model."): view
        for name, view in layers.by_checkpoint_name(config).items()
        if name.startswith(("model.layers.", "model.norm."))
    }
    if _is_cut(settings):
        views["lm_head.weight"] = WeightView.of(lm_head, "most")
    return layers, views


def _weights(files: Checkpoint, settings: BlockSettings, network: LlamaModel) -> BlockWeights:
    """The head's weights, read into memory."""
    device, hidden, tokens = network.device, settings.config.hidden_size, None
    if _is_cut(settings):
        vocab_size = network.config.vocab_size
        tokens = draft_tokens(files, settings.draft_vocab_size, vocab_size).to(device)
    new, forms = new_weights(files, network)
    filling = forms.filling

    def matrix(name: str, care: Care) -> Matrix:
        stored = files.tensor(name)
        made = new.matrix("", *stored.shape, cares=(care,))
        filling.fill(WeightView.of(made, care), stored)
        return made

    layers, views = _new_layers(settings, network, new)
    for name, view in views.items():
        filling.fill(view, files.tensor(name))
    taps = new.matrix("fc", len(settings.taps), hidden, hidden)
    stored = files.tensor("fc.weight").view(hidden, -1, hidden).transpose(0, 1).contiguous()
    for tap, part in zip(taps.unbind(), stored, strict=True):
        filling.fill(WeightView.of(tap), part)
    norm = new.tensor(hidden).copy_(files.tensor("hidden_norm.weight"))
    markov = confidence = None
    if settings.markov_rank:
        # What the token before a draft adds to its logits.
        before = matrix("markov_head.markov_w1.weight", "most")
        markov = Markov(before, matrix("markov_head.markov_w2.weight", "more"))
    if settings.has_confidence:
        # The sigmoid of a linear layer, as the second of two classes, the first of score 0.
        parts = (files.tensor(f"confidence_head.proj.{n}").float() for n in ("weight", "bias"))
        both = (torch.cat((torch.zeros_like(part), part)).to(device) for part in parts)
        confidence = ops.MlpMeasure(*both)
    return BlockWeights(layers, taps, norm, markov, confidence, tokens)
