"""append_kv: head norm, rotary, scatter by slot; caches that cannot be served."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from cases import APPEND_KV_CASES, DTYPES, TOLERANCES, AppendKvCase
from eecore import ops
from random_calls import Arguments, Checked, Maker, compare, looser

MAX_POSITION = 50
SMALL = AppendKvCase(6, 4, 2, 64, 8, rotary_dim=32, norm=True)


def random_call(case: AppendKvCase, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of ops.append_kv with q, k, v as views of one projection, and a poisoned cache."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    heads = case.num_q_heads + 2 * case.num_kv_heads
    qkv = random(case.num_tokens, heads, case.head_dim)
    q, k, v = qkv.split([case.num_q_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
    num_pages = case.num_tokens // case.page_size + 2
    cache_shape = (num_pages, case.page_size, case.num_kv_heads, case.head_dim)
    slots = torch.randperm(num_pages * case.page_size, generator=generator)[: case.num_tokens]
    if case.num_tokens > 2:
        slots[1] = -1
    call: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "k_cache": torch.full(cache_shape, torch.nan, dtype=dtype, device=device),
        "v_cache": torch.full(cache_shape, torch.nan, dtype=dtype, device=device),
        "slot_mapping": slots.to(device),
    }
    if case.rotary_dim:
        positions = torch.randint(MAX_POSITION, (case.num_tokens,), generator=generator)
        angles = torch.rand(MAX_POSITION, case.rotary_dim // 2, generator=generator) * 100
        call["positions"] = positions.to(device)
        call["cos_sin"] = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)
        if case.q_table:
            call["q_cos_sin"] = 3 * torch.cat([angles.sin(), angles.cos()], dim=-1).to(device)
    if case.norm:
        q_heads, k_heads = (case.num_q_heads, case.num_kv_heads) if case.norms_all else (1, 1)
        call["q_norm_weight"] = random(q_heads * case.head_dim)
        call["k_norm_weight"] = random(k_heads * case.head_dim)
    return call


def assert_matches_the_reference(call: dict[str, Any], dtype: torch.dtype) -> None:
    expected = reference.append_kv(**call)
    ops.append_kv(**call)
    tolerance = dataclasses.asdict(TOLERANCES[dtype])
    for got, want in zip((call["q"], call["k_cache"], call["v_cache"]), expected, strict=True):
        if got is not None:
            torch.testing.assert_close(got.double(), want, equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", APPEND_KV_CASES, ids=str)
def test_matches_the_reference(
    case: AppendKvCase, dtype: torch.dtype, device: torch.device
) -> None:
    assert_matches_the_reference(random_call(case, dtype, device), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_stored_bit_by_bit(dtype: torch.dtype, device: torch.device) -> None:
    call = random_call(SMALL, dtype, device)
    ops.append_kv(**call)
    slots = call["slot_mapping"]
    stored = call["v_cache"].flatten(0, 1)[slots[slots >= 0]]
    assert torch.equal(stored, call["v"][slots >= 0])


def test_a_cache_of_too_many_slots_is_refused() -> None:
    call = random_call(AppendKvCase(2, 1, 0, 64, 1), torch.float32, torch.device("cpu"))
    call["k_cache"] = call["v_cache"] = torch.zeros(2**16, 2**15, 0, 64)
    with pytest.raises(RuntimeError, match=r"k_cache: expected at most 2147483647 slots .*, got"):
        ops.append_kv(**call)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_cache_between_elements_is_refused(name: str) -> None:
    call = random_call(SMALL, torch.float32, torch.device("cpu"))
    memory = bytearray(call[name].nbytes + 1)
    call[name] = torch.frombuffer(memory, dtype=torch.float32, offset=1).view(call[name].shape)
    with pytest.raises(RuntimeError, match=rf"{name}: expected aligned elements .* or misaligned"):
        ops.append_kv(**call)
    assert not any(memory)


def test_a_head_dim_that_is_too_large_is_refused() -> None:
    case = AppendKvCase(1, 1, 1, 520, 1)
    with pytest.raises(
        RuntimeError, match=r"append_kv: k_cache: expected head_dim of 1 to 512, .* 520"
    ):
        ops.append_kv(**random_call(case, torch.float32, torch.device("cpu")))


def fuzzed_call(m: Maker) -> Checked:
    tokens, heads, width, dtype = m.size(12), m.size(4), m.size(130, 1), m.dtype()
    cache = (m.size(4, 1), m.size(9, 1), heads, width)
    kept, scales = m.cache_format(dtype, heads)
    k_cache, v_cache = m.caches(*cache, dtype=kept)
    rotates = m.chance()
    given = {
        "q": m.maybe(lambda: m.placed(m.normal(tokens, m.size(5), width).to(dtype), 1)),
        "k": m.placed(m.normal(tokens, heads, width).to(dtype), 1),
        "v": m.placed(m.normal(tokens, heads, width).to(dtype), 1),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "positions": m.placed(m.whole(30, tokens)) if rotates else None,
        "cos_sin": m.rotary(30, width) if rotates else None,
        "eps": 1e-6,
        **scales,
    }
    q_heads = 0 if given["q"] is None else given["q"].shape[1]
    for name, count in (("q_norm_weight", q_heads), ("k_norm_weight", heads)):
        columns = width * m.one_of(1, max(count, 1))
        given[name] = m.maybe(lambda n=columns: m.placed((1 + m.normal(n) / 8).to(dtype)))
    if rotates and m.chance():
        given["q_cos_sin"] = m.placed(given["cos_sin"].flip(0) * 2)
    tokens = min(tokens, cache[0] * cache[1])
    if m.chance(0.3) and given["q"] is not None:  # of one projection
        heads_of = {name: given[name].shape[1] for name in "qkv"}
        qkv = m.placed(torch.cat([given[name] for name in heads_of], 1), 1)
        given |= dict(zip(heads_of, qkv.split(list(heads_of.values()), 1), strict=True))
    for name in ("q", "k", "v", "positions"):
        given[name] = None if given[name] is None else given[name][:tokens]
    given["slot_mapping"] = m.slots(tokens, k_cache)

    def oracle(before: Arguments) -> dict[str, Tensor]:
        q, k_cache, v_cache = reference.append_kv(**before)
        return {"k_cache": k_cache, "v_cache": v_cache, **({} if q is None else {"q": q})}

    return given, compare(oracle, looser(dtype))
