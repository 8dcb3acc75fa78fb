"""Products of packed blocks: exact sums within a block, rounded once, on every CPU and every tile.

Portable kernels round a product before they add it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import cases
import reference
from coded_calls import FORMATS
from eecore import _C, ops
from packed_blocks import SCALES, block_sizes, packed_layers, random_blocks

# Rows of x and of the weight, and super-blocks: around tiles, and the fewest rows that take them.
SIZES = ((1, 21, 3), (8, 16, 1), (9, 33, 2), (13, 5, 1), (16, 16, 3), (17, 40, 1), (33, 21, 2),
         (47, 16, 1), (259, 18, 2))  # fmt: skip


@pytest.fixture(autouse=True)
def capability_as_before() -> Iterator[None]:
    before = _C.cpu_capability()
    yield
    _C.set_cpu_capability(before)


def with_scales(blocks: Tensor, format: str, values: tuple[float, float]) -> Tensor:
    """The blocks with these numbers as scale and minimum."""
    first, sizes = SCALES[format]
    changed = blocks.view(len(blocks), -1, block_sizes(format)[1]).clone()
    if format == "MXFP4":
        changed[..., 0] = 128 if values[0] else 0
    else:
        halves = torch.tensor(values[: len(sizes)], dtype=torch.float16).view(torch.uint8)
        changed[..., first : first + 2 * len(sizes)] = halves
    return changed.flatten(1)


def scales_of(blocks: Tensor, format: str) -> list[np.ndarray]:
    """[rows, blocks, 1] float32: the scales of blocks, and their minima where there are any."""
    first, sizes = SCALES[format]
    given = blocks.view(len(blocks), -1, block_sizes(format)[1])
    if format == "MXFP4":
        return [np.exp2(given[..., :1].numpy().astype(np.float32) - 128)]
    halves = given[..., first : first + 2 * len(sizes)].contiguous().view(torch.float16)
    return [halves[..., i : i + 1].float().numpy() for i in range(len(sizes))]


def add_product(a: np.ndarray, b: np.ndarray, total: np.ndarray, *, fused: bool) -> np.ndarray:
    """a * b + total in float32; fused: rounded once."""
    if not fused:
        return a * b + total
    return (a.astype(np.longdouble) * b + total).astype(np.float32)


def by_definition(x: Tensor, blocks: Tensor, format: str, *, fused: bool = True) -> Tensor:
    """The product as :func:`eecore.ops.pack_weight` defines it."""
    columns = block_sizes(format)[0]
    whole = reference.pack_weight(with_scales(blocks, format, (1, 0)), format)
    scales = scales_of(blocks, format)
    minima = reference.pack_weight(with_scales(blocks, format, (0, 1)), format)
    given = x.unflatten(1, (-1, columns))
    bound = given.abs().amax(2, keepdim=True)
    q = (given * (127 / bound)).round().double().numpy()
    x_scale = (bound / 127).numpy()
    quants, least = (each.double().unflatten(1, (-1, columns)).numpy() for each in (whole, minima))
    total = np.zeros((len(x), len(blocks)), np.float32)
    for i in range(q.shape[1]):
        of_x = x_scale[:, i]
        exact = (q[:, i] @ quants[:, i].T).astype(np.float32)
        total = add_product(exact, of_x * scales[0][:, i].T, total, fused=fused)
        if len(scales) == 1:
            continue
        if columns == 256:
            exact = (q[:, i] @ least[:, i].T).astype(np.float32)
            total = add_product(exact, of_x * scales[1][:, i].T, total, fused=fused)
        else:
            sums = of_x * q[:, i].sum(1, keepdims=True).astype(np.float32)
            total = add_product(sums, scales[1][:, i].T, total, fused=fused)
    return torch.from_numpy(total)


@pytest.mark.parametrize("format", FORMATS)
def test_all_capabilities_have_the_sums_of_the_definition(format: str) -> None:
    for rows, out, super_blocks in SIZES:
        blocks = random_blocks(format, out, 256 * super_blocks, seed=rows)
        x = torch.randn(rows, 256 * super_blocks, generator=torch.Generator().manual_seed(rows))
        packed = ops.pack_weight(blocks, format)
        expected = {fused: by_definition(x, blocks, format, fused=fused) for fused in (True, False)}
        for name in cases.cpu_capabilities():
            _C.set_cpu_capability(name)
            got = ops.skinny_linear(x, packed.weight, weight_table=packed.table)
            assert torch.equal(got, expected[name != "portable"]), (name, rows, out)


@pytest.mark.parametrize("format", [each for each in FORMATS if block_sizes(each)[0] == 256])
@pytest.mark.parametrize("byte", [0, 255, 128, 127])
def test_the_largest_sums_are_exact(format: str, byte: int) -> None:
    """Quants and sub-scales at their ends, all of one sign, and alternating ones of x."""
    blocks = torch.full((17, block_sizes(format)[1]), byte, dtype=torch.uint8)
    blocks = with_scales(blocks, format, (1, 0.5))
    packed = ops.pack_weight(blocks, format)
    x = torch.ones(33, 256)
    x[::2] *= -1
    x[16:, ::2] *= -1
    expected = {fused: by_definition(x, blocks, format, fused=fused) for fused in (True, False)}
    for name in cases.cpu_capabilities():
        _C.set_cpu_capability(name)
        got = ops.skinny_linear(x, packed.weight, weight_table=packed.table)
        assert torch.equal(got, expected[name != "portable"]), name


def test_formats_take_turns_in_a_table() -> None:
    """Rows in any order, for which tiles of two sizes and vectors take turns."""
    matrix = packed_layers([[(format, 21) for format in FORMATS]], 512)
    assert matrix.table is not None
    table = matrix.table[0]
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(1))
    for name in cases.cpu_capabilities():
        _C.set_cpu_capability(name)
        for rows in (11, 14):
            x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
            alone = [ops.skinny_linear(row[None], matrix.weight, weight_table=table) for row in x]
            expected = torch.cat(alone)
            for places in (torch.arange(len(table)), order):
                got = ops.skinny_linear(x, matrix.weight, weight_table=table[places])
                assert torch.equal(got, expected[:, places]), (name, rows)
