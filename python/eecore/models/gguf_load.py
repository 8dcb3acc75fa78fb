"""A GGUF file's weights as they are: matrices in their own bits, several formats in one if need be.

Where any part of a matrix, in any layer, is stored as floats, all of it becomes floats of the
model's dtype.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from eecore import ops
from eecore.errors import UnsupportedModelError
from eecore.models.gguf_checkpoint import GGUFCheckpoint
from eecore.models.gguf_tokenizer import build_tokenizer
from eecore.models.llama import LlamaWeights
from eecore.models.tokenizer import Tokenizer
from eecore.models.weights import Filling
from eecore.ops import Matrix

__all__ = ["check_kinds", "gguf_tokenizer", "gguf_weights", "stored_dtype"]

FLOATS = {"F32": torch.float32, "F16": torch.float32, "BF16": torch.bfloat16}
"""What stored floats run as: float16's only in float32 is nothing lost."""
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


def check_kinds(checkpoint: GGUFCheckpoint) -> None:
    """Raise unless every tensor is of a type that runs as it is."""
    supported = (*ops.BLOCK_FORMATS, *FLOATS)
    for name, stored in checkpoint.stored_as.items():
        kind = checkpoint.kind(name)
        if kind not in supported:
            raise UnsupportedModelError(
                f"{checkpoint.place}: {stored}: supported are {', '.join(supported)}, got {kind} "
                "(eecore convert may read it)"
            )


def stored_dtype(checkpoint: GGUFCheckpoint) -> torch.dtype:
    """What the states run in: bfloat16 where the matrices are that, else float32."""
    kinds = {checkpoint.kind(name) for name in checkpoint.names if _field_of(name) is not None}
    return torch.bfloat16 if kinds == {"BF16"} else torch.float32


def gguf_weights(checkpoint: GGUFCheckpoint, dtype: torch.dtype) -> LlamaWeights:
    """The weights of a file whose kinds have been checked; norms and biases in ``dtype``."""
    weights = _empty(checkpoint, dtype)
    filling = Filling()
    for name, view in weights.by_checkpoint_name(checkpoint.config).items():
        if view.table is None:
            view.fill(checkpoint.tensor(name))
            continue
        in_features = checkpoint.shape(name)[-1]
        filling.pack(view, checkpoint.blocks(name), checkpoint.kind(name), in_features)
    return weights


def gguf_tokenizer(checkpoint: GGUFCheckpoint) -> Tokenizer | None:
    """The file's own; None, with a warning, where it is of a kind that is not read."""
    try:
        backend, settings = build_tokenizer(checkpoint.file, checkpoint.config.vocab_size)
    except UnsupportedModelError as error:
        warnings.warn(f"{error}; the model gets no tokenizer", stacklevel=4)
        return None
    roles = {role: token for role, token in settings.items() if role.endswith("_token")}
    template = settings.get("chat_template")
    return Tokenizer(
        backend, special_tokens=roles, chat_template=template, name=str(checkpoint.place)
    )


def _field_of(name: str) -> str | None:
    """Of LlamaWeights, that a matrix of a checkpoint is in; None of other tensors."""
    stem, _, kind = name.rpartition(".")
    if kind != "weight":
        return None
    return FIELDS.get(stem, FIELDS.get(".".join(stem.split(".")[-2:])))


def _packed_bytes(checkpoint: GGUFCheckpoint, name: str) -> int:
    return ops.packed_bytes(checkpoint.kind(name), *checkpoint.shape(name))


@dataclass(frozen=True)
class _Memory:
    """Makes a file's weights of those on device "meta"."""

    packed: dict[str, int]
    """Bytes of each field that is packed."""

    def real(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.empty_like(tensor, device="cpu")

    def matrix(self, field: str, matrix: Matrix) -> Matrix:
        bias = self.real(matrix.bias)
        if field not in self.packed:
            return Matrix(torch.empty_like(matrix.weight, device="cpu"), bias)
        table = torch.empty(matrix.weight.shape[:-1], dtype=torch.int64)
        return Matrix(torch.empty(self.packed[field], dtype=torch.uint8), bias, None, table)


def _empty(checkpoint: GGUFCheckpoint, dtype: torch.dtype) -> LlamaWeights:
    by_field: dict[str, list[str]] = {}
    for name in checkpoint.names:
        if (field := _field_of(name)) is not None:
            by_field.setdefault(field, []).append(name)
    packed = {
        field: sum(_packed_bytes(checkpoint, name) for name in names)
        for field, names in by_field.items()
        if all(checkpoint.kind(name) in ops.BLOCK_FORMATS for name in names)
    }
    memory = _Memory(packed)
    meta = LlamaWeights.empty(checkpoint.config, "meta", dtype)
    values: dict[str, Any] = {}
    for part in fields(LlamaWeights):
        value = getattr(meta, part.name)
        is_matrix = isinstance(value, Matrix)
        values[part.name] = memory.matrix(part.name, value) if is_matrix else memory.real(value)
    if checkpoint.config.tie_word_embeddings:
        values["lm_head"] = values["embed_tokens"]
    return LlamaWeights(**values)
