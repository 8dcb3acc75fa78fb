"""Loads a model's weights from a checkpoint: floats, or matrices in their own bits.

One matrix may mix several block formats. If any part of it, in any layer, can only be read as
floats, all of it becomes floats of the model's dtype.
"""

from __future__ import annotations

import math

import torch

from eecore import ops
from eecore.config import AnyModelConfig, ModelConfig
from eecore.errors import ModelError
from eecore.models.llama import LlamaWeights
from eecore.models.readers.checkpoint import (
    INT8,
    StoredTensors,
    check_tensors,
    embeddings_name,
    empty_weights,
)
from eecore.models.t5_weights import T5Weights
from eecore.models.weights import (
    INT8_BLOCK_DEVICES,
    CodedForms,
    Coding,
    Filling,
    Form,
    NewMatrix,
    NewWeights,
    WeightView,
)

FIELDS = {
    "self_attn.q_proj": "qkv",
    "self_attn.k_proj": "qkv",
    "self_attn.v_proj": "qkv",
    "self_attn.qkv_proj": "qkv",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate_up",
    "mlp.up_proj": "gate_up",
    "mlp.gate_up_proj": "gate_up",
    "shared_mlp.input_linear": "gate_up",
    "mlp.down_proj": "down",
    "shared_mlp.output_linear": "down",
    "self_attn.out_proj": "o",
    "feed_forward.w1": "gate_up",
    "feed_forward.w3": "gate_up",
    "feed_forward.w2": "down",
    "conv.in_proj": "conv_first",
    "conv.out_proj": "conv_last",
    "linear_attn.in_proj_qkv": "delta_first",
    "linear_attn.in_proj_z": "delta_first",
    "linear_attn.out_proj": "delta_last",
    "mtp.fc": "projection",
    "model.embed_tokens": "embed_tokens",
    "lm_head": "lm_head",
}


def load_weights(
    checkpoint: StoredTensors,
    config: AnyModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    coding: Coding | None = None,
    num_layers: int | None = None,
) -> LlamaWeights | T5Weights:
    """The config's weights from a checkpoint: checked first, then allocated, then filled.

    The values of weights are not checked: a NaN or an infinity spreads in products.

    Args:
        dtype: the dtype of weights that are not quantised.
        coding: what floats are quantised to.
        num_layers: load only the first layers of a Llama in floats; all layers are checked.

    Raises:
        ModelError: tensors are missing or wrong, or there is no memory for the weights.
    """
    check_tensors(checkpoint, config)
    if isinstance(config, ModelConfig) and num_layers is not None:
        config = config.first_layers(num_layers)
    forms = StoredForms(
        checkpoint, CodedForms(coding, int8_blocks=device.type in INT8_BLOCK_DEVICES)
    )
    try:
        new = NewWeights(device, dtype, forms)
        weights, views = empty_weights(config, embeddings_name(config, checkpoint), new)
    except RuntimeError as error:  # torch is out of memory
        raise ModelError(
            f"{checkpoint.place}: expected memory for {config.num_parameters} weights on {device}, "
            f"got: {str(error).splitlines()[0]}"
        ) from None
    for name, view in views.items():
        forms.fill(view, name)
        checkpoint.release(name)
    return weights


def memory_of(
    checkpoint: StoredTensors, config: AnyModelConfig, dtype: torch.dtype
) -> dict[str, tuple[str, int]]:
    """The form that each tensor of a checkpoint runs in, such as "Q4_0" or "F32", and its bytes."""
    forms = runs_as(checkpoint)
    floats = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    found = {}
    embeddings = embeddings_name(config, checkpoint)
    for name in empty_weights(config, embeddings, NewWeights("meta", dtype))[1]:
        size, field = math.prod(checkpoint.shape(name)), field_of(name)
        form = "floats" if field is None else forms[field]
        if form == "floats":
            found[name] = (floats, size * dtype.itemsize)
        elif form == "int8":
            found[name] = (INT8, size + 4 * checkpoint.shape(name)[0])
        else:
            format = _block_format(checkpoint.forms(name))
            found[name] = (str(format), packed_bytes(checkpoint, name, checkpoint.shape(name)[-1]))
    return found


def runs_as(checkpoint: StoredTensors) -> dict[str, Form]:
    """The form of each field of the weights, which its matrices in all layers share."""
    by_field: dict[str, list[tuple[str, ...]]] = {}
    for name in checkpoint.names:
        if (field := field_of(name)) is not None:
            by_field.setdefault(field, []).append(checkpoint.forms(name))
    # Embeddings of a tied model become floats if only its LM head was saved.
    forms: dict[str, Form] = {"embed_tokens": "floats"}
    return forms | {field: _form(matrices) for field, matrices in by_field.items()}


def _form(matrices: list[tuple[str, ...]]) -> Form:
    if all(map(_block_format, matrices)):
        return "blocks"
    return "int8" if all(INT8 in forms for forms in matrices) else "floats"


def _block_format(forms: tuple[str, ...]) -> str | None:
    return next((form for form in forms if form in ops.BLOCK_FORMATS), None)


def field_of(name: str) -> str | None:
    """The field of LlamaWeights that a matrix of a checkpoint is in; None for other tensors."""
    stem, _, kind = name.rpartition(".")
    if kind != "weight":
        return None
    return FIELDS.get(stem, FIELDS.get(".".join(stem.split(".")[-2:])))


def packed_bytes(checkpoint: StoredTensors, name: str, num_columns: int) -> int:
    """Bytes that some columns of a matrix take in its block format."""
    format = _block_format(checkpoint.forms(name))
    assert format is not None
    return ops.packed_bytes(format, checkpoint.shape(name)[0], num_columns)


class StoredForms:
    """The forms in which a checkpoint stores its matrices.

    Args:
        floats: the forms of the matrices that it stores as floats.

    Attributes:
        filling: fills weights in these forms.
    """

    def __init__(self, checkpoint: StoredTensors, floats: CodedForms) -> None:
        self._checkpoint, self._floats = checkpoint, floats
        self._forms, self.filling = runs_as(checkpoint), Filling(floats.coding)

    def form(self, matrix: NewMatrix) -> Form:
        stored = self._stored(matrix.field)
        return self._floats.form(matrix) if stored == "floats" else stored

    def packed_bytes(self, matrix: NewMatrix) -> int:
        if self._stored(matrix.field) == "floats":
            return self._floats.packed_bytes(matrix)
        names = (name for name in self._checkpoint.names if field_of(name) == matrix.field)
        return sum(packed_bytes(self._checkpoint, name, matrix.shape[-1]) for name in names)

    def fill(self, view: WeightView, name: str, columns: slice | None = None) -> None:
        """Fill a view with a tensor, or with some of its columns, which are whole blocks."""
        files, form = self._checkpoint, self._stored(field_of(name))
        width = files.shape(name)[-1]
        columns = columns or slice(0, width)
        if form == "blocks" and view.table is not None:
            format, blocks = _block_format(files.forms(name)), files.blocks(name)
            assert format is not None
            first, end = (at * blocks.shape[-1] // width for at in (columns.start, columns.stop))
            blocks = blocks[:, first:end].contiguous()
            self.filling.pack(view, blocks, format, columns.stop - columns.start)
        elif form == "int8" and view.scale is not None:
            view.fill_int8(*files.int8_rows(name))
        else:
            self.filling.fill(view, files.tensor(name)[..., columns].contiguous())

    def _stored(self, field: str | None) -> Form:
        return self._forms.get(field or "", "floats")
