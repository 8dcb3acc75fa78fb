"""Parts of random calls of the ops: awkward sizes, strides and places in memory.

Tensors lie anywhere in memory of their own, which holds other numbers around them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

from cases import TOLERANCES, Tolerance
from eecore import ops
from packed_blocks import SCALES, SMALL_FORMATS, packed_layers

Arguments = dict[str, Any]
# Arguments in the schema's order, and a check of them after the call against those before it.
Checked = tuple[Arguments, Callable[[Arguments, Arguments], None]]
EXACT = Tolerance(0.0, 0.0)
# A step of float8: float32 may round to the other side of a midpoint.
FLOAT8_STEP = Tolerance(rtol=0.13, atol=2.0**-9)


class Maker:
    """Random values, all from one seed."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self._generator = torch.Generator().manual_seed(random.getrandbits(62))

    def chance(self, probability: float = 0.5) -> bool:
        return self.random.random() < probability

    def one_of(self, *values: Any) -> Any:
        return self.random.choice(values)

    def size(self, most: int = 20, least: int = 0) -> int:
        """A size: small, around a power of two, or any."""
        around = 1 << self.random.randrange(max(most, 1).bit_length())
        chosen = self.one_of(least, least + 1, around - 1, around, around + 1, most)
        if self.chance():
            chosen = self.random.randint(least, most)
        return max(least, min(int(chosen), most))

    def dtype(self) -> torch.dtype:
        return torch.float32 if self.chance() else torch.bfloat16

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def whole(self, below: int, *shape: int) -> Tensor:
        return torch.randint(max(below, 1), shape, generator=self._generator)

    def flags(self, *shape: int, share: float = 0.5) -> Tensor:
        return self.placed(self.uniform(*shape) < share)

    def shuffled(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator)

    def maybe(self, make: Callable[[], Any]) -> Any:
        """What ``make`` makes, or None."""
        return make() if self.chance() else None

    def placed(self, values: Tensor, contiguous_dims: int = 8) -> Tensor:
        """The values somewhere in other memory; all but the last dimensions may have gaps."""
        gaps = [0] * values.dim()
        for axis in range(1, values.dim() - contiguous_dims + 1):
            gaps[axis] = self.one_of(0, 0, 1, 8)
        shape = [size + gap for size, gap in zip(values.shape, gaps, strict=True)]
        start = self.one_of(0, 0, 1, 5)
        room = math.prod(shape)
        if values.is_floating_point():
            memory = torch.full((start + room + 3,), torch.nan).to(values.dtype)
        else:
            memory = torch.ones(start + room + 3).to(values.dtype)
        place = memory[start : start + room].view(shape)
        place = place[tuple(slice(gap, None) for gap in gaps)]
        return place.copy_(values)

    def states(self, rows: int, size: int, dtype: torch.dtype, deviation: float = 1.0) -> Tensor:
        return self.placed((self.normal(rows, size) * deviation).to(dtype), 1)

    def columns(self, most: int) -> int:
        """The width of a weight; sometimes one that blocks fill."""
        return self.one_of(32, 64, 256) if self.chance(0.2) else self.size(most, 1)

    def weight(self, dtype: torch.dtype, *shape: int) -> ops.Matrix:
        """A weight [..., out_features, in_features] in the dtype, int8 with a scale, or blocks."""
        deviation = shape[-1] ** -0.5
        kind = self.random.random()
        if kind < 0.3:
            scale = (self.uniform(*shape[:-1]) + 0.1) * deviation / 127
            whole = (self.whole(255, *shape) - 127).to(torch.int8)
            return ops.Matrix(self.placed(whole, 1), None, self.placed(scale))
        if kind < 0.6 and shape[-1] % 32 == 0 and all(shape):
            formats = SCALES if shape[-1] % 256 == 0 else SMALL_FORMATS
            layers = [[(self.one_of(*formats), shape[-2])] for _ in range(shape[0])]
            seed = self.random.getrandbits(30)
            if len(shape) == 3:
                return packed_layers(layers, shape[-1], size=deviation, seed=seed)
            made = packed_layers(layers[:1], shape[-1], size=deviation, seed=seed)
            assert made.table is not None
            return made._replace(table=made.table[0])
        return ops.Matrix(self.placed((self.normal(*shape) * deviation).to(dtype), 1))

    def inputs(
        self, matrix: ops.Matrix, rows: int, columns: int, dtype: torch.dtype, size: float = 1.0
    ) -> Tensor:
        """The input of a matrix product.

        A packed product rounds float32 to 8 bits. These numbers do not round differently by their
        last bit, so that the oracle's are the same.
        """
        if matrix.table is None or dtype != torch.float32:
            return self.states(rows, columns, dtype, size)
        blocks = (self.whole(253, rows, columns) - 126).float().view(rows, columns // 32, 32)
        blocks += 0.8 * self.uniform(*blocks.shape) - 0.4
        largest = self.whole(32, *blocks.shape[:2], 1)
        blocks.scatter_(-1, largest, self._signs(*largest.shape) * 127)
        blocks[self.uniform(*blocks.shape[:2]) < 0.05] = 0
        return self.placed(blocks.view(rows, columns) * (size / 64), 1)

    def norm_of(self, matrix: ops.Matrix, dtype: torch.dtype, *shape: int) -> Tensor:
        """The weight of a norm before a matrix; see :meth:`inputs`."""
        if matrix.table is None or dtype != torch.float32:
            return self.placed((1 + self.normal(*shape) / 8).to(dtype), 1)
        return self.placed((1 + self.normal(1) / 8) * self._signs(*shape), 1)

    def _signs(self, *shape: int) -> Tensor:
        return 1.0 - 2 * self.whole(2, *shape)

    def product(
        self, rows: int, out_features: int, dtype: torch.dtype, activations: tuple[str | None, ...]
    ) -> Arguments:
        """A few rows times a weight, with a norm before it or not."""
        columns = self.columns(200)
        matrix = self.weight(dtype, out_features, columns)
        return {
            "x": self.inputs(matrix, rows, columns, dtype),
            "norm_weight": self.maybe(lambda: self.norm_of(matrix, dtype, columns)),
            "eps": 1e-6,
            "weight": matrix.weight,
            "weight_scale": matrix.scale,
            "weight_table": matrix.table,
            "bias": self.maybe(lambda: self.placed(self.normal(out_features).to(dtype))),
            "activation": self.one_of(*activations),
        }

    def rotary(self, positions: int, head_dim: int) -> Tensor:
        half = self.size(head_dim // 2)
        angles = self.normal(positions, half) * 10
        return self.placed(torch.cat((angles.cos(), angles.sin()), -1))

    def cache(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A cache [..., num_pages, page_size, num_kv_heads, head_dim], strides in any order."""
        order = list(range(len(shape) - 1))
        if self.chance():
            self.random.shuffle(order)
        values = torch.full([shape[axis] for axis in order] + [shape[-1]], torch.nan).to(dtype)
        return self.placed(values, 1).movedim(list(range(len(order))), order)

    def caches(self, *shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The caches of keys and of values, side by side in one memory or in two."""
        if self.chance(0.7):
            return self.cache(*shape, dtype=dtype), self.cache(*shape, dtype=dtype)
        *rest, heads, width = shape
        both = self.cache(*rest, 2 * heads, width, dtype=dtype)
        return both[..., :heads, :], both[..., heads:, :]

    def cache_format(
        self, dtype: torch.dtype, *shape: int
    ) -> tuple[torch.dtype, dict[str, Tensor | None]]:
        """The dtype of the caches of a model, and scales of this shape."""
        if self.chance(0.7):
            return dtype, {"key_scales": None, "value_scales": None}
        scales = {
            name: self.maybe(lambda: self.placed(0.1 + self.uniform(*shape)))
            for name in ("key_scales", "value_scales")
        }
        return torch.float8_e4m3fn, scales

    def slots(self, count: int, cache: Tensor) -> Tensor:
        """Distinct slots, and some -1."""
        chosen = self.shuffled(cache.shape[-4] * cache.shape[-3])[:count]
        return self.placed(torch.where(self.uniform(count) < 0.1, -1, chosen))


def assert_close(got: Tensor, want: Tensor, tolerance: Tolerance, name: str) -> None:
    """Tensors have to be equal up to rounding, with NaN and infinity at the same places."""
    torch.testing.assert_close(
        got.double() if got.is_floating_point() else got,
        want.double() if got.is_floating_point() else want.to(got.dtype),
        rtol=tolerance.rtol,
        atol=tolerance.atol,
        equal_nan=True,
        msg=lambda text: f"{name}: {text}",
    )


def compare(
    oracle: Callable[[Arguments], dict[str, Tensor]], tolerance: Tolerance = EXACT
) -> Callable[[Arguments, Arguments], None]:
    """A check of the written arguments against an oracle."""

    def check(before: Arguments, after: Arguments) -> None:
        for name, want in oracle(before).items():
            is_float8 = after[name].dtype == torch.float8_e4m3fn
            assert_close(after[name], want, FLOAT8_STEP if is_float8 else tolerance, name)

    return check


def out_of(
    answer: Callable[..., Tensor], *without: str
) -> Callable[[Arguments], dict[str, Tensor]]:
    """The oracle of an op that writes ``out``: a reference that takes its other arguments."""

    def oracle(before: Arguments) -> dict[str, Tensor]:
        taken = before.keys() - {"out", *without}
        return {"out": answer(**{name: before[name] for name in taken})}

    return oracle


def looser(dtype: torch.dtype, factor: float = 4.0) -> Tolerance:
    tolerance = TOLERANCES[dtype]
    return Tolerance(factor * tolerance.rtol, factor * tolerance.atol)
