"""Weights as they are stored: matrices in their own bits, several formats in one if need be.

Where any part of a matrix, in any layer, can only be had as floats, all of it becomes floats of the
model's dtype.
"""

from __future__ import annotations

import math
from typing import Protocol, cast

import torch
from torch import Tensor

from eecore import ops
from eecore.config import ModelConfig
from eecore.errors import ModelError
from eecore.models.llama import LlamaWeights
from eecore.models.readers.checkpoint import StoredTensors, embeddings_name
from eecore.models.weights import Filling, Form, NewMatrix, NewWeights

__all__ = ["INT8", "PackedTensors", "field_of", "memory_of", "packed_weights", "runs_as"]

INT8 = "int8"
"""The form of a matrix in whole numbers, with a float32 scale for each row."""
FIELDS = {
    "self_attn.q_proj": "qkv",
    "self_attn.k_proj": "qkv",
    "self_attn.v_proj": "qkv",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate_up",
    "mlp.up_proj": "gate_up",
    "mlp.down_proj": "down",
    "model.embed_tokens": "embed_tokens",
    "lm_head": "lm_head",
}


class PackedTensors(StoredTensors, Protocol):
    """Tensors, some of which can be had in fewer bits than floats."""

    def forms(self, name: str) -> tuple[str, ...]:
        """What holds a tensor exactly besides floats: a block format, :data:`INT8`, or both."""
        ...

    def tensor(self, name: str) -> Tensor:
        """A tensor in floats."""
        ...

    def blocks(self, name: str) -> Tensor:
        """uint8 [num_rows, row_bytes], in the block format that a matrix has."""
        ...


class Int8Tensors(PackedTensors, Protocol):
    """Those whose forms may be :data:`INT8`."""

    def int8_rows(self, name: str) -> tuple[Tensor, Tensor]:
        """int8 [num_rows, num_columns] and float32 [num_rows]."""
        ...


def packed_weights(
    checkpoint: PackedTensors, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> LlamaWeights:
    """The weights of a checkpoint that has been checked; norms and biases in ``dtype``.

    Raises:
        ModelError: there is no memory for them.
    """
    try:
        new = NewWeights(device, dtype, _StoredForms(checkpoint))
        weights = LlamaWeights.empty(config, new)
    except RuntimeError as error:  # of torch, which is out of memory
        raise ModelError(
            f"{checkpoint.place}: expected memory for the weights on {device}, got: "
            f"{str(error).splitlines()[0]}"
        ) from None
    filling = Filling()
    embeddings = embeddings_name(config, checkpoint)
    for name, view in weights.by_checkpoint_name(config, embeddings).items():
        if view.table is not None:
            format = _block_format(checkpoint.forms(name))
            assert format is not None
            in_features = checkpoint.shape(name)[-1]
            filling.pack(view, checkpoint.blocks(name), format, in_features)
        elif view.scale is not None:
            view.fill_int8(*cast("Int8Tensors", checkpoint).int8_rows(name))
        else:
            view.fill(checkpoint.tensor(name))
    return weights


def memory_of(
    checkpoint: PackedTensors, config: ModelConfig, dtype: torch.dtype
) -> dict[str, tuple[str, int]]:
    """What each tensor of a checkpoint becomes, "Q4_0" or "F32" for two, and its bytes."""
    forms = runs_as(checkpoint)
    floats = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    found = {}
    meta = LlamaWeights.empty(config, NewWeights("meta", dtype))
    for name in meta.by_checkpoint_name(config, embeddings_name(config, checkpoint)):
        size, field = math.prod(checkpoint.shape(name)), field_of(name)
        form = "floats" if field is None else forms[field]
        if form == "floats":
            found[name] = (floats, size * dtype.itemsize)
        elif form == "int8":
            found[name] = (INT8, size + 4 * checkpoint.shape(name)[0])
        else:
            format = _block_format(checkpoint.forms(name))
            found[name] = (str(format), packed_bytes(checkpoint, name))
    return found


def runs_as(checkpoint: PackedTensors) -> dict[str, Form]:
    """The form of each field of the weights, which its matrices in all layers share."""
    by_field: dict[str, list[tuple[str, ...]]] = {}
    for name in checkpoint.names:
        if (field := field_of(name)) is not None:
            by_field.setdefault(field, []).append(checkpoint.forms(name))
    # Embeddings of a tied model that was saved as its head become floats.
    forms: dict[str, Form] = {"embed_tokens": "floats"}
    return forms | {field: _form(matrices) for field, matrices in by_field.items()}


def _form(matrices: list[tuple[str, ...]]) -> Form:
    if all(map(_block_format, matrices)):
        return "blocks"
    return "int8" if all(INT8 in forms for forms in matrices) else "floats"


def _block_format(forms: tuple[str, ...]) -> str | None:
    return next((form for form in forms if form in ops.BLOCK_FORMATS), None)


def field_of(name: str) -> str | None:
    """Of LlamaWeights, that a matrix of a checkpoint is in; None of other tensors."""
    stem, _, kind = name.rpartition(".")
    if kind != "weight":
        return None
    return FIELDS.get(stem, FIELDS.get(".".join(stem.split(".")[-2:])))


def packed_bytes(checkpoint: PackedTensors, name: str) -> int:
    """Of memory that a matrix takes in its block format."""
    format = _block_format(checkpoint.forms(name))
    assert format is not None
    return ops.packed_bytes(format, *checkpoint.shape(name))


class _StoredForms:
    """Those that a checkpoint has its matrices in."""

    def __init__(self, checkpoint: PackedTensors) -> None:
        self._checkpoint = checkpoint
        self._forms = runs_as(checkpoint)

    def form(self, matrix: NewMatrix) -> Form:
        return self._forms[matrix.field]

    def packed_bytes(self, matrix: NewMatrix) -> int:
        names = (name for name in self._checkpoint.names if field_of(name) == matrix.field)
        return sum(packed_bytes(self._checkpoint, name) for name in names)
