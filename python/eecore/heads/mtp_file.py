"""The layer that drafts further tokens (MTP) inside a MiMo's checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from eecore.config import ModelConfig
from eecore.heads.files import check_shapes, check_size, new_weights
from eecore.heads.mtp import MtpHead, MtpWeights
from eecore.heads.published import PublishedSettings
from eecore.models.llama import LlamaModel, LlamaWeights
from eecore.models.readers.checkpoint import Checkpoint
from eecore.models.readers.config_fields import ConfigFields
from eecore.models.weights import NewWeights, WeightView

LAYER = "model.mtp_layers.0."
"""The prefix of the layer's tensors."""


def read_settings(fields: ConfigFields, model: ModelConfig) -> PublishedSettings:
    """The settings of the layer in a model's config.json.

    Raises:
        ModelError: there is no such layer, or it is another model's.
    """
    if not fields.integer("num_nextn_predict_layers", 0, default=0):
        raise fields.wrong("num_nextn_predict_layers", "a layer that drafts further tokens", 0)
    if not model.attention_bias:  # of a MiMo, or a Qwen2: MiMo's GGUF files are Qwen2s
        listed = list(fields.texts("architectures", ()))
        raise fields.wrong("architectures", f"that of the model, {model.architecture}", listed)
    sizes = {"num_hidden_layers": model.num_layers, "hidden_size": model.hidden_size}
    for name, expected in {**sizes, "vocab_size": model.vocab_size}.items():
        check_size(fields, name, fields.integer(name), expected)
    return PublishedSettings(
        kind="MTP",
        config=model.first_layers(1),
        taps=(model.num_layers,),
        draft_vocab_size=model.vocab_size,
    )


def load(directory: Path, fields: ConfigFields, network: LlamaModel) -> MtpHead:
    """The layer in a checkpoint's directory.

    Raises:
        ModelError: the layer is not whole, or is another model's; raised before memory is
            allocated.
    """
    settings = read_settings(fields, network.config)
    config, hidden = settings.config, settings.config.hidden_size
    shared = network.weights.embed_tokens, network.weights.lm_head

    def views_of(layer: LlamaWeights) -> dict[str, WeightView]:
        """What the layer's tensors fill, by their names."""
        start = "model.layers.0."
        every = layer.by_checkpoint_name(config).items()
        views = {LAYER + name.removeprefix(start): v for name, v in every if name.startswith(start)}
        return {**views, f"{LAYER}final_layernorm.weight": WeightView(layer.final_norm)}

    with Checkpoint(directory, drafts=True) as files:
        meta = LlamaWeights.empty(config, NewWeights("meta", torch.float32), shared)
        shapes = {name: tuple(view.weight.shape) for name, view in views_of(meta).items()}
        projection = f"{LAYER}input_proj.weight"
        norms = [f"{LAYER}{name}_layernorm.weight" for name in ("hidden", "token")]
        shapes |= dict.fromkeys(norms, (hidden,)) | {projection: (hidden, 2 * hidden)}
        check_shapes(files, shapes)
        new, filling = new_weights(network)
        layer = LlamaWeights.empty(config, new, shared)
        for name, view in views_of(layer).items():
            filling.fill(view, files.tensor(name))
        state_norm, token_norm = (new.tensor(hidden).copy_(files.tensor(name)) for name in norms)
        # The state's columns come before the token's.
        of_state, of_token = (new.matrix("projection", hidden, hidden) for _ in range(2))
        stored = files.tensor(projection)
        filling.fill(WeightView.of(of_state), stored[:, :hidden].contiguous())
        filling.fill(WeightView.of(of_token), stored[:, hidden:].contiguous())
    weights = MtpWeights(layer, state_norm, token_norm, of_state, of_token)
    return MtpHead(network, settings, weights, directory)
