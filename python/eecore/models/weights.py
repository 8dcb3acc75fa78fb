"""Weights before a checkpoint is read: their memory, and the places that its tensors fill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eecore import ops
from eecore.models.int8 import quantise_rows
from eecore.ops import Matrix

Coding = Literal["int8", "int4"]
"""How matrices may be quantised as they are read."""
BLOCK_FORMATS = {"int8": "Q8_0", "int4": "Q4_1"}
"""Of matrices whose rows the blocks' columns fill; others get a scale per row of int8."""
HEAD_FORMAT = "Q8_0"
"""That of the LM head, which rounding harms most."""
BLOCK_COLUMNS = 32


def block_format(coding: Coding, *, is_head: bool) -> str:
    """What a matrix is rounded to."""
    return HEAD_FORMAT if is_head else BLOCK_FORMATS[coding]


@dataclass(frozen=True)
class NewWeights:
    """Makes uninitialised weights; on device "meta" they take no memory."""

    device: torch.device | str
    dtype: torch.dtype
    """Of all that is not quantised."""
    coding: Coding | None
    """Of the matrices; None: they are in that dtype too."""

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """In the weights' dtype, or the one given."""
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)

    def matrix(
        self,
        *shape: int,
        parts: Sequence[int] = (),
        bias: bool = False,
        is_head: bool = False,
    ) -> Matrix:
        """[..., out_features, in_features], coded, with a bias where wanted.

        Args:
            shape: of the weight.
            parts: out_features of each tensor of a checkpoint that fills it, if they are several.
            bias: whether there is one.
            is_head: whether it is the LM head.
        """
        *layers, out_features, in_features = shape
        given = self.tensor(*shape[:-1]) if bias else None
        if self.coding is None:
            return Matrix(self.tensor(*shape), given)
        if in_features % BLOCK_COLUMNS != 0:
            scale = self.tensor(*shape[:-1], dtype=torch.float32)
            return Matrix(self.tensor(*shape, dtype=torch.int8), given, scale)
        format = block_format(self.coding, is_head=is_head)
        each = (ops.packed_bytes(format, part, in_features) for part in parts or (out_features,))
        packed = self.tensor(math.prod(layers) * sum(each), dtype=torch.uint8)
        return Matrix(packed, given, None, self.tensor(*shape[:-1], dtype=torch.int64))


@dataclass(frozen=True)
class WeightView:
    """Where one tensor of a checkpoint goes."""

    weight: Tensor
    """Of the tensor's shape; int8 where there is a scale."""
    scale: Tensor | None = None
    """float32, of that shape without its last axis."""
    table: Tensor | None = None
    """int64, of that shape too; the weight is packed bytes then."""
    is_head: bool = False
    """Whether it is the LM head."""

    @classmethod
    def of(cls, matrix: Matrix, *, is_head: bool = False) -> WeightView:
        """Of a matrix, whose bias is a tensor of its own."""
        return cls(matrix.weight, matrix.scale, matrix.table, is_head)

    def fill(self, stored: Tensor) -> None:
        """Copy a stored tensor, converted to the weight's dtype and device, or made int8."""
        if self.scale is None:
            self.weight.copy_(stored)
            return
        whole, scale = quantise_rows(stored)
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
        format = block_format(self._coding, is_head=view.is_head)
        self.pack(view, ops.quantise_weight(floats, format), format, stored.shape[-1])

    def pack(self, view: WeightView, blocks: Tensor, format: str, in_features: int) -> None:
        """With blocks as a file has them, uint8 [num_rows, row_bytes]."""
        address = view.weight.data_ptr()
        offset = self._filled.get(address, 0)
        ops.pack_weight(blocks, format, offset=offset, packed=view.weight, table=view.table)
        self._filled[address] = offset + ops.packed_bytes(format, len(blocks), in_features)
