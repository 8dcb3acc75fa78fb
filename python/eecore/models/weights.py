"""Weights before a checkpoint is read: their memory, and the places that its tensors fill."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from eecore import ops
from eecore.models.int8 import quantise_rows
from eecore.ops import Matrix

Form = Literal["floats", "int8", "blocks"]
"""What holds a matrix: floats of the model's dtype, int8 with a scale for each row, or packed
blocks of 4 to 8 bits."""
Coding = Literal["int8", "int4"]
"""How matrices may be quantised as they are read."""
Care = Literal["usual", "more", "most"]
"""What rounding a matrix costs: most that of the LM head, more those of :func:`care_by_layer`."""
BLOCK_FORMATS: dict[Coding, dict[Care, str]] = {
    "int8": {"usual": "Q8_0", "more": "Q8_0", "most": "Q8_0"},
    "int4": {"usual": "Q4_1", "more": "Q5_1", "most": "Q8_0"},
}
"""Of matrices whose rows the blocks' columns fill; others get a scale per row of int8."""
BLOCK_COLUMNS = 32


def care_by_layer(num_layers: int) -> list[Care]:
    """Of the matrices that make values, and of those that end an MLP.

    The first and the last eighth of the layers get more bits and every third between: those that
    llama.cpp's Q4_K_M gives more to.
    """
    eighth = num_layers // 8
    last = 7 * num_layers // 8
    return [
        "more" if layer < eighth or layer >= last or (layer - eighth) % 3 == 2 else "usual"
        for layer in range(num_layers)
    ]


@dataclass(frozen=True)
class NewMatrix:
    """A matrix of the weights before it has memory."""

    field: str
    """Of the weights that it will be in: qkv, embed_tokens, ..."""
    shape: tuple[int, ...]
    """[..., out_features, in_features]"""
    parts: tuple[int, ...]
    """out_features of each tensor of a checkpoint that fills it."""
    is_head: bool
    """Whether it is the LM head, alone or besides the embeddings."""
    delicate: tuple[bool, ...]
    """Whether each of these tensors is of those that :func:`care_by_layer` is about."""

    def cares(self) -> Iterator[tuple[Care, int]]:
        """That for each tensor that fills it, layer by layer, and its out_features."""
        by_layer = care_by_layer(math.prod(self.shape[:-2]))
        for care in by_layer:
            for size, delicate in zip(self.parts, self.delicate, strict=True):
                yield "most" if self.is_head else care if delicate else "usual", size


class MatrixForms(Protocol):
    """The form of every matrix of a model."""

    def form(self, matrix: NewMatrix) -> Form: ...

    def packed_bytes(self, matrix: NewMatrix) -> int:
        """Of one in blocks, all of its layers together."""
        ...


@dataclass(frozen=True)
class CodedForms:
    """Those that matrices are quantised to as they are read; None: all are floats."""

    coding: Coding | None

    def form(self, matrix: NewMatrix) -> Form:
        is_table = matrix.field == "embed_tokens" and not matrix.is_head
        if self.coding is None or is_table:
            return "floats"
        return "int8" if matrix.shape[-1] % BLOCK_COLUMNS != 0 else "blocks"

    def packed_bytes(self, matrix: NewMatrix) -> int:
        assert self.coding is not None
        formats = BLOCK_FORMATS[self.coding]
        return sum(
            ops.packed_bytes(formats[care], out_features, matrix.shape[-1])
            for care, out_features in matrix.cares()
        )


ALL_FLOATS = CodedForms(None)


@dataclass(frozen=True)
class NewWeights:
    """Makes uninitialised weights; on device "meta" they take no memory."""

    device: torch.device | str
    dtype: torch.dtype
    """Of all that is not quantised."""
    forms: MatrixForms = ALL_FLOATS

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """In the weights' dtype, or the one given."""
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)

    def matrix(
        self,
        field: str,
        *shape: int,
        parts: Sequence[int] = (),
        delicate: Sequence[bool] = (),
        bias: bool = False,
        is_head: bool = False,
    ) -> Matrix:
        """[..., out_features, in_features] in its form, with a bias where wanted.

        Args:
            field: of the weights that it will be in.
            shape: of the weight.
            parts: out_features of each tensor of a checkpoint that fills it, if they are several.
            delicate: whether each of them is, see :func:`care_by_layer`; by default none.
            bias: whether there is one.
            is_head: whether it is the LM head, alone or besides the embeddings.
        """
        sizes = tuple(parts) or shape[-2:-1]
        matrix = NewMatrix(field, shape, sizes, is_head, tuple(delicate) or (False,) * len(sizes))
        rows, form = shape[:-1], self.forms.form(matrix)
        given = self.tensor(*rows) if bias else None
        if form == "floats":
            return Matrix(self.tensor(*shape), given)
        if form == "int8":
            scale = self.tensor(*rows, dtype=torch.float32)
            return Matrix(self.tensor(*shape, dtype=torch.int8), given, scale)
        packed = self.tensor(self.forms.packed_bytes(matrix), dtype=torch.uint8)
        return Matrix(packed, given, None, self.tensor(*rows, dtype=torch.int64))


@dataclass(frozen=True)
class WeightView:
    """Where one tensor of a checkpoint goes."""

    weight: Tensor
    """Of the tensor's shape; int8 where there is a scale."""
    scale: Tensor | None = None
    """float32, of that shape without its last axis."""
    table: Tensor | None = None
    """int64, of that shape too; the weight is packed bytes then."""
    care: Care = "usual"
    """Where it is quantised."""

    @classmethod
    def of(cls, matrix: Matrix, care: Care = "usual") -> WeightView:
        """Of a matrix, whose bias is a tensor of its own."""
        return cls(matrix.weight, matrix.scale, matrix.table, care)

    @classmethod
    def of_layers(cls, matrix: Matrix, *, delicate: bool = False) -> list[WeightView]:
        """Of each layer's, see :func:`care_by_layer`."""
        parts = matrix.unbind()
        usual: list[Care] = ["usual"] * len(parts)
        cares = care_by_layer(len(parts)) if delicate else usual
        return [cls.of(part, care) for part, care in zip(parts, cares, strict=True)]

    def fill(self, stored: Tensor) -> None:
        """Copy a stored tensor, converted to the weight's dtype and device, or made int8."""
        if self.scale is None:
            self.weight.copy_(stored)
            return
        self.fill_int8(*quantise_rows(stored))

    def fill_int8(self, whole: Tensor, scale: Tensor) -> None:
        """Copy int8 rows and the scale of each."""
        assert self.scale is not None
        self.weight.copy_(whole)
        self.scale.copy_(scale)


class Filling:
    """Fills the places of a checkpoint's tensors, packed weights one tensor behind the other.

    Args:
        coding: what floats are quantised to where a place is packed.
    """

    def __init__(self, coding: Coding | None = None) -> None:
        self._coding = coding
        self._filled: dict[int, int] = {}  # bytes of each packed weight, by its address

    def fill(self, view: WeightView, stored: Tensor) -> None:
        """With a tensor of floats, converted or quantised as its place wants it."""
        if view.table is None:
            view.fill(stored)
            return
        floats = stored if stored.dtype in (torch.float32, torch.bfloat16) else stored.float()
        assert self._coding is not None
        format = BLOCK_FORMATS[self._coding][view.care]
        self.pack(view, ops.quantise_weight(floats, format), format, stored.shape[-1])

    def pack(self, view: WeightView, blocks: Tensor, format: str, in_features: int) -> None:
        """With blocks as a file has them, uint8 [num_rows, row_bytes]."""
        address = view.weight.data_ptr()
        offset = self._filled.get(address, 0)
        ops.pack_weight(blocks, format, offset=offset, packed=view.weight, table=view.table)
        self._filled[address] = offset + ops.packed_bytes(format, len(blocks), in_features)
