"""A row's result is the same, bit for bit, in any batch and on any number of threads.

Every op that multiplies with a weight, in every format of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_exit_confidence_softmax
import test_kv_fill
import torch
from test_skinny_products import OPS, Product

from cases import KvFillCase
from coded_calls import coded
from eecore import ops

Call = dict[str, Any]

MAX_ROWS = 300
# Every small number; then sizes around tiles, groups and blocks that stay in cache.
ROW_COUNTS = (*range(1, 20), 27, 31, 32, 33, 47, 63, 64, 65, 97, 129, 200, 257)
# Columns: below a vector, odd, in several chunks, more than the integer sums of some CPUs take in.
SIZES = ((7, 5), (131, 41), (576, 75), (1100, 36), (4133, 9))
FORMATS = {
    "float32": (torch.float32, "floats"),
    "bfloat16": (torch.bfloat16, "floats"),
    "int8": (torch.float32, "int8"),
    "int8-bfloat16": (torch.bfloat16, "int8"),
}

formats = pytest.mark.parametrize(("dtype", "form"), FORMATS.values(), ids=FORMATS)


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def parts(count: int) -> list[slice]:
    """Some runs of so many rows, the first and the last among them."""
    starts = {0, MAX_ROWS - count, (MAX_ROWS - count) // 2, min(33, MAX_ROWS - count)}
    return [slice(start, start + count) for start in sorted(starts)]


def check_rows(
    run: Callable[[Call], torch.Tensor], call: Call, by_row: tuple[str, ...], counts: Any
) -> None:
    together = run(call)
    assert together.isfinite().all()
    for count in counts:
        for rows in parts(count):
            some = run({**call, **{name: call[name][rows] for name in by_row}})
            assert torch.equal(some, together[rows]), f"{count} rows from {rows.start} on"


@formats
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.usefixtures("two_threads")
def test_linear_layers(
    sizes: tuple[int, int], dtype: torch.dtype, form: str, device: torch.device
) -> None:
    for op in OPS:
        product = Product(op, form)
        call = product.call(MAX_ROWS, *sizes, dtype=dtype, device=device)
        by_row = tuple({"x", "residual"} & call.keys())
        check_rows(product.run, call, by_row, ROW_COUNTS)


@formats
@pytest.mark.usefixtures("two_threads")
def test_more_rows_than_stay_in_cache(dtype: torch.dtype, form: str, device: torch.device) -> None:
    product = Product("skinny_linear", form)
    call = product.call(1500, 1536, 40, dtype=dtype, device=device)
    together = product.run(call)
    for rows in (slice(1), slice(3, 40), slice(700, 1001), slice(1499, 1500)):
        some = {**call, "x": call["x"][rows], "residual": call["residual"][rows]}
        assert torch.equal(product.run(some), together[rows])


@formats
@pytest.mark.usefixtures("two_threads")
def test_the_head(dtype: torch.dtype, form: str, device: torch.device) -> None:
    call = test_exit_confidence_softmax.random_case(MAX_ROWS, 576, 301, dtype, device)
    call["eps"] = 1e-5
    call = coded(call, form, "lm_head")

    def run(call: Call) -> torch.Tensor:
        got = ops.exit_confidence_softmax(**call)
        return torch.stack((got.confidence, got.logsumexp, got.token.float()), 1)

    check_rows(run, call, ("hidden",), (1, 2, 5, 6, 7, 33, 65, 257))


@formats
@pytest.mark.usefixtures("two_threads")
def test_what_is_filled(dtype: torch.dtype, form: str, device: torch.device) -> None:
    call = test_kv_fill.random_call(KvFillCase(70, hidden_size=576), dtype, device)
    call = coded(call, form, "kv_weight")
    by_row = ("hidden", "exit_layer", "slot_mapping", "positions")

    together = test_kv_fill.filled(ops.kv_fill, call)
    for count in (1, 3, 31, 33):
        alone = call
        for rows in torch.arange(70).split(count):
            part = {name: call[name][rows] for name in by_row if name in call}
            caches = test_kv_fill.filled(ops.kv_fill, {**alone, **part})
            alone = {**alone, "k_cache": caches[0], "v_cache": caches[1]}
        for got, expected in zip(caches, together, strict=True):
            assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@formats
def test_threads(dtype: torch.dtype, form: str, device: torch.device) -> None:
    for num_tokens in (1, 5, 40, MAX_ROWS):
        product = Product("skinny_linear", form)
        call = product.call(num_tokens, 576, 1001, dtype=dtype, device=device)
        before = torch.get_num_threads()
        got = []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                got.append(product.run(call))
        finally:
            torch.set_num_threads(before)
        assert torch.equal(got[0], got[1])
        assert torch.equal(got[0], got[2])
