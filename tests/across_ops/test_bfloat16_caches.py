"""Caches in bfloat16 beside states in float32: what is written, to the bit, and what is read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import test_append_kv
import test_kv_fill
import test_paged_attention
import torch
from torch import Tensor

import emulated
from cases import (
    APPEND_KV_CASES,
    ATTENTION_CASES,
    KV_FILL_CASES,
    TOLERANCES,
    AppendKvCase,
    AttentionCase,
    KvFillCase,
)
from eecore import _C, ops

Call = dict[str, Any]

CPU = torch.device("cpu")
CACHES = ("k_cache", "v_cache")
# Capabilities that multiply bfloat16 directly, with queries and weights rounded to it.
MULTIPLIES = ("avx512_bf16", "amx", "amx_model")


def narrowed(call: Call) -> Call:
    """The same call with its caches in bfloat16."""
    return {**call, **{name: call[name].bfloat16() for name in CACHES}}


def tolerance() -> dict[str, float]:
    multiplies = _C.cpu_capability() in MULTIPLIES
    return dataclasses.asdict(TOLERANCES[torch.bfloat16 if multiplies else torch.float32])


def assert_same(got: Tensor, expected: Tensor) -> None:
    """Tensors have to be equal bit for bit, except the bits of a NaN."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", APPEND_KV_CASES, ids=str)
def test_appended_is_what_floats_are_rounded_to(case: AppendKvCase, device: torch.device) -> None:
    call = test_append_kv.random_call(case, torch.float32, device)
    narrow = narrowed(call)
    for each in (call, narrow):
        for name in ("q", *CACHES):
            each[name] = each[name].clone()
        ops.append_kv(**each)
    assert torch.equal(narrow["q"], call["q"])
    for name in CACHES:
        assert narrow[name].dtype == torch.bfloat16
        assert_same(narrow[name], call[name].bfloat16())


@pytest.mark.parametrize("case", KV_FILL_CASES, ids=str)
def test_filled_is_what_floats_are_rounded_to(case: KvFillCase, device: torch.device) -> None:
    call = test_kv_fill.random_call(case, torch.float32, device)
    floats = test_kv_fill.filled(ops.kv_fill, call)
    filled = test_kv_fill.filled(ops.kv_fill, narrowed(call))
    for got, cache in zip(filled, floats, strict=True):
        assert_same(got, cache.bfloat16())


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention_matches_the_reference(case: AttentionCase, device: torch.device) -> None:
    call = narrowed(test_paged_attention.random_call(case, torch.float32, device))
    got = ops.paged_attention(**call)
    assert got.dtype == torch.float32
    expected = test_paged_attention.expected_of(call)
    torch.testing.assert_close(got.double(), expected, **tolerance())


@pytest.mark.parametrize("group_size", [1, 3, 8])
@pytest.mark.parametrize(("head_dim", "num_queries"), [(72, 20), (128, 20), (64, 8), (64, 1)])
def test_a_row_is_independent_of_its_company(
    head_dim: int, num_queries: int, group_size: int, device: torch.device
) -> None:
    heads = 2 * group_size, 2
    batch = AttentionCase(
        (num_queries, 2, 1), (310, 40, 500), *heads, head_dim, 8, fixed_split_size=96
    )
    call = narrowed(test_paged_attention.random_call(batch, torch.float32, device))
    queries = {0, num_queries // 2, num_queries - 1}
    test_paged_attention.check_alone(call, num_queries, queries)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("window", [0, 20])
def test_a_value_that_a_row_does_not_see_changes_nothing(
    bad: float, window: int, device: torch.device
) -> None:
    """Queries of one sequence: only the later ones see the last keys."""
    case = AttentionCase((7,), (45,), 6, 2, 64, 8, sliding_window=window)
    call = narrowed(test_paged_attention.random_call(case, torch.float32, device))
    expected = ops.paged_attention(**call)
    seen_from = 4  # the first query that sees the key
    key = 45 - 7 + seen_from
    test_paged_attention.key_of(call, "v_cache", 0, key)[:, 3] = bad
    got = ops.paged_attention(**call)
    assert torch.equal(got[:seen_from], expected[:seen_from])
    columns = torch.arange(64, device=device) != 3
    assert torch.equal(got[..., columns], expected[..., columns])
    assert not got[seen_from:, :, 3].isfinite().any()


def test_a_model_in_bfloat16_has_no_cache_in_float32() -> None:
    case = AppendKvCase(6, 4, 2, 64, 8, rotary_dim=32, norm=True)
    call = test_append_kv.random_call(case, torch.bfloat16, CPU)
    wide = {**call, **{name: call[name].float() for name in CACHES}}
    with pytest.raises(RuntimeError, match="k_cache: expected bfloat16 or float8_e4m3fn"):
        ops.append_kv(**wide)


def test_cuda_has_no_such_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    case = AppendKvCase(6, 4, 2, 64, 8, rotary_dim=32, norm=True)
    call = narrowed(test_append_kv.random_call(case, torch.float32, CPU))
    emulated.route(monkeypatch)
    with pytest.raises(
        RuntimeError, match=r"k_cache: expected float32 or float8_e4m3fn .* bfloat16"
    ):
        ops.append_kv(**call)
