"""Attention of many queries by warpgroups, which a setting of EECORE_CUDA_TUNING asks for."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from test_paged_attention import expected_of, key_of, random_call

import emulated
import reference
from cases import TOLERANCES, AttentionCase
from eecore import ops
from tiers import in_all

CPU = torch.device("cpu")
TUNING = "EECORE_CUDA_TUNING"
PROMPT, WARPS = "paged_attention_prompt_kernel", "paged_attention_kernel"
FLOAT8_WARPS = "paged_attention_float8_kernel"
COMBINES = "paged_attention_combine_kernel"
FLOATS = (torch.bfloat16, *in_all(torch.float16))
CASES = {
    "groups of 4": AttentionCase((40,), (257,), 4, 1, 128, 16),
    "slots of shared memory that are filled again": AttentionCase((17,), (657,), 4, 1, 128, 16),
    "groups of 3, pages of 32, window": AttentionCase(
        (23, 50), (300, 151), 6, 2, 64, 32, sliding_window=140
    ),
    "groups of 1, a row more than a tile, soft cap": AttentionCase(
        (129,), (129,), 1, 1, 64, 64, soft_cap=2.0
    ),
    "groups of 8, few queries and none among others": AttentionCase(
        (1, 30, 0), (200, 30, 9), 8, 1, 72, 16
    ),
}
MORE_CASES = {
    "rows and keys of a tile less one": AttentionCase((127,), (127,), 2, 2, 64, 16),
    "rows and keys of a tile": AttentionCase((128,), (128,), 2, 2, 128, 128),
    "rows and keys of a tile and one": AttentionCase((129,), (129,), 2, 2, 128, 8),
    "rows of a warpgroup": AttentionCase((64,), (256,), 1, 1, 128, 16),
    "rows of a warpgroup and one": AttentionCase((65,), (255,), 1, 1, 128, 256),
    "a context much longer than the chunk": AttentionCase((16,), (1500,), 4, 1, 128, 16),
    "a window of a key": AttentionCase((70,), (400,), 4, 4, 64, 16, sliding_window=1),
    "a window far from the first key": AttentionCase(
        (33,), (1000,), 4, 2, 96, 32, sliding_window=200, soft_cap=1.0
    ),
    "not causal": AttentionCase((70, 3), (200, 140), 3, 1, 128, 16, causal=False),
    "not causal, window": AttentionCase((70,), (300,), 2, 1, 64, 8, False, sliding_window=90),
    "more queries than keys": AttentionCase((140, 70), (9, 0), 2, 2, 128, 16),
    "small heads": AttentionCase((90,), (90,), 2, 1, 8, 64),
    "many sequences": AttentionCase((70,) * 4 + (1, 33), (70, 200, 71, 300, 129, 33), 4, 2, 64, 16),
}
each_case = pytest.mark.parametrize("name", [*CASES, *in_all(*MORE_CASES)])
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@pytest.fixture(autouse=True)
def by_warpgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.route(monkeypatch)
    monkeypatch.setenv(TUNING, "wgmma_attention=1")


def call_of(name: str, dtype: torch.dtype, **change: Any) -> dict[str, Any]:
    return random_call(dataclasses.replace((CASES | MORE_CASES)[name], **change), dtype, CPU)


def in_float8(call: dict[str, Any], dtype: torch.dtype = torch.float8_e4m3fn) -> dict[str, Any]:
    """The call over caches in float8, or over the same numbers in another dtype."""
    narrow = {name: reference.to_float8(call[name]) for name in ("k_cache", "v_cache")}
    return {**call, **{name: cache.to(dtype) for name, cache in narrow.items()}}


def attended(call: dict[str, Any], *kernels: str) -> torch.Tensor:
    """The output of a call by these kernels, in any order in which a GPU may run them."""
    ran: list[torch.Tensor] = []
    with emulated.checking_races():
        assert emulated.kernels_of(lambda: ran.append(ops.paged_attention(**call))) == [*kernels]
    return ran[0]


@each_dtype
@each_case
def test_warpgroups_match_the_reference(name: str, dtype: torch.dtype) -> None:
    """Slots that no key uses hold NaN, so values are made finite in most last steps."""
    call = call_of(name, dtype)
    tolerance = dataclasses.asdict(TOLERANCES[dtype])
    got = attended(call, PROMPT)
    torch.testing.assert_close(got.double(), expected_of(call), **tolerance)


@each_dtype
@pytest.mark.parametrize(
    "name",
    [
        "slots of shared memory that are filled again",
        "groups of 3, pages of 32, window",
        "groups of 1, a row more than a tile, soft cap",
        *in_all("rows and keys of a tile and one", "rows of a warpgroup and one"),
        *in_all("not causal, window", "many sequences"),
    ],
)
def test_float8_has_the_results_of_the_same_numbers_in_16_bits(
    name: str, dtype: torch.dtype
) -> None:
    """To the bit; the values are all numbers of float8, and slots that no key uses hold NaN."""
    call = call_of(name, dtype)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    places = torch.arange(call["v_cache"].numel()).view(call["v_cache"].shape)
    used = call["v_cache"].isfinite()
    call["v_cache"][used] = numbers[places[used] * 7 % len(numbers)].to(dtype)
    expected = attended(in_float8(call, dtype), PROMPT)
    assert torch.equal(attended(in_float8(call), PROMPT), expected)


def test_scales_of_float8_and_values_that_are_not_finite() -> None:
    call = in_float8(call_of("groups of 3, pages of 32, window", torch.bfloat16))
    call |= {"key_scales": torch.tensor([0.5, 2.0]), "value_scales": torch.tensor([3.0, 0.25])}
    key_of(call, "v_cache", 1, 140)[1, 5] = torch.nan
    expected = expected_of(call)
    assert not expected.isfinite().all()
    got = attended(call, PROMPT)
    tolerance = dataclasses.asdict(TOLERANCES[torch.bfloat16])
    torch.testing.assert_close(got.double(), expected, equal_nan=True, **tolerance)


@each_dtype
@pytest.mark.parametrize("name", ["groups of 3, pages of 32, window", *in_all("many sequences")])
def test_a_row_does_not_depend_on_the_others(name: str, dtype: torch.dtype) -> None:
    """Neither on other sequences nor on the queries after it, to the bit."""
    call = call_of(name, dtype)
    together = ops.paged_attention(**call)
    starts = call["query_start_loc"].tolist()
    emulated.set_seed(3)
    for seq, (first, end) in enumerate(itertools.pairwise(starts)):
        length = int(call["seq_lens"][seq])
        for left_out in (0, 5):
            end -= left_out
            if (end - first) * call["q"].shape[1] // call["k_cache"].shape[2] < 64:
                continue
            alone = {
                **call,
                "q": call["q"][first:end],
                "page_table": call["page_table"][seq : seq + 1],
                "seq_lens": torch.tensor([length - left_out]).int(),
                "query_start_loc": torch.tensor([0, end - first]).int(),
            }
            assert torch.equal(attended(alone, PROMPT), together[first:end])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_few_queries_have_the_results_of_decoding(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under fixed splits, beside sequences of many: a second kernel attends to them."""
    case = AttentionCase((5, 90, 32, 33), (300, 200, 32, 70), 2, 1, 64, 16, fixed_split_size=32)
    call = random_call(case, dtype, CPU)
    got = attended(call, PROMPT, WARPS, COMBINES)
    tolerance = dataclasses.asdict(TOLERANCES[dtype])
    torch.testing.assert_close(got.double(), expected_of(call), **tolerance)
    monkeypatch.setenv(TUNING, "wgmma_attention=0")
    decoded = ops.paged_attention(**call)
    rows = slice(95, 127)
    assert torch.equal(got[:5], decoded[:5])
    assert torch.equal(got[rows], decoded[rows])
    assert not torch.equal(got[5:95], decoded[5:95])


@pytest.mark.parametrize("value", [torch.nan, *in_all(torch.inf, -torch.inf)])
def test_values_that_are_not_finite_reach_the_rows_that_see_them(value: float) -> None:
    """In the last step, which rows see in part, in the first one, and of a key."""
    for name, key, column in (
        ("v_cache", 250, 70),
        ("v_cache", 3, 127),
        ("v_cache", 200, 0),
        ("k_cache", 230, 5),
    ):
        call = call_of("groups of 4", torch.bfloat16)
        key_of(call, name, 0, key)[0, column] = value
        expected = expected_of(call)
        assert not expected.isfinite().all()
        tolerance = dataclasses.asdict(TOLERANCES[torch.bfloat16])
        got = attended(call, PROMPT)
        torch.testing.assert_close(got.double(), expected, equal_nan=True, **tolerance)


def test_rows_that_see_no_key_are_zeros() -> None:
    call = random_call(AttentionCase((140, 70), (9, 0), 2, 2, 64, 16), torch.bfloat16, CPU)
    got = attended(call, PROMPT)
    assert (got[:131] == 0).all()
    assert (got[131:140] != 0).any(-1).all()
    assert (got[140:] == 0).all()


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ({}, torch.float32),
        ({"head_dim": 136}, torch.bfloat16),
        ({"num_buckets": 32}, torch.bfloat16),
        ({"page_size": 24}, torch.bfloat16),
        ({"page_size": 4}, torch.bfloat16),
        ({"num_queries": (15,)}, torch.bfloat16),
        ({"num_queries": (32,), "fixed_split_size": 64}, torch.bfloat16),
    ],
)
def test_other_calls_are_those_of_warps(change: dict[str, Any], dtype: torch.dtype) -> None:
    call = call_of("groups of 4", dtype, **change)
    assert PROMPT not in emulated.kernels_of(lambda: ops.paged_attention(**call))


def test_rows_and_caches_that_are_not_aligned_are_those_of_warps() -> None:
    call = call_of("groups of 4", torch.bfloat16)
    wider = torch.zeros(*call["k_cache"].shape[:-1], 132, dtype=torch.bfloat16)
    for name in ("q", "k_cache"):
        shape = call[name].shape
        moved = torch.empty(call[name].numel() + 1, dtype=torch.bfloat16)[1:].view(shape)
        other = {**call, name: moved.copy_(call[name])}
        assert emulated.kernels_of(lambda c=other: ops.paged_attention(**c)) == [WARPS]
    narrow = in_float8(call_of("groups of 4", torch.bfloat16, head_dim=72))
    assert emulated.kernels_of(lambda: ops.paged_attention(**narrow)) == [FLOAT8_WARPS]
    strided = {**call, "v_cache": wider[..., :128].copy_(call["v_cache"])}
    assert emulated.kernels_of(lambda: ops.paged_attention(**strided)) == [WARPS]
