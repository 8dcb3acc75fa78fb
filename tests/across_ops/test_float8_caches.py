"""Caches in float8: each op that writes them writes the same bits, and attention reads them."""

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
import reference
from cases import (
    APPEND_KV_CASES,
    ATTENTION_CASES,
    DTYPES,
    KV_FILL_CASES,
    TOLERANCES,
    AppendKvCase,
    AttentionCase,
    KvFillCase,
)
from eecore import ops

Call = dict[str, Any]

FLOAT8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
# On a GPU there is no kernel for both.
UNBIASED_CASES = tuple(case for case in ATTENTION_CASES if not case.num_buckets)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def codes_of(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8)


def assert_same(got: Tensor, expected: Tensor) -> None:
    """Tensors have to be equal bit for bit, NaN included."""
    assert torch.equal(codes_of(got), codes_of(expected))


def poisoned(like: Tensor) -> Tensor:
    """A cache of NaN, which is 0x7f here."""
    return torch.full_like(like, 0x7F, dtype=torch.uint8).view(FLOAT8)


def every_number() -> Tensor:
    """All numbers of float8 in float32, the midpoints between them, and the neighbours of both."""
    whole = torch.arange(0x7F, dtype=torch.uint8).view(FLOAT8).float()
    middles = (whole[1:] + whole[:-1]) / 2
    exact = torch.cat((whole, middles))
    near = [exact, *(exact.nextafter(torch.tensor(to)) for to in (-1.0, torch.inf))]
    others = torch.tensor([448.1, 464.0, 480.0, 1e4, 3e38, torch.inf, torch.nan, 1e-6, 1e-40])
    magnitudes = torch.cat((*near, others))
    return torch.cat((magnitudes, -magnitudes))


def random_scales(*shape: int, seed: int = 3) -> Tensor:
    return 0.1 + 2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@dtypes
def test_every_number_is_rounded_to_the_nearest(dtype: torch.dtype, device: torch.device) -> None:
    numbers = every_number().to(dtype)
    for head_dim in (8, 40, 64, 72, 128):
        v = torch.nn.functional.pad(numbers, (0, -len(numbers) % head_dim)).view(-1, 1, head_dim)
        v = v.to(device)
        slots = torch.arange(len(v), device=device)
        caches = [
            torch.full((len(v), 1, 1, head_dim), torch.nan, device=device).to(FLOAT8)
            for _ in range(2)
        ]
        ops.append_kv(None, v, v, *caches, slots)
        for cache in caches:
            expected = reference.to_float8(v)
            assert_same(cache[:, 0], torch.where(v.isnan(), torch.nan, expected.float()).to(FLOAT8))
            assert (codes_of(cache[:, 0])[v.isnan()] == 0x7F).all()


@dtypes
def test_every_number_is_read_as_it_is(dtype: torch.dtype, device: torch.device) -> None:
    """One key has weight 1, so that the output is its value."""
    for head_dim in (8, 64, 72, 128, 256):
        codes = torch.arange(256, dtype=torch.uint8)
        count = -(-256 // head_dim)
        v = codes.repeat(8)[: count * head_dim].view(count, 1, 1, head_dim).view(FLOAT8).to(device)
        got = ops.paged_attention(
            torch.zeros(count, 2, head_dim, dtype=dtype, device=device),
            torch.zeros_like(v),
            v,
            torch.arange(count, dtype=torch.int32, device=device)[:, None],
            torch.ones(count, dtype=torch.int32, device=device),
            torch.arange(count + 1, dtype=torch.int32, device=device),
            scale=1.0,
        )
        expected = v[:, 0].to(dtype).expand(-1, 2, -1)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def appended(call: Call, **changes: Any) -> tuple[Tensor, Tensor]:
    own = {**call, **changes}
    for name in ("q", "k_cache", "v_cache"):
        own[name] = own[name].clone()
    ops.append_kv(**own)
    return own["k_cache"], own["v_cache"]


@dtypes
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("case", APPEND_KV_CASES, ids=str)
def test_appended_is_what_floats_are_rounded_to(
    case: AppendKvCase, scaled: bool, dtype: torch.dtype, device: torch.device
) -> None:
    call = test_append_kv.random_call(case, dtype, device)
    scales = {
        name: random_scales(case.num_kv_heads, seed=seed).to(device) if scaled else None
        for seed, name in enumerate(("key_scales", "value_scales"))
    }
    narrow = {name: poisoned(call[name]) for name in ("k_cache", "v_cache")}
    k, v = appended(call, **narrow, **scales)
    slots = call["slot_mapping"]
    written, at = slots >= 0, slots[slots >= 0]
    assert_same(
        v.flatten(0, 1)[at], reference.to_float8(call["v"], scales["value_scales"])[written]
    )
    # The same numbers in float32, as norm and rotary give them.
    wide = {
        name: value.float()
        for name, value in call.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    expected = reference.to_float8(appended({**call, **wide})[0], scales["key_scales"])
    got = k.flatten(0, 1)[at]
    if emulated.is_cuda_kernel(device) and dtype != torch.float32:  # other lanes, another order
        steps = codes_of(got).int() - codes_of(expected.flatten(0, 1)[at]).int()
        assert ((steps == 0) | (steps.abs() == 1)).all()
        assert (steps != 0).sum() <= steps.numel() // 1000
    else:
        assert_same(got, expected.flatten(0, 1)[at])
    unwritten = torch.ones(k.flatten(0, 1).shape[0], dtype=torch.bool, device=device)
    unwritten[at] = False
    for cache in (k, v):
        assert (codes_of(cache.flatten(0, 1)[unwritten]) == 0x7F).all()


@dtypes
@pytest.mark.parametrize("case", KV_FILL_CASES, ids=str)
def test_filled_is_what_floats_are_rounded_to(
    case: KvFillCase, dtype: torch.dtype, device: torch.device
) -> None:
    call = test_kv_fill.random_call(case, dtype, device)
    floats = test_kv_fill.filled(ops.kv_fill, call)
    shape = (case.num_layers, case.num_kv_heads)
    scales = {
        name: random_scales(*shape, seed=seed).to(device)
        for seed, name in enumerate(("key_scales", "value_scales"))
    }
    narrow = {name: poisoned(call[name]) for name in ("k_cache", "v_cache")}
    filled = test_kv_fill.filled(ops.kv_fill, {**call, **narrow, **scales})
    for got, cache, each in zip(filled, floats, scales.values(), strict=True):
        expected = cache.float() * (1.0 / each[:, None, None, :, None])
        expected = torch.where(cache.isnan(), torch.nan, expected.clamp(-448, 448)).to(FLOAT8)
        codes_of(expected)[cache.isnan()] = 0x7F
        # Keys are rounded once, not to the model's dtype before.
        if dtype == torch.float32 or each is scales["value_scales"]:
            assert_same(got, expected)
        else:
            torch.testing.assert_close(
                got.float(), expected.float(), rtol=0.13, atol=2.0**-9, equal_nan=True
            )


def narrowed(call: Call, *, scaled: bool = True) -> Call:
    """A call of attention whose caches are in float8."""
    heads = call["k_cache"].shape[2]
    made = dict(call)
    for seed, name in enumerate(("key", "value")):
        scales = random_scales(heads, seed=seed).to(call["q"].device) if scaled else None
        made[f"{name}_scales"] = scales
        made[f"{name[0]}_cache"] = reference.to_float8(call[f"{name[0]}_cache"], scales)
    return made


@dtypes
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("case", UNBIASED_CASES, ids=str)
def test_attention_matches_the_reference(
    case: AttentionCase, scaled: bool, dtype: torch.dtype, device: torch.device
) -> None:
    call = narrowed(test_paged_attention.random_call(case, dtype, device), scaled=scaled)
    tolerance = dataclasses.asdict(TOLERANCES[dtype])
    if scaled and dtype == torch.bfloat16:  # weights are rounded before values are scaled
        tolerance["atol"] *= 2
    got = ops.paged_attention(**call)
    expected = test_paged_attention.expected_of(call)
    torch.testing.assert_close(got.double(), expected, **tolerance)


@dtypes
@pytest.mark.parametrize(("head_dim", "num_queries"), [(72, 20), (128, 20), (64, 8)])
def test_a_row_is_independent_of_its_company(
    head_dim: int, num_queries: int, dtype: torch.dtype, device: torch.device
) -> None:
    batch = AttentionCase(
        (num_queries, 2, 1), (310, 40, 500), 6, 2, head_dim, 8, fixed_split_size=96
    )
    call = narrowed(test_paged_attention.random_call(batch, dtype, device))
    test_paged_attention.check_alone(call, num_queries, (0, 7, num_queries - 1))


@dtypes
@pytest.mark.parametrize("case", test_paged_attention.POISONED_CASES[:-1], ids=str)
def test_nan_comes_out_where_it_went_in(
    case: AttentionCase, dtype: torch.dtype, device: torch.device
) -> None:
    tolerance = dataclasses.asdict(TOLERANCES[dtype])
    seq = len(case.seq_lens) - 1
    length = case.seq_lens[seq]
    # NaN with either sign.
    for name, key, column, code in (
        ("k_cache", length - 1, 0, 0x7F),
        ("v_cache", length - 2, -1, 0xFF),
    ):
        call = narrowed(test_paged_attention.random_call(case, dtype, device), scaled=False)
        codes = codes_of(test_paged_attention.key_of(call, name, seq, key))
        codes[-1, column] = code
        expected = test_paged_attention.expected_of(call)
        assert expected.isnan().any()
        got = ops.paged_attention(**call).double()
        torch.testing.assert_close(got, expected, equal_nan=True, **tolerance)


def refused(op: Any, call: Call, message: str, caches: tuple[Tensor, ...]) -> None:
    before = [codes_of(cache).clone() for cache in caches]
    with pytest.raises(RuntimeError, match=message):
        op(**call)
    for cache, kept in zip(caches, before, strict=True):
        assert torch.equal(codes_of(cache), kept)


SMALL = AppendKvCase(6, 4, 2, 64, 8, rotary_dim=32, norm=True)


def test_bad_caches_are_named_and_change_nothing() -> None:
    floats = test_append_kv.random_call(SMALL, torch.float32, CPU)
    caches = floats["k_cache"], floats["v_cache"]
    refused(
        ops.append_kv,
        {**floats, "key_scales": torch.ones(2)},
        "key_scales: expected None with a cache that is not in float8",
        caches,
    )
    for name in ("k_cache", "v_cache"):
        mixed = {**floats, name: floats[name].to(FLOAT8)}
        refused(ops.append_kv, mixed, "v_cache: expected the dtype of k_cache, .* got", caches)
    e5m2 = {**floats, "k_cache": floats["k_cache"].to(torch.float8_e5m2)}
    refused(ops.append_kv, e5m2, "k_cache: expected float32.* or float8_e4m3fn .*", caches)
