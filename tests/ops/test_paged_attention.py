"""paged_attention: masks, ragged batches, poisoned memory that no key uses, and repeatable rows."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

import emulated
import reference
from cache_layouts import LAYOUTS, laid_out
from cases import ATTENTION_CASES, DTYPES, TOLERANCES, AttentionCase
from eecore import ops
from random_calls import Checked, Maker, compare, looser, out_of
from random_pages import random_caches, starts

GARBAGE = 2**31 - 1
SMALL = AttentionCase((1, 3), (20, 9), 4, 2, 64, 8)
BIASED = dataclasses.replace(SMALL, num_buckets=32)


class Drawn(NamedTuple):
    """The tensors of a call, on the CPU."""

    qkv: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    bias: torch.Tensor


@cache
def drawn(case: AttentionCase, dtype: torch.dtype) -> Drawn:
    """Draw them once for all backends: key by key this takes longer than the op."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_tokens, num_seqs, page_size = sum(case.num_queries), len(case.seq_lens), case.page_size
    num_pages = sum(-(-length // page_size) for length in case.seq_lens) + 3
    max_pages = max((-(-length // page_size) for length in case.seq_lens), default=0) + 2
    qkv = random(num_tokens, case.num_q_heads + 2 * case.num_kv_heads, case.head_dim + 8)
    cache_shape = (num_pages, page_size, case.num_kv_heads, case.head_dim)
    k_cache = torch.full(cache_shape, torch.nan, dtype=dtype)
    v_cache = torch.full(cache_shape, torch.nan, dtype=dtype)
    page_table = torch.full((num_seqs, max_pages), GARBAGE, dtype=torch.int32)
    free_pages = iter(torch.randperm(num_pages, generator=generator).tolist())
    for seq, (length, num_queries) in enumerate(zip(case.seq_lens, case.num_queries, strict=True)):
        window = case.sliding_window
        first_key = max(length - num_queries + 1 - window, 0) if window else 0
        for key in range(first_key, length if num_queries else 0):
            index, offset = divmod(key, page_size)
            if page_table[seq, index] == GARBAGE:
                page_table[seq, index] = next(free_pages)
            page = page_table[seq, index]
            k_cache[page, offset] = random(case.num_kv_heads, case.head_dim)
            v_cache[page, offset] = random(case.num_kv_heads, case.head_dim)
    bias = torch.randn(case.num_buckets, case.num_q_heads, generator=generator)
    return Drawn(qkv, k_cache, v_cache, page_table, bias)


def random_call(case: AttentionCase, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of ops.paged_attention: scattered pages, NaN in slots and garbage in page-table
    entries that no query's keys use, and q as a view of a wider projection."""
    own = Drawn(*(tensor.clone().to(device) for tensor in drawn(case, dtype)))
    return {
        "q": own.qkv[:, : case.num_q_heads, : case.head_dim],
        "k_cache": own.k_cache,
        "v_cache": own.v_cache,
        "page_table": own.page_table,
        "seq_lens": torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        "query_start_loc": torch.tensor(
            [0, *itertools.accumulate(case.num_queries)], dtype=torch.int32, device=device
        ),
        "scale": case.head_dim**-0.5,
        "causal": case.causal,
        "sliding_window": case.sliding_window,
        "fixed_split_size": case.fixed_split_size,
        "position_bias": own.bias if case.num_buckets else None,
        "max_distance": case.max_distance,
        "bidirectional": case.bidirectional,
        "soft_cap": case.soft_cap,
    }


def expected_of(call: dict[str, Any]) -> torch.Tensor:
    return reference.paged_attention(**{k: v for k, v in call.items() if k != "fixed_split_size"})


def with_threads(num_threads: int, call: dict[str, Any]) -> torch.Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return ops.paged_attention(**call)
    finally:
        torch.set_num_threads(before)


def check_alone(call: dict[str, Any], num_queries: int, queries: Iterable[int]) -> None:
    """Rows of the first sequence, each alone on one thread or two, have the bits of the call."""
    together = with_threads(2, call)
    for query in queries:
        alone = {
            **call,
            "q": call["q"][query : query + 1],
            "page_table": call["page_table"][:1],
            "seq_lens": call["seq_lens"][:1] - (num_queries - 1) + query,
            "query_start_loc": call["query_start_loc"].new_tensor([0, 1]),
        }
        for num_threads in (1, 2):
            assert torch.equal(with_threads(num_threads, alone)[0], together[query])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_matches_the_reference(
    case: AttentionCase, dtype: torch.dtype, device: torch.device
) -> None:
    call = random_call(case, dtype, device)
    got = ops.paged_attention(**call)
    tolerance = dataclasses.asdict(TOLERANCES[dtype])
    torch.testing.assert_close(got.double(), expected_of(call), **tolerance)


def test_queries_that_see_no_key_give_zeros(device: torch.device) -> None:
    call = random_call(AttentionCase((5, 2), (2, 0), 4, 2, 64, 8), torch.float32, device)
    out = torch.full(call["q"].shape, torch.nan, device=device)
    ops.paged_attention(**call, out=out)
    assert (out[:3] == 0).all()
    assert (out[3:5] != 0).all()
    assert (out[5:] == 0).all()


def test_a_score_far_below_the_largest_has_no_weight() -> None:
    """On the CPU its exponential would be a subnormal number, which is many times slower."""
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.full((1, 1, 8), 1.0)
        k_cache, v_cache = torch.zeros(2, 1, 16, 1, 8)
        k_cache[0, :2] = torch.tensor([0.0, -95.0 / 8]).view(2, 1, 1)
        v_cache[0, :2] = torch.tensor([0.0, 3e38]).view(2, 1, 1)
        sizes = torch.tensor([2], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
        pages = torch.zeros(1, 1, dtype=torch.int32)
        caches = k_cache.to(dtype), v_cache.to(dtype)
        out = ops.paged_attention(q.to(dtype), *caches, pages, *sizes, scale=1.0)
        assert torch.equal(out, torch.zeros_like(out)), dtype


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    call = random_call(AttentionCase((2,), (200,), 4, 2, 64, 8), torch.float32, device)
    call["scale"] = 30.0
    torch.testing.assert_close(
        ops.paged_attention(**call).double(), expected_of(call), rtol=1e-3, atol=1e-3
    )


# Short and split contexts, windows, rows of a tile that see different keys, position biases.
POISONED_CASES = (
    AttentionCase((1, 1), (70, 9), 4, 2, 64, 8),
    AttentionCase((1, 30), (700, 250), 4, 4, 72, 16, sliding_window=37),
    AttentionCase((70,), (100,), 4, 1, 256, 16, fixed_split_size=40),
    AttentionCase((1,), (3000,), 2, 1, 80, 16),
    AttentionCase((5, 20), (200, 90), 4, 2, 64, 16, num_buckets=32),
)


def key_of(call: dict[str, Any], name: str, seq: int, key: int) -> torch.Tensor:
    """A view of a sequence's key in a cache, [num_kv_heads, head_dim]."""
    cache: torch.Tensor = call[name]
    page, offset = divmod(key, cache.shape[1])
    return cache[int(call["page_table"][seq, page]), offset]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", POISONED_CASES, ids=str)
def test_nan_comes_out_where_it_went_in(
    case: AttentionCase, dtype: torch.dtype, value: float, device: torch.device
) -> None:
    tolerance = dataclasses.asdict(TOLERANCES[dtype])
    seq = len(case.seq_lens) - 1
    length, num_queries = case.seq_lens[seq], case.num_queries[seq]
    window = case.sliding_window or length
    first = max(length - num_queries + 1 - window, 0)
    keys = (length - 1, first + (length - first) // 17, length - 2)
    columns = (0, case.head_dim - 1, case.head_dim // 2)
    for name, key, column in zip(("q", "k_cache", "v_cache"), keys, columns, strict=True):
        call = random_call(case, dtype, device)
        if name == "q":
            call["q"][-1 - key % num_queries, -1, column] = value
        else:
            key_of(call, name, seq, key)[-1, column] = value
        expected = expected_of(call)
        assert expected.isnan().any() or not math.isnan(value)
        for num_threads in (1,) if emulated.is_cuda_kernel(device) else (1, 8):
            got = with_threads(num_threads, call).double()
            torch.testing.assert_close(got, expected, equal_nan=True, **tolerance)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("num_q_heads", [1, 4])
def test_values_of_unseen_keys_match_the_reference(
    num_q_heads: int, value: float, device: torch.device
) -> None:
    call = random_call(AttentionCase((40,), (56,), num_q_heads, 1, 64, 16), torch.bfloat16, device)
    clean = with_threads(1, call)
    key_of(call, "v_cache", 0, 46)[0, 3] = value  # the first 30 queries do not see it
    got = with_threads(1, call)
    assert torch.equal(got[:30], clean[:30])
    assert torch.equal(got[30:, :, 3].isnan(), expected_of(call)[30:, :, 3].isnan())
    assert got[30:, :, 3].isfinite().sum() == 0


def test_scores_of_minus_infinity_alone_weigh_nothing(device: torch.device) -> None:
    call = random_call(AttentionCase((2, 1), (9, 70), 4, 2, 64, 8), torch.float32, device)
    call["q"][2, 0] = 1.0
    for key in range(70):
        key_of(call, "k_cache", 1, key)[0] = -torch.inf
    key_of(call, "v_cache", 1, 40)[0, 5] = torch.nan
    for num_threads in (1, 8):
        got = with_threads(num_threads, call)
        expected = expected_of(call)
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5, equal_nan=True)
        assert got[2, 0].isnan().sum() == 1


@pytest.mark.parametrize(
    ("max_distance", "num_buckets"),
    [(33, 8), (81, 30), (100, 32), (128, 32), (1000, 64), (2**30, 32)],
)
def test_each_distance_has_the_bucket_of_t5(
    max_distance: int, num_buckets: int, device: torch.device
) -> None:
    """Two keys, the second further ahead by one: their weights differ where a bucket starts."""
    num_queries = 2002  # that sit at -2000..1
    call = random_call(AttentionCase((num_queries,), (2,), 2, 2, 8, 2), torch.float32, device)
    call["q"] = torch.zeros(num_queries, 2, 8, device=device)
    call["v_cache"][call["page_table"][0, 0], 0] = 0
    call["v_cache"][call["page_table"][0, 0], 1] = 1
    bias = torch.arange(num_buckets, device=device).float()[:, None].expand(-1, 2).contiguous()
    call |= {"position_bias": bias, "max_distance": max_distance, "bidirectional": True}
    weights = ops.paged_attention(**{**call, "causal": False})[:, 0, 0]
    first = torch.arange(num_queries).flip(0) - 1  # the first key, relative to each query
    buckets = reference.position_bucket(
        torch.stack((first, first + 1)), num_buckets, max_distance, True
    )
    expected = torch.sigmoid((buckets[1] - buckets[0]).float()).to(device)
    torch.testing.assert_close(weights, expected)


def test_a_bias_may_shut_a_bucket_out(device: torch.device) -> None:
    """Minus infinity gives a key no weight, and a query no more than zeros where all keys have it.

    The keys ahead of a causal query are not looked at: their bucket may hold anything.
    """
    case = AttentionCase((1, 1), (60, 1), 4, 2, 64, 8, num_buckets=16, bidirectional=True)
    call = random_call(case, torch.float32, device)
    call["position_bias"][0] = -torch.inf
    call["position_bias"][8:] = torch.nan
    got = ops.paged_attention(**call)
    assert (got[1] == 0).all()
    call["position_bias"] = call["position_bias"][:8].contiguous()
    call["seq_lens"], call["bidirectional"] = call["seq_lens"][:1], False
    call["query_start_loc"], call["q"] = call["query_start_loc"][:2], call["q"][:1]
    call["page_table"] = call["page_table"][:1]
    torch.testing.assert_close(got[:1].double(), expected_of(call), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sliding_window", "num_buckets"), [(0, 0), (90, 0), (0, 32)])
@pytest.mark.parametrize(
    ("head_dim", "num_queries", "fixed_split_size"),
    [(72, 20, 96), (72, 20, 24), (128, 20, 40), (64, 8, 40)],
)
def test_a_fixed_split_makes_a_row_independent_of_its_company(
    head_dim: int,
    num_queries: int,
    sliding_window: int,
    num_buckets: int,
    fixed_split_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Verification equals decoding bit by bit, in any batch, chunk and thread count.

    On CUDA alone a row's keys are shared by blocks, and one or more spans of splits long.
    """
    shape = {
        "sliding_window": sliding_window,
        "fixed_split_size": fixed_split_size,
        "num_buckets": num_buckets,
        "max_distance": 400,
    }
    batch = AttentionCase((num_queries, 2, 1), (310, 40, 500), 6, 2, head_dim, 8, **shape)
    call = random_call(batch, dtype, device)
    check_alone(call, num_queries, (0, 7, num_queries - 1))


# Contexts that blocks share, by fixed splits or not; beside some, short ones and empty ones.
SHARED_CASES = (
    AttentionCase((1,), (3000,), 8, 2, 64, 16),
    AttentionCase((1,), (3000,), 8, 2, 128, 16, fixed_split_size=128),
    AttentionCase((1, 2, 1), (1400, 20, 0), 3, 1, 72, 8, fixed_split_size=96),
    AttentionCase((3, 1), (1800, 700), 4, 1, 64, 16, sliding_window=900),
    AttentionCase((5, 1), (1500, 5), 4, 2, 64, 16, fixed_split_size=64, num_buckets=32),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SHARED_CASES, ids=str)
def test_the_last_block_merges_as_a_second_kernel_does(
    case: AttentionCase, dtype: torch.dtype, device: torch.device
) -> None:
    """The result is equal to the bit in any order of blocks; the counters are 0 again."""
    call = random_call(case, dtype, device)
    expected = ops.paged_attention(**call)
    torch.testing.assert_close(
        expected.double(), expected_of(call), **dataclasses.asdict(TOLERANCES[dtype])
    )
    arrivals = torch.zeros(100, dtype=torch.int32, device=device)
    for seed in range(3):
        if emulated.is_cuda_kernel(device) and device.type == "cpu":
            emulated.set_seed(seed)
        other = {**call, "q": -call["q"]}  # other results of splits lie in memory then
        assert not torch.equal(ops.paged_attention(**other, arrivals=arrivals), expected)
        assert not arrivals.any()
        assert torch.equal(ops.paged_attention(**call, arrivals=arrivals), expected)
        assert not arrivals.any()
    too_few = torch.zeros(1, dtype=torch.int32, device=device)
    assert torch.equal(ops.paged_attention(**call, arrivals=too_few), expected)
    assert not too_few.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_caches(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    """Several heads to a tile and several tiles to a head, NaN where no key is."""
    tolerance = dataclasses.asdict(TOLERANCES[dtype])
    for case in (
        AttentionCase((1, 3), (70, 9), 6, 3, 64, 4),
        AttentionCase((20, 5), (90, 5), 4, 2, 72, 16, sliding_window=30),
        AttentionCase((1,), (700,), 4, 4, 64, 16),
    ):
        call = random_call(case, dtype, device)
        expected = with_threads(2, call)
        _, call["k_cache"], call["v_cache"] = laid_out(layout, call["k_cache"], call["v_cache"])
        got = with_threads(2, call)
        assert torch.equal(got, expected)
        torch.testing.assert_close(got.double(), expected_of(call), **tolerance)


def fuzzed_call(m: Maker) -> Checked:
    dtype, group, heads = m.dtype(), m.size(4, 1), m.size(3, 1)
    width = 8 * m.size(m.one_of(4, 12, 32), 1)
    causal = m.chance(0.7)
    bidirectional = not causal and m.chance()
    most = m.one_of(12, 70, 300)
    lengths = [m.size(most) for _ in range(m.size(4))]
    queries = [m.size(12 if m.chance(0.2) else min(length, 12)) for length in lengths]
    page_size = m.size(17, 1)
    kept, scales = m.cache_format(dtype, heads)
    paged = random_caches(m, lengths, page_size, (heads, width), kept)
    buckets = 2 * m.size(20, 2)
    tokens = sum(queries)
    given = {
        "q": m.placed(m.normal(tokens, heads * group, width).to(dtype), 1),
        **paged,
        "seq_lens": m.placed(torch.tensor(lengths, dtype=torch.int32)),
        "query_start_loc": m.placed(starts(queries)),
        "out": m.placed(m.normal(tokens, heads * group, width).to(dtype), 1),
        "scale": width**-0.5,
        "causal": causal,
        "sliding_window": m.one_of(0, 0, m.size(most), most, 2**31, 2**63 - 1),
        "fixed_split_size": m.one_of(0, 0, m.size(100, 1), 2**31 - 1),
        "position_bias": m.maybe(lambda: m.placed(m.normal(buckets, heads * group))),
        "max_distance": buckets + m.size(200),
        "bidirectional": bidirectional,
        "arrivals": m.maybe(lambda: m.placed(torch.zeros(m.size(40), dtype=torch.int32))),
        **scales,
    }
    if given["position_bias"] is None:
        given["soft_cap"] = m.one_of(0.0, 0.0, 1.5)
    oracle = out_of(reference.paged_attention, "fixed_split_size", "arrivals")
    return given, compare(oracle, looser(dtype))
