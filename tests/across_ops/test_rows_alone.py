"""A row's result is the same, bit for bit, in any batch and on any number of threads.

Attention, whole layers and sampling have tests of their own: their rows are parts of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_add_normed
import test_exit_confidence_cosine
import test_exit_confidence_mlp
import test_exit_confidence_softmax
import test_kv_fill
import torch
from test_skinny_products import OPS, Product
from torch import Tensor

import emulated
from cases import DTYPES, KvFillCase
from coded_calls import FORMS, coded, on_device
from eecore import ops
from packed_blocks import packed_layers

Call = dict[str, Any]

MAX_ROWS, MAX_EMULATED = 141, 70
# Around tiles, groups and blocks that stay in cache.
ROW_COUNTS = (1, 2, 3, 5, 7, 8, 9, 12, 16, 17, 31, 33, 47, 65, 129)
EMULATED_COUNTS = (1, 8, 33)
# Columns: below a vector, odd, in several chunks, more than the integer sums of some CPUs take in.
SIZES = ((7, 5), (131, 41), (576, 75), (1100, 36), (4133, 9))

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
forms = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def check_rows(run: Callable[[Call], Tensor], call: Call, *by_row: str) -> None:
    """Runs of so many rows, the last among them, give what all of them give."""
    together = run(call)
    counts = ROW_COUNTS if len(together) == MAX_ROWS else EMULATED_COUNTS
    for count in counts:
        for start in ((len(together) - count) // 2, len(together) - count):
            rows = slice(start, start + count)
            some = run({**call, **{name: call[name][rows] for name in by_row if name in call}})
            torch.testing.assert_close(some, together[rows], rtol=0, atol=0, equal_nan=True)


def check_threads(run: Callable[[Call], Tensor], call: Call) -> None:
    got = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        got.append(run(call).nan_to_num())
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], got[2])


def num_rows(device: torch.device) -> int:
    return MAX_EMULATED if emulated.is_cuda_kernel(device) else MAX_ROWS


@pytest.mark.parametrize("op", OPS)
@forms
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@dtypes
def test_linear_layers(
    op: str, form: str, sizes: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """NaN and infinity among the rows stay where they are."""
    product = Product(op, form)
    call = product.call(num_rows(device), *sizes, dtype=dtype, device=device)
    call["x"][[3, 21]] = torch.nan
    call["x"][17, -1] = torch.inf
    call["x"][18] = 0
    assert product.run(call)[22:].isfinite().all()
    check_rows(product.run, call, "x", "residual")


@pytest.mark.parametrize("form", ["floats", "int8"])
@dtypes
def test_more_rows_than_stay_in_cache(form: str, dtype: torch.dtype, device: torch.device) -> None:
    if emulated.is_cuda_kernel(device):
        pytest.skip("of the CPU's caches")
    product = Product("skinny_linear", form)
    call = product.call(1500, 1536, 40, dtype=dtype, device=device)
    together = product.run(call)
    for rows in (slice(1), slice(3, 40), slice(700, 1001), slice(1499, 1500)):
        some = {**call, "x": call["x"][rows], "residual": call["residual"][rows]}
        assert torch.equal(product.run(some), together[rows])


def head_of(call: Call) -> Tensor:
    got = ops.exit_confidence_softmax(**call, eps=1e-5)
    return torch.stack((got.confidence, got.logsumexp, got.token.float()), 1)


@forms
@dtypes
def test_the_head(form: str, dtype: torch.dtype, device: torch.device) -> None:
    call = test_exit_confidence_softmax.random_case(num_rows(device), 256, 101, dtype, device)
    check_rows(head_of, coded(call, form, "lm_head"), "hidden")


@dtypes
def test_other_measures_and_norms(dtype: torch.dtype, device: torch.device) -> None:
    if not emulated.supports(device, dtype):
        pytest.skip("float16 is for CUDA")
    rows = num_rows(device)
    previous, hidden = test_exit_confidence_cosine.random_states(rows, 131, dtype, device)
    states = {"previous": previous, "hidden": hidden}
    check_rows(lambda call: ops.exit_confidence_cosine(**call), states, *states)
    for inner_size in (None, 33):
        classifier = test_exit_confidence_mlp.random_classifier(131, inner_size, device)
        call: Call = {"hidden": hidden, **classifier}
        check_rows(lambda call: ops.exit_confidence_mlp(**call), call, "hidden")
    call = test_add_normed.random_call(rows, 131, dtype, device)
    check_rows(lambda call: ops.add_normed(**call), call, "x", "residual")


def fill(call: Call) -> Tensor:
    return torch.stack(test_kv_fill.filled(ops.kv_fill, call))


@forms
@dtypes
def test_what_is_filled(form: str, dtype: torch.dtype, device: torch.device) -> None:
    """Each layer fills different rows, and the last block has few."""
    case = KvFillCase(53, hidden_size=256, num_kv_heads=1, head_dim=24, rotary_dim=24)
    call = test_kv_fill.random_call(case, dtype, device)
    if form in ops.BLOCK_FORMATS:
        matrix = packed_layers([[(form, 48)]] * case.num_layers, 256, size=1 / 16)
        matrix = on_device(matrix, device)
        call |= {"kv_weight": matrix.weight, "kv_table": matrix.table}
    else:
        call = coded(call, form, "kv_weight")
    together = fill(call)
    for count in (1, 12, 13, 31, 45):
        caches = call["k_cache"], call["v_cache"]
        for rows in torch.arange(53).split(count):
            by_row = ("hidden", "exit_layer", "slot_mapping", "positions")
            part = {name: call[name][rows] for name in by_row}
            own = {**call, **part, "k_cache": caches[0], "v_cache": caches[1]}
            caches = test_kv_fill.filled(ops.kv_fill, own)
        assert torch.equal(torch.stack(caches).nan_to_num(), together.nan_to_num())


@forms
@dtypes
def test_the_number_of_threads_changes_nothing(
    form: str, dtype: torch.dtype, device: torch.device
) -> None:
    for op in OPS:
        product = Product(op, form)
        for num_tokens in (1, 40):
            check_threads(product.run, product.call(num_tokens, 576, 1001, dtype=dtype))
    case = test_exit_confidence_softmax.random_case(5, 256, 4099, dtype, device)
    check_threads(head_of, coded(case, form, "lm_head"))
    case = KvFillCase(70, num_layers=5, hidden_size=256, num_kv_heads=3)
    if form not in ops.BLOCK_FORMATS:
        call = test_kv_fill.random_call(case, dtype)
        check_threads(fill, coded(call, form, "kv_weight"))
