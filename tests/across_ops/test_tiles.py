"""Products with matrix tiles: the sums of the instruction, bit for bit, for tiles of any cut."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import cases
from eecore import _C, ops

SIZES = (
    (1, 1, 1),
    (1, 16, 32),
    (3, 33, 64),
    (16, 32, 31),
    (17, 17, 33),
    (40, 100, 300),
    (70, 5, 7),
    (15, 15, 321),
    (31, 32, 640),
    (32, 32, 1000),
    (33, 33, 319),
    (255, 16, 352),
    (257, 33, 70),
    (260, 17, 9000),
)
SMALLEST = np.float32(2.0**-126)

needs_tiles = pytest.mark.skipif(
    "amx_model" not in cases.cpu_capabilities(), reason="this CPU does not have avx512_bf16"
)


@contextmanager
def capability(name: str) -> Iterator[None]:
    before = _C.cpu_capability()
    _C.set_cpu_capability(name)
    try:
        yield
    finally:
        _C.set_cpu_capability(before)


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x)


def by_the_manual(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T as TDPBF16PS sums it: of 32 columns at a time, even and odd ones apart.

    A product of two bfloat16 numbers is exact in float32, so that a fused sum rounds once.
    """
    padding = (0, -x.shape[1] % 32)
    left, right = (
        flushed(torch.nn.functional.pad(each.float(), padding).numpy()) for each in (x, weight)
    )
    sums = np.zeros((len(left), len(right)), dtype=np.float32)
    for tile in range(0, left.shape[1], 32):
        parts = []
        for parity in (0, 1):
            part = np.zeros_like(sums)
            for k in range(tile + parity, tile + 32, 2):
                product = left[:, k, None].astype(np.float64) * right[None, :, k]
                part = flushed((part + product).astype(np.float32))
            parts.append(part)
        sums = flushed(flushed(sums) + flushed(parts[0] + parts[1]))
    return torch.from_numpy(sums)


def matrices(rows: int, out: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    made = (torch.randn(count, columns, generator=random) for count in (rows, out))
    x, weight = (each.bfloat16() for each in made)
    return x, weight


@needs_tiles
@pytest.mark.parametrize("size", SIZES)
def test_sums_are_those_of_the_manual(size: tuple[int, int, int]) -> None:
    x, weight = matrices(*size)
    with capability("amx_model"):
        got = ops.skinny_linear(x, weight)
    assert torch.equal(got, by_the_manual(x, weight).bfloat16())


@needs_tiles
@pytest.mark.parametrize("rows", [7, 40])
def test_rows_of_views(rows: int) -> None:
    x, weight = matrices(rows, 37, 420)
    with capability("amx_model"):
        got = ops.skinny_linear(x[:, 10:401], weight[:, 10:401])
        expected = ops.skinny_linear(x[:, 10:401].clone(), weight[:, 10:401].clone())
    assert torch.equal(got, expected)


@needs_tiles
@pytest.mark.filterwarnings("ignore:invalid value")
def test_small_numbers_are_zeros_and_large_ones_infinite() -> None:
    x, weight = matrices(20, 40, 70)
    x[3] *= 2.0**-60
    weight[7] *= 2.0**-70
    x[4] = 1e-39
    x[5] *= 2.0**70
    weight[8] *= 2.0**80
    with capability("amx_model"):
        got = ops.skinny_linear(x, weight)
    expected = by_the_manual(x, weight).bfloat16()
    assert not got[4].any()
    assert got[5, 8].isinf() or got[5, 8].isnan()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@needs_tiles
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(bad: float) -> None:
    x, weight = matrices(20, 40, 70)
    with capability("amx_model"):
        expected = ops.skinny_linear(x, weight)
        x[17, 69] = bad
        got = ops.skinny_linear(x, weight)
    assert not got[17].isfinite().any()
    others = torch.arange(20) != 17
    assert torch.equal(got[others], expected[others])


@pytest.mark.skipif("amx" not in _C.cpu_capabilities(), reason="this CPU does not have amx")
@pytest.mark.parametrize("size", SIZES)
def test_the_machine_s_tiles_are_those_of_the_model(size: tuple[int, int, int]) -> None:
    x, weight = matrices(*size)
    results = []
    for name in ("amx", "amx_model"):
        with capability(name):
            results.append(ops.skinny_linear(x, weight))
    assert torch.equal(*results)


def test_tiles_that_the_cpu_lacks_are_refused() -> None:
    if "amx" in _C.cpu_capabilities():
        pytest.skip("this CPU has amx")
    with pytest.raises(ValueError, match=r"expected portable.* \(what this CPU runs\), got amx"):
        _C.set_cpu_capability("amx")


ASKS = """
#include "cpu/tile_permission.h"

int main() {
  const int errors[] = {0, EINVAL, ENOSPC};
  for (const int error : errors) {
    const auto request = [error] { return (errno = error) == 0 ? 0 : -1; };
    std::printf("%d\\n", eecore::cpu::permits_tiles(request, 11008, stdout));
  }
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_small_signal_stack_is_named_where_linux_refuses_tiles(tmp_path: Path) -> None:
    source, program = tmp_path / "asks.cpp", tmp_path / "asks"
    source.write_text(ASKS)
    root = Path(__file__).resolve().parents[2]
    compile_it = ["c++", "-std=c++20", "-I", str(root / "csrc"), str(source), "-o", str(program)]
    subprocess.run(compile_it, check=True)
    said = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    granted, refused, told, small = said.splitlines()
    assert (granted, refused, small) == ("1", "0", "0")
    assert "avx512_bf16 kernels instead of amx: expected alternate signal stacks" in told
    assert "at least 11008 bytes" in told
