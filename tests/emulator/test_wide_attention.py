"""Attention whose warps have two bands of rows: a row's results are those that it has alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_paged_attention import expected_of, random_call

import emulated
import reference
from cases import TOLERANCES, AttentionCase
from eecore import ops
from tiers import in_all

CPU = torch.device("cpu")
WIDE, NARROW = "paged_attention_wide_kernel", "paged_attention_kernel"
FLOATS = (torch.bfloat16, *in_all(torch.float16))
# Rows of a key head: 17, 31, 32, 33, 63, 64, and two tiles of them.
CASES = {
    "17": AttentionCase((17,), (150,), 2, 2, 64, 16, fixed_split_size=16),
    "31": AttentionCase((31,), (700,), 1, 1, 72, 8, fixed_split_size=128),
    "32": AttentionCase((8, 8), (330, 90), 4, 1, 128, 16, fixed_split_size=32),
    "33, window": AttentionCase(
        (11,), (400,), 6, 2, 128, 16, sliding_window=101, fixed_split_size=32
    ),
    "63, soft cap": AttentionCase((7,), (200,), 9, 1, 96, 3, fixed_split_size=40, soft_cap=3.0),
    "64": AttentionCase((16,), (300,), 4, 1, 128, 16, fixed_split_size=16),
    "72": AttentionCase((9, 9), (9, 290), 8, 1, 64, 16, fixed_split_size=64),
    "not causal": AttentionCase((5, 9), (40, 170), 5, 1, 104, 8, False, fixed_split_size=24),
    # More queries of a sequence than are repeatable, few rows and none.
    "mixed": AttentionCase((50, 10, 1, 0), (300, 80, 200, 20), 4, 2, 64, 16, fixed_split_size=48),
    "new alone": AttentionCase((20,), (20,), 2, 1, 128, 16, fixed_split_size=128),
}


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.route(monkeypatch)


def call_of(case: AttentionCase, dtype: torch.dtype, in_float8: bool = False) -> dict[str, Any]:
    call = random_call(case, dtype, CPU)
    if in_float8:
        for name in ("k_cache", "v_cache"):
            call[name] = reference.to_float8(call[name])
        heads = torch.arange(case.num_kv_heads) + 1.0
        call |= {"key_scales": heads * 0.3, "value_scales": heads * 0.7}
    return call


@pytest.mark.parametrize("in_float8", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_rows_do_not_depend_on_the_bands_of_their_warp(
    name: str, dtype: torch.dtype, in_float8: bool
) -> None:
    case = CASES[name]
    call = call_of(case, dtype, in_float8)
    ran: list[torch.Tensor] = []
    with emulated.checking_races():
        kernels = emulated.kernels_of(lambda: ran.append(ops.paged_attention(**call)))
    assert kernels[0] == WIDE
    wide = ran.pop()
    tolerance = dataclasses.asdict(TOLERANCES[dtype])
    torch.testing.assert_close(wide.double(), expected_of(call), **tolerance)
    # Rows alone, in kernels with one band, where their results are repeatable: the first and the
    # last of a sequence.
    first = 0
    for seq, (length, queries) in enumerate(zip(case.seq_lens, case.num_queries, strict=True)):
        for query in {0, queries - 1} if 0 < queries <= 32 and case.causal else ():
            alone = {
                **call,
                "q": call["q"][first + query : first + query + 1],
                "page_table": call["page_table"][seq : seq + 1],
                "seq_lens": torch.tensor([length - queries + 1 + query]).int(),
                "query_start_loc": torch.tensor([0, 1]).int(),
            }
            assert torch.equal(ops.paged_attention(**alone)[0], wide[first + query])
        first += queries


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_infinities_reach_the_rows_of_both_bands_that_see_them(value: float) -> None:
    """A value at the last key but five of a tile of 32 rows: five queries do not see it."""
    case = CASES["32"]
    call = call_of(case, torch.bfloat16)
    page, slot = divmod(case.seq_lens[0] - 6, case.page_size)
    call["v_cache"][int(call["page_table"][0, page]), slot, 0, 70] = value
    wide = ops.paged_attention(**call)
    sees = torch.arange(8) >= 2
    assert torch.equal(~wide[:8, :, 70].isfinite(), sees[:, None].expand(8, 4))
    wide[:8, :, 70] = 0
    assert wide.isfinite().all()


def test_spans_that_blocks_share_are_merged_alike() -> None:
    """By a second kernel, and by the last block of a tile, in any order of blocks."""
    case = AttentionCase((5,), (1500,), 4, 1, 64, 16, fixed_split_size=128)
    call = call_of(case, torch.bfloat16)
    expected = ops.paged_attention(**call)
    arrivals = torch.zeros(100, dtype=torch.int32)
    for seed in range(3):
        emulated.set_seed(seed)
        assert torch.equal(ops.paged_attention(**call, arrivals=arrivals), expected)
        assert not arrivals.any()


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ({}, torch.float32),
        ({"head_dim": 136}, torch.bfloat16),
        ({"num_buckets": 32}, torch.bfloat16),
        ({"num_queries": (4,)}, torch.bfloat16),
        ({"num_queries": (33,)}, torch.bfloat16),
        ({"fixed_split_size": 0}, torch.bfloat16),
    ],
)
def test_other_calls_have_one_band_of_rows(change: dict[str, Any], dtype: torch.dtype) -> None:
    """Among others those whose rows depend on how a tile is divided."""
    case = AttentionCase((5,), (40,), 4, 1, 64, 16, fixed_split_size=128)
    wide = call_of(case, torch.bfloat16)
    assert emulated.kernels_of(lambda: ops.paged_attention(**wide)) == [WIDE]
    call = call_of(dataclasses.replace(case, **change), dtype)
    assert emulated.kernels_of(lambda: ops.paged_attention(**call)) == [NARROW]
