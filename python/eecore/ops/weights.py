"""Matrices in floats, in int8, or packed in blocks of 2 to 8 bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from eecore import _C
from eecore.ops.registered import compiled

__all__ = [
    "BLOCK_FORMATS",
    "FLOAT_BLOCK_FORMATS",
    "Matrix",
    "in_huge_pages",
    "pack_weight",
    "packed_bytes",
    "quantise_weight",
    "unpack_weight",
]

# Weights are packed on the CPU; CUDA reads them as they are packed.
_pack_weight = compiled("pack_weight", cpu_only=True)
_quantise_weight = compiled("quantise_weight", cpu_only=True)
_unpack_weight = compiled("unpack_weight", cpu_only=True)


class Matrix(NamedTuple):
    """The linear layers of all layers at once, or of one layer."""

    weight: Tensor
    """[num_layers, out_features, in_features], any layer and row stride; int8 with a scale. For one
    layer [out_features, in_features]. With a table uint8 [num_bytes], for all layers."""
    bias: Tensor | None = None
    """[num_layers, out_features]"""
    scale: Tensor | None = None
    """float32 [num_layers, out_features], see :func:`skinny_linear`."""
    table: Tensor | None = None
    """int64 [num_layers, out_features], see :func:`pack_weight`."""

    @property
    def is_quantised(self) -> bool:
        return self.scale is not None or self.table is not None

    def rows(self, rows: slice) -> Matrix:
        """The matrix of some of each layer's outputs, as a view."""
        bias = None if self.bias is None else self.bias[..., rows]
        if self.table is not None:
            return Matrix(self.weight, bias, None, self.table[..., rows])
        scale = None if self.scale is None else self.scale[..., rows]
        return Matrix(self.weight[..., rows, :], bias, scale)

    def unbind(self) -> list[Matrix]:
        """The matrix of each layer, as views."""
        num_layers = len(self.weight if self.table is None else self.table)
        weights = [self.weight] * num_layers if self.table is not None else self.weight.unbind(0)
        each = (
            [None] * num_layers if part is None else part.unbind(0)
            for part in (self.bias, self.scale, self.table)
        )
        return [Matrix(*parts) for parts in zip(weights, *each, strict=True)]


def arguments_of(fields: Iterable[Tensor | Matrix | None]) -> Iterator[Tensor | None]:
    """The arguments of a schema: each matrix's tensors but its table, which comes at the end."""
    for field in fields:
        if isinstance(field, Matrix):
            yield from field[:3]
        else:
            yield field


def tables_of(fields: Iterable[Tensor | Matrix | None]) -> list[Tensor | None]:
    """The tables of the matrices, in order."""
    return [field.table for field in fields if isinstance(field, Matrix)]


BLOCK_FORMATS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"),
    *("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
"""Block formats of GGUF files that :func:`pack_weight` takes."""


FLOAT_BLOCK_FORMATS = ("Q4_1", "Q5_1", "Q8_0")
"""Block formats that :func:`quantise_weight` makes."""


def in_huge_pages(memory: Tensor) -> Tensor:
    """The same tensor, in pages of 2 MiB where the system has them: weights, which are read from
    one end to the other, are then read faster.

    Args:
        memory: on the CPU, contiguous, and not written yet: its pages are taken at the first write.
    """
    _C.ask_for_huge_pages(memory.data_ptr(), memory.nbytes)
    return memory


def packed_bytes(format: str, num_rows: int, in_features: int) -> int:
    """How many bytes :func:`pack_weight` fills, a multiple of 64.

    Raises:
        ValueError: an unknown format, or rows that its blocks do not fill.
    """
    return int(_C.packed_bytes(format, num_rows, in_features))


def pack_weight(
    blocks: Tensor,
    format: str,
    *,
    offset: int = 0,
    packed: Tensor | None = None,
    table: Tensor | None = None,
) -> Matrix:
    """A weight in the blocks of a GGUF file, laid out for the products; nothing is rounded.

    The result is a :class:`Matrix` without a bias: bytes, in which 16 rows at a time lie, and a
    table with the place, the format and the width of every row. Rows of a table may be taken apart
    and put together at will, so one weight may hold rows of several formats::

        packed = ops.pack_weight(blocks, "Q4_0")
        y = ops.skinny_linear(x, packed.weight, weight_table=packed.table)

    In products on the CPU each (normed) row of x is quantised to 8 bits with a scale for each block
    of the weight's format, 32 or 256 columns, at 1/127 of their largest magnitude; llama.cpp does
    so too. Products within a block, with the sub-scales of K formats and IQ4_XS, are summed as
    exact integers, those sums in float32 in ascending order of columns. A row that holds NaN or
    infinity gives NaN throughout. On CUDA x stays as it is: for bfloat16 and
    float16 the products with the whole numbers of a block are summed in float32, then scaled; for
    float32 the products with the floats that the weight stands for are summed.

    Weights are packed on the CPU. For CUDA the two tensors are moved there as they are. The table
    is not checked there: an invalid place is read wherever it points.

    Args:
        blocks: uint8 [num_rows, row_bytes], whole blocks, any row stride.
        format: one of :data:`BLOCK_FORMATS`.
        offset: where in ``packed`` the rows go, a multiple of 64.
        packed: uint8 [num_bytes], allocated when left out.
        table: int64 [num_rows], contiguous; allocated when left out.
    """
    num_rows, row_bytes = blocks.shape
    if packed is None:
        in_features = int(_C.block_columns(format, row_bytes))
        packed = blocks.new_empty(offset + packed_bytes(format, num_rows, in_features))
    if table is None:
        table = blocks.new_empty(num_rows, dtype=torch.int64)
    _pack_weight(blocks, format, offset, packed, table)
    return Matrix(packed, None, None, table)


def quantise_weight(weight: Tensor, format: str, *, blocks: Tensor | None = None) -> Tensor:
    """Round a weight to blocks of 4, 5 or 8 bits, as GGUF files have them, for :func:`pack_weight`.

    For 32 numbers Q4_1 and Q5_1 keep whole numbers, a scale and a minimum, both float16. Several
    ranges of the block are tried, then the scale and minimum that fit the whole numbers best, with
    which the numbers are rounded again. The attempt with the least squared error is kept, where
    each number is weighted by its magnitude plus the root mean square of the 32. Q8_0 has a scale,
    1/127 of the largest magnitude. A block with NaN, infinity or a number beyond float16 becomes
    NaN. On the CPU only.

    Args:
        weight: float32 or bfloat16 [num_rows, in_features], any row stride; in_features a multiple
            of 32.
        format: one of :data:`FLOAT_BLOCK_FORMATS`.
        blocks: uint8 [num_rows, row_bytes], any row stride; allocated when left out.

    Returns:
        ``blocks``.
    """
    if blocks is None:
        num_rows, in_features = weight.shape
        row_bytes = int(_C.row_bytes(format, in_features))
        blocks = weight.new_empty(num_rows, row_bytes, dtype=torch.uint8)
    _quantise_weight(weight, format, blocks)
    return blocks


def unpack_weight(packed: Tensor, table: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rows of a packed weight as the float32 numbers that their format defines, bit for bit.

    Args:
        packed: uint8 [num_bytes], see :func:`pack_weight`.
        table: int64 [num_rows], any rows of one width.
        out: float32 [num_rows, in_features], any row stride that keeps rows apart.

    Returns:
        ``out``, allocated when left out.
    """
    if out is None:
        in_features = 32 * (int(table[0]) >> 8 & 0xFFFFFF) if len(table) else 0
        out = torch.empty(len(table), in_features, dtype=torch.float32, device=packed.device)
    _unpack_weight(packed, table, out)
    return out
