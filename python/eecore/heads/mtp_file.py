"""The layer that drafts further tokens (MTP) inside the checkpoint of a MiMo or a Qwen3.5.

A Qwen3.5's may be a GGUF file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from eecore.config import ModelConfig
from eecore.heads.files import check_shapes, check_size, new_weights
from eecore.heads.mtp import MtpHead, MtpWeights
from eecore.heads.published import PublishedSettings
from eecore.models.llama import LlamaModel, LlamaWeights
from eecore.models.readers.checkpoint import StoredTensors
from eecore.models.readers.config_fields import ConfigFields
from eecore.models.weights import NewWeights, WeightView


@dataclass(frozen=True)
class Layout:
    """How a family stores its layer, and what is particular about it.

    Args:
        count: the field that has the number of such layers.
        layer: the prefix of a decoder layer's tensors.
        state_norm, token_norm, final_norm, projection: the names of the other tensors.
        state_first: whether the projection takes the state before the embedding.
        leaves_first_out: see :class:`eecore.heads.mtp.MtpWeights`.
    """

    count: str
    layer: str
    state_norm: str
    token_norm: str
    final_norm: str
    projection: str
    state_first: bool = False
    leaves_first_out: bool = False


MIMO = Layout(
    count="num_nextn_predict_layers",
    layer="model.mtp_layers.0.",
    state_norm="model.mtp_layers.0.hidden_layernorm.weight",
    token_norm="model.mtp_layers.0.token_layernorm.weight",
    final_norm="model.mtp_layers.0.final_layernorm.weight",
    projection="model.mtp_layers.0.input_proj.weight",
    state_first=True,
    leaves_first_out=True,
)
QWEN3_5 = Layout(
    count="mtp_num_hidden_layers",
    layer="mtp.layers.0.",
    state_norm="mtp.pre_fc_norm_hidden.weight",
    token_norm="mtp.pre_fc_norm_embedding.weight",
    final_norm="mtp.norm.weight",
    projection="mtp.fc.weight",
)


def _layout(model: ModelConfig) -> Layout:
    return QWEN3_5 if model.attention_gate else MIMO


def read_settings(fields: ConfigFields, model: ModelConfig) -> PublishedSettings:
    """The settings of the layer in a model's config.json.

    Raises:
        ModelError: there is no such layer, or it is another model's.
    """
    names = list(fields.texts("architectures", ()))
    if any(name.startswith("Qwen3_5") for name in names):
        is_its_own = model.attention_gate
    else:
        is_its_own = model.attention_bias  # of a MiMo, or a Qwen2: MiMo's GGUF files are Qwen2s
    if not is_its_own:
        raise fields.wrong("architectures", f"that of the model, {model.architecture}", names)
    text = fields.inner("text_config") or fields
    count = _layout(model).count
    if not text.integer(count, 0, default=0):
        raise text.wrong(count, "a layer that drafts further tokens", 0)
    sizes = {"num_hidden_layers": model.num_layers, "hidden_size": model.hidden_size}
    for name, expected in {**sizes, "vocab_size": model.vocab_size}.items():
        check_size(text, name, text.integer(name), expected)
    return PublishedSettings(
        kind="MTP",
        config=replace(model.first_layers(1), delta=None),
        taps=(model.num_layers,),
        draft_vocab_size=model.vocab_size,
    )


def load(files: StoredTensors, fields: ConfigFields, network: LlamaModel) -> MtpHead:
    """The layer in a checkpoint's directory, or in a GGUF file, whose blocks it keeps.

    Raises:
        ModelError: the layer is not whole, or is another model's; raised before memory is
            allocated.
    """
    settings, layout = read_settings(fields, network.config), _layout(network.config)
    config, hidden = settings.config, settings.config.hidden_size
    shared = network.weights.embed_tokens, network.weights.lm_head

    def empty(new: NewWeights) -> MtpWeights:
        return MtpWeights(
            layer=LlamaWeights.empty(config, new, shared),
            state_norm=new.tensor(hidden),
            token_norm=new.tensor(hidden),
            of_state=new.matrix("projection", hidden, hidden),
            of_token=new.matrix("projection", hidden, hidden),
            leaves_first_out=layout.leaves_first_out,
        )

    def views_of(weights: MtpWeights) -> dict[str, WeightView]:
        """What the tensors fill, by their names; not the projection's."""
        start, offset = "model.layers.0.", config.norm_offset
        every = weights.layer.by_checkpoint_name(config).items()
        norms = {
            layout.state_norm: weights.state_norm,
            layout.token_norm: weights.token_norm,
            layout.final_norm: weights.layer.final_norm,
        }
        views = {name: WeightView(norm, offset=offset) for name, norm in norms.items()}
        return views | {
            layout.layer + name.removeprefix(start): view
            for name, view in every
            if name.startswith(start)
        }

    meta = views_of(empty(NewWeights("meta", torch.float32)))
    shapes = {name: tuple(view.weight.shape) for name, view in meta.items()}
    check_shapes(files, shapes | {layout.projection: (hidden, 2 * hidden)})
    new, forms = new_weights(files, network)
    weights = empty(new)
    for name, view in views_of(weights).items():
        forms.fill(view, name)
    parts = weights.of_token, weights.of_state
    for part, at in zip(parts, (hidden, 0) if layout.state_first else (0, hidden), strict=True):
        forms.fill(WeightView.of(part), layout.projection, slice(at, at + hidden))
    return MtpHead(network, settings, weights, files.place)
