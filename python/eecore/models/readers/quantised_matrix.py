"""Matrices of whole numbers with scales and zero points for groups of columns.

``w[r, c] = (quant[r, c] - zero[r, group[c]]) * scale[r, group[c]]`` in float32. Converted blocks
hold the same numbers, bit for bit; a matrix that no blocks can hold is dequantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eecore.models.readers.checkpoint import INT8

BLOCK = 32
"""Columns of a block."""
BLOCK_BYTES = {"Q4_0": 18, "Q5_0": 22, "Q8_0": 34}
ROW_STEP = 16
NUMBERS_AT_ONCE = 1 << 21


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """A matrix of 4 or 8 bits."""

    bits: int
    quants: Callable[[int, int], Tensor]
    """uint8 [end - begin, num_columns] of rows ``begin..end-1``, multiples of 16 or the end."""
    scales: Tensor
    """[num_rows, num_groups], of any float dtype."""
    zeros: Tensor
    """uint8 [num_rows, num_groups]"""
    groups: Tensor
    """int64 [num_columns]: the group of each column."""

    @property
    def num_rows(self) -> int:
        return len(self.scales)

    @property
    def num_columns(self) -> int:
        return len(self.groups)

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms that hold the matrix exactly: int8 with a scale a row, and a block format."""
        row_scales = self.bits == 8 and self.scales.shape[1] == 1 and self._is_centred
        rows = (INT8,) if row_scales else ()
        return rows if self.not_in_blocks else (*rows, self._block_format)

    @cached_property
    def not_in_blocks(self) -> str | None:
        """Why no block format holds the matrix; None if one does."""
        if self.num_columns % BLOCK:
            return f"{self.num_columns} columns do not fill blocks of {BLOCK}"
        by_block = self.groups.view(-1, BLOCK)
        if not (by_block == by_block[:, :1]).all():
            return f"groups change within {BLOCK} columns"
        if not torch.equal(self.scales.half().float(), self.scales.float()):
            return "float16 does not hold its scales"
        if self.bits == 8 and not self._is_centred:
            return "8 bits do not hold its numbers less their zero points"
        return None

    def dequantised(self) -> Tensor:
        """The matrix in floats, float32 [num_rows, num_columns]."""
        out = torch.empty(self.num_rows, self.num_columns)
        for begin, end in self._row_ranges():
            whole = self.quants(begin, end).to(torch.int16)
            whole -= self.zeros[begin:end].to(torch.int16)[:, self.groups]
            scales = self.scales[begin:end].float()[:, self.groups]
            torch.mul(whole, scales, out=out[begin:end])
        return out

    def int8_rows(self) -> tuple[Tensor, Tensor]:
        """int8 [num_rows, num_columns], and each row's scale, float32 [num_rows]."""
        out = torch.empty(self.num_rows, self.num_columns, dtype=torch.int8)
        for begin, end in self._row_ranges():
            out[begin:end] = self.quants(begin, end).view(torch.int8) ^ -128
        return out, self.scales[:, 0].float()

    def blocks(self) -> Tensor:
        """uint8 [num_rows, row_bytes]: the matrix in its block format."""
        num_blocks = self.num_columns // BLOCK
        out = torch.empty(
            self.num_rows, num_blocks, BLOCK_BYTES[self._block_format], dtype=torch.uint8
        )
        groups = self.groups[::BLOCK]
        for begin, end in self._row_ranges():
            blocks = out[begin:end]
            quants = self.quants(begin, end).view(end - begin, num_blocks, BLOCK)
            scales = self.scales[begin:end].half()[:, groups, None]
            blocks[..., :2] = scales.view(torch.uint8)
            if self.bits == 8:
                blocks[..., 2:] = quants ^ 128
                continue
            if self._block_format == "Q5_0":
                quants = quants + 16 - self.zeros[begin:end][:, groups, None]
                blocks[..., 2:6] = _bit_by_bit(quants >> 4)
            low, high = (quants & 15).chunk(2, -1)
            blocks[..., -BLOCK // 2 :] = low | high << 4
        return out.flatten(1)

    @cached_property
    def _is_centred(self) -> bool:
        """Whether every zero point is the middle of the numbers' range."""
        return bool((self.zeros == 1 << self.bits - 1).all())

    @property
    def _block_format(self) -> str:
        if self.bits == 8:
            return "Q8_0"
        return "Q4_0" if self._is_centred else "Q5_0"  # Q5_0 holds -16..15

    def _row_ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows that fit into a CPU's cache, together with their converted form."""
        step = max(1, NUMBERS_AT_ONCE // self.num_columns // ROW_STEP) * ROW_STEP
        for begin in range(0, self.num_rows, step):
            yield begin, min(begin + step, self.num_rows)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """uint8 [..., n * 32 / bits]: the numbers of 4 or 8 bits in int32 words [..., n], the lowest
    first."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def _bit_by_bit(bits: Tensor) -> Tensor:
    """uint8 [..., n / 8]: bits [..., n], eight in a byte, the lowest first."""
    by_byte = bits.view(*bits.shape[:-1], -1, 8) << torch.arange(8, dtype=torch.uint8)
    return by_byte.sum(-1, dtype=torch.uint8)
