"""quantise_weight: a weight in blocks of 4 to 8 bits, rounded with care."""

from __future__ import annotations

import gguf
import pytest
import torch
from torch import Tensor

import reference
from eecore import ops
from packed_blocks import block_sizes
from random_calls import Arguments, Checked, Maker

FORMATS = ops.FLOAT_BLOCK_FORMATS


def _counting(weight: Tensor) -> Tensor:
    """The weight of each number in a block's error, for [..., 32] blocks in float64."""
    blocks = weight.double().unflatten(-1, (-1, 32))
    return blocks.abs() + blocks.square().mean(-1, keepdim=True).sqrt()


def weighted_error(weight: Tensor, got: Tensor) -> Tensor:
    """The weighted squared error of each block of 32: [..., blocks]."""
    difference = (got.double() - weight.double()).unflatten(-1, (-1, 32))
    return (_counting(weight) * difference.square()).sum(-1)


def quantise_weight(weight: Tensor, format: str) -> Tensor:
    """A weight [rows, columns] of finite numbers rounded to Q4_1, Q5_1 or Q8_0; float64."""
    x = weight.double().unflatten(-1, (-1, 32))
    if format == "Q8_0":
        scale = (x.abs().amax(-1, keepdim=True) / 127).half().double()
        return ((x / scale.where(scale > 0, torch.inf)).round() * scale).flatten(-2)
    most = {"Q4_1": 15, "Q5_1": 31}[format]
    least, reach = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
    counts = _counting(weight)
    best = torch.full_like(least, torch.inf)
    scale, minimum = reach / most, least

    def keep_better(whole: Tensor) -> None:
        """The line fitted to the numbers over their whole numbers, if its error is smaller."""
        nonlocal best, scale, minimum
        total, mean_q = counts.sum(-1, keepdim=True), (counts * whole).sum(-1, keepdim=True)
        mean_q, mean_x = mean_q / total, (counts * x).sum(-1, keepdim=True) / total
        spread = (counts * (whole - mean_q).square()).sum(-1, keepdim=True)
        slope = (counts * (whole - mean_q) * (x - mean_x)).sum(-1, keepdim=True) / spread
        start = mean_x - slope * mean_q
        error = (counts * (slope * whole + start - x).square()).sum(-1, keepdim=True)
        better = (error < best) & (slope > 0)
        best = error.where(better, best)
        scale, minimum = slope.where(better, scale), start.where(better, minimum)

    def whole(scale: Tensor, minimum: Tensor) -> Tensor:
        return ((x - minimum) / scale.where(scale > 0, torch.inf)).round().clamp(0, most)

    for cut in range(11):
        keep_better(whole(reach / (most - 1.2 + 0.2 * cut), least))
    for _ in range(2):
        keep_better(whole(scale, minimum))
    scale, minimum = scale.half().double(), minimum.half().double()
    return (whole(scale, minimum) * scale + minimum).flatten(-2)


def unpacked(weight: Tensor, format: str) -> Tensor:
    """A weight, quantised and unpacked again."""
    return reference.pack_weight(ops.quantise_weight(weight, format), format)


def weight_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_matches_the_reference(format: str, dtype: torch.dtype, device: torch.device) -> None:
    """No block's weighted squared error is larger than that of the same search in float64."""
    for num_rows, columns in ((1, 32), (7, 96), (40, 576)):
        weight = (weight_of(num_rows, columns) * 0.05).to(dtype).to(device)
        expected = quantise_weight(weight, format)
        error = weighted_error(weight, unpacked(weight, format))
        limit = weighted_error(weight, expected)
        # Ranges that do equally well may differ, by what float32 and float16 round.
        assert (error <= 1.1 * limit + 1e-12).all()
        assert error.sum() <= 1.001 * limit.sum()


@pytest.mark.parametrize("format", FORMATS)
def test_is_no_worse_than_the_format_s_own_package(format: str) -> None:
    weight = weight_of(64, 512, seed=1) * 0.02
    theirs = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[format])
    ours = (unpacked(weight, format) - weight).square().mean()
    error = (reference.pack_weight(torch.from_numpy(theirs), format) - weight).square().mean()
    assert ours <= {"Q4_1": 0.82, "Q5_1": 0.82, "Q8_0": 1.01}[format] * error


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "block",
    [
        torch.zeros(32),
        torch.full((32,), 0.7),
        torch.full((32,), -3e-9),
        torch.arange(32.0) / 31,
        -torch.arange(32.0),
        torch.cat((torch.zeros(31), torch.tensor([5.0]))),
        torch.cat((torch.tensor([-65504.0, 65504.0]), torch.zeros(30))),
        weight_of(32, seed=2) * 1e-20,
        weight_of(32, seed=3) * 1e-6,
        weight_of(32, seed=4) * 1e4,
    ],
)
def test_blocks_of_every_kind(block: Tensor, format: str, device: torch.device) -> None:
    """Each number moves by at most a step: of the block's range, or of float16."""
    got = unpacked(block[None].to(device), format)[0]
    steps = {"Q4_1": 15, "Q5_1": 31, "Q8_0": 127}[format]
    reach = block.abs().max() if format == "Q8_0" else block.max() - block.min()
    rounding = block.abs().max() * 2e-3 + (steps + 1) * 2.0**-25  # of scale and minimum
    limit = 1.5 * reach / steps + rounding
    assert ((got - block).abs() <= limit).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 65536.0, -1e30])
def test_nan_spoils_its_block_alone(bad: float, format: str, device: torch.device) -> None:
    weight = weight_of(3, 96).to(device)
    expected = unpacked(weight, format)
    weight[1, 40] = bad
    got = unpacked(weight, format)
    assert got[1, 32:64].isnan().all()
    got[1, 32:64] = expected[1, 32:64]
    assert torch.equal(got, expected)


def fuzzed_call(m: Maker) -> Checked:
    format = m.one_of(*ops.FLOAT_BLOCK_FORMATS)
    rows, columns, dtype = m.size(20), 32 * m.size(5, 1), m.dtype()
    row_bytes = columns // 32 * block_sizes(format)[1]
    weight = m.normal(rows, columns) * m.one_of(1e-3, 0.05, 1.0, 300.0)
    given = {
        "weight": m.placed(weight.to(dtype), 1),
        "format": format,
        "blocks": m.placed(m.whole(256, rows, row_bytes).to(torch.uint8), 1),
    }

    def check(before: Arguments, after: Arguments) -> None:
        weight = before["weight"]
        if rows > 0:
            got = reference.pack_weight(after["blocks"], format)
            limit = weighted_error(weight, quantise_weight(weight, format))
            error = weighted_error(weight, got)
            floor = 1e-9 * weight.double().abs().amax() ** 3
            # If two ranges are equally good, rounding picks one, and later steps may differ.
            assert (error > 1.01 * limit + floor).sum() <= 1 + error.numel() // 100
            assert (error <= 2 * limit + floor).all()

    return given, check
