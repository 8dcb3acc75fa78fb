"""Products of int8 rows: the exact sum of every 2048 columns is rounded once, on every CPU."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch
from torch import Tensor

import cases
import op_calls
from eecore import _C, ops

PART = 2048
NUM_CALLS = 60
# Rows of x and of the weight, and columns.
SIZES = (
    (1, 33, 641),
    (3, 5, 64),
    (4, 1, 1),
    (15, 31, 63),
    (16, 32, 640),
    (17, 64, 65),
    (31, 17, 1536),
    (33, 33, 2049),
    (40, 16, 6200),
    (255, 16, 100),
    (257, 40, 700),
)
needs_tiles = pytest.mark.skipif(
    "amx_model" not in cases.cpu_capabilities(), reason="this CPU does not have avx512_bf16"
)


@pytest.fixture(autouse=True)
def capability_as_before() -> Iterator[None]:
    before = _C.cpu_capability()
    yield
    _C.set_cpu_capability(before)


def by_definition(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The product in float64, exactly, and in float32 where the kernels round."""
    bound = x.abs().amax(1, keepdim=True)
    # Not 32767 / bound, which torch takes for a product with the inverse.
    q, total = (x * (torch.full_like(bound, 32767) / bound)).round(), torch.zeros(())
    for columns, weights in zip(q.split(PART, 1), weight.split(PART, 1), strict=True):
        total = total + (columns.double() @ weights.double().T).float()
    return total * (bound / 32767 * scale)


def product(
    rows: int, out: int, columns: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=random).to(dtype)
    weight = torch.randint(-128, 128, (out, columns), generator=random, dtype=torch.int8)
    return x, weight, torch.rand(out, generator=random) + 0.01


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_capabilities_have_the_sums_of_the_definition(
    size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x, weight, scale = product(*size, dtype)
    expected = by_definition(x.float(), weight, scale)
    for name in cases.cpu_capabilities():
        _C.set_cpu_capability(name)
        got = ops.skinny_linear(x, weight, weight_scale=scale, dtype=torch.float32)
        assert torch.equal(got, expected), name


@pytest.mark.parametrize("columns", [PART, 2 * PART + 32])
@pytest.mark.parametrize("value", [-128, 127])
def test_the_largest_sums_are_exact(value: int, columns: int) -> None:
    x, weight, scale = product(20, 18, columns)
    x, weight = x.sign(), torch.full_like(weight, value)
    x[:10] = x[:10].abs()
    expected = by_definition(x, weight, scale)
    for name in cases.cpu_capabilities():
        _C.set_cpu_capability(name)
        assert torch.equal(ops.skinny_linear(x, weight, weight_scale=scale), expected), name


@needs_tiles
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row_of_a_tile(bad: float) -> None:
    x, weight, scale = product(20, 18, 70)
    _C.set_cpu_capability("amx_model")
    expected = ops.skinny_linear(x, weight, weight_scale=scale)
    x[17, 69] = bad
    got = ops.skinny_linear(x, weight, weight_scale=scale)
    assert got[17].isnan().all()
    others = torch.arange(20) != 17
    assert torch.equal(got[others], expected[others])


@needs_tiles
@pytest.mark.parametrize("num_rows", [5, 300])
def test_confidences_of_tiles_are_those_of_vectors(num_rows: int) -> None:
    x, head, scale = product(num_rows, 300, 200)
    results = []
    for name in ("avx512_bf16", "amx_model"):
        _C.set_cpu_capability(name)
        results.append(ops.exit_confidence_softmax(x, None, head, 1e-6, lm_head_scale=scale))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


@needs_tiles
@pytest.mark.parametrize("op", ["kv_fill", "skinny_gated_linear", "skinny_linear"])
def test_random_calls_on_tiles_have_the_results_of_vectors(op: str) -> None:
    multiplied = 0
    for seed in range(NUM_CALLS):
        results = []
        for name in ("avx512_bf16", "amx_model"):
            _C.set_cpu_capability(name)
            call = op_calls.random_call(op, Random(seed))
            if not any(t.dtype == torch.int8 for t in call.tensors.values()):
                break
            call.run()
            results.append(
                {
                    each: call.tensors[each].double()
                    for each in op_calls.written(op)
                    if each in call.tensors
                }
            )
        if results:
            multiplied += 1
            torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
    assert multiplied >= 5
