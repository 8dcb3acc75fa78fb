"""append_kv: head norm, rotary, scatter by slot; slots and positions are held to their tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from cache_layouts import LAYOUTS, assert_nothing_beside_was_written, laid_out
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
def test_works_without_q(dtype: torch.dtype, device: torch.device) -> None:
    assert_matches_the_reference({**random_call(SMALL, dtype, device), "q": None}, dtype)


def test_layers_and_interleaved_caches_may_be_strided(device: torch.device) -> None:
    call = random_call(SMALL, torch.float32, device)
    num_pages, page_size, num_kv_heads, head_dim = call["k_cache"].shape
    cache = torch.full((3, num_pages, page_size, 2, num_kv_heads, head_dim), -7.0, device=device)
    call["k_cache"], call["v_cache"] = cache[1, :, :, 0], cache[1, :, :, 1]
    assert_matches_the_reference(call, torch.float32)
    assert (cache[0] == -7).all()
    assert (cache[2] == -7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_caches(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    for case in (SMALL, AppendKvCase(17, 6, 3, 72, 4, rotary_dim=16)):
        call = random_call(case, dtype, device)
        caches = laid_out(layout, call["k_cache"], call["v_cache"])
        assert_matches_the_reference({**call, "k_cache": caches.k, "v_cache": caches.v}, dtype)
        assert_nothing_beside_was_written(caches)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_may_start_anywhere(dtype: torch.dtype, device: torch.device) -> None:
    call = random_call(SMALL, dtype, device)
    for name in ("q", "k", "v", "k_cache", "v_cache", "q_norm_weight"):
        whole = call[name]
        wider = torch.zeros(whole.numel() + 1, dtype=dtype, device=device)
        if name in ("q", "k", "v"):  # an odd distance between heads
            wider = torch.zeros(*whole.shape[:-1], whole.shape[-1] + 3, dtype=dtype, device=device)
            call[name] = wider[..., 2:-1].copy_(whole)
        else:
            call[name] = wider[1:].view(whole.shape).copy_(whole)
    assert_matches_the_reference(call, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_stored_bit_by_bit(dtype: torch.dtype, device: torch.device) -> None:
    call = random_call(SMALL, dtype, device)
    ops.append_kv(**call)
    slots = call["slot_mapping"]
    stored = call["v_cache"].flatten(0, 1)[slots[slots >= 0]]
    assert torch.equal(stored, call["v"][slots >= 0])


def test_slot_minus_one_writes_nothing_but_its_query(device: torch.device) -> None:
    call = random_call(SMALL, torch.float32, device)
    call["slot_mapping"].fill_(-1)
    before = call["q"].clone()
    assert_matches_the_reference(call, torch.float32)
    assert call["k_cache"].isnan().all()
    assert call["v_cache"].isnan().all()
    assert not torch.equal(call["q"], before)


def test_does_not_depend_on_the_number_of_threads(device: torch.device) -> None:
    case = AppendKvCase(300, 8, 2, 128, 16, rotary_dim=128, norm=True)
    results = []
    before = torch.get_num_threads()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        call = random_call(case, torch.float32, device)
        ops.append_kv(**call)
        results.append((call["q"].clone(), call["k_cache"].nan_to_num()))
    torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(6, 2, 64, dtype=torch.float64)}, r"k: expected float32, bfloat16 .*"),
        ({"v": torch.zeros(6, 3, 64)}, r"v: .*num_kv_heads=2, .* got float32 \[6, 3, 64\]"),
        ({"v": torch.zeros(6, 2, 128)[..., ::2]}, r"v: expected the last 1 .* contiguous"),
        ({"q": torch.zeros(5, 4, 64)}, r"q: expected float32 \[num_tokens=6, .* \[5, 4, 64\]"),
        ({"q": torch.zeros(6, 4, 64).bfloat16()}, r"q: expected float32 .* got bfloat16"),
        ({"k_cache": torch.zeros(2, 8, 2, 32)}, r"k_cache: expected .*head_dim=64.*, 32\]"),
        ({"v_cache": torch.zeros(3, 8, 2, 64)}, r"v_cache: expected .*num_pages=2"),
        (
            {"k_cache": torch.zeros(2, 2, 64, 8).permute(0, 3, 1, 2)},
            r"k_cache: .* got stride 8 ins",
        ),
        ({"v_cache": torch.zeros(2, 8, 2, 128)[..., ::2]}, r"v_cache: expected the last 1 .* co"),
        ({"k_cache": torch.zeros(1, 8, 2, 64).expand(2, 8, 2, 64)}, r"k_cache: .* do not overlap"),
        ({"v_cache": torch.zeros(2, 8, 1, 64).expand(2, 8, 2, 64)}, r"v_cache: .* do not overlap"),
        (
            {"k_cache": torch.zeros(1500).as_strided((2, 8, 2, 64), (512, 64, 32, 1))},
            r"k_cache: .* do not overlap, got strides \[512, 64, 32, 1\]",
        ),
        ({"slot_mapping": torch.zeros(6).int()}, r"slot_mapping: expected int64 .* got int32"),
        (
            {"slot_mapping": torch.tensor([0, 1, 16, 2, 3, 4])},
            r"slot_mapping: .*\[-1, 16\), got 16",
        ),
        ({"slot_mapping": torch.tensor([0, 1, -2, 2, 3, 4])}, r"slot_mapping: .* got -2 at row 2"),
        ({"positions": torch.zeros(5).long()}, r"positions: expected int64 \[num_tokens=6\]"),
        ({"positions": torch.full((6,), 50)}, r"positions: expected values in \[0, 50\), got 50"),
        ({"positions": torch.full((6,), -1)}, r"positions: expected values in .* got -1 at row 0"),
        ({"cos_sin": None}, r"cos_sin: expected float32 .* with positions, got None"),
        ({"cos_sin": torch.zeros(50, 31)}, r"cos_sin: expected an even rotary_dim .* got 31"),
        ({"cos_sin": torch.zeros(50, 66)}, r"cos_sin: expected an even rotary_dim .* got 66"),
        ({"q_norm_weight": torch.ones(32)}, r"q_norm_weight: expected float32 \[head_dim=64\]"),
        ({"k_norm_weight": torch.ones(64).bfloat16()}, r"k_norm_weight: .* got bfloat16"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    call = {**random_call(SMALL, torch.float32, torch.device("cpu")), **change}
    before = call["q"].clone()
    with pytest.raises(RuntimeError, match=f"append_kv: {message}"):
        ops.append_kv(**call)
    assert torch.equal(call["q"], before)


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


def test_opcheck(device: torch.device) -> None:
    call = random_call(SMALL, torch.float32, device)
    call["k_cache"].zero_()
    call["v_cache"].zero_()
    call["q"] = call["q"].contiguous()
    call["k"] = call["k"].contiguous()
    call["v"] = call["v"].contiguous()
    torch.library.opcheck(torch.ops.eecore.append_kv.default, (*call.values(), 1e-6))


def test_compiles_as_one_graph() -> None:
    call = random_call(SMALL, torch.float32, torch.device("cpu"))
    call["q"] = call["q"].contiguous()
    q = call["q"].clone()

    def step(q: torch.Tensor) -> torch.Tensor:
        ops.append_kv(**{**call, "q": q})
        return q * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(q.clone())
    torch.testing.assert_close(compiled, step(q.clone()))


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
