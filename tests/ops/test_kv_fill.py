"""kv_fill: the K/V of skipped layers, as those layers would have computed them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import emulated
import reference
from cases import DTYPES, KV_FILL_CASES, TOLERANCES, KvFillCase
from eecore import ops
from random_calls import Arguments, Checked, Maker, compare, looser

NAN = float("nan")
MAX_POSITION = 40


def random_call(
    case: KvFillCase,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Arguments of a call: caches of NaN, kv_weight a view of a stacked QKV weight."""
    generator = torch.Generator().manual_seed(case.num_tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def integers(low: int, high: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, (case.num_tokens,), generator=generator, dtype=dtype)

    layers, heads, width = case.num_layers, case.num_kv_heads, case.head_dim
    num_pages = case.num_tokens // case.page_size + 2
    cache = torch.full((layers, case.num_loops * num_pages, case.page_size, heads, width), NAN)
    qkv = normal(layers, 4 * heads * width, case.hidden_size) / math.sqrt(case.hidden_size)
    slots = torch.randperm(num_pages * case.page_size, generator=generator)[: case.num_tokens]
    slots[integers(0, 6) == 0] = -1
    call: dict[str, Any] = {
        "hidden": 3 * normal(case.num_tokens, case.hidden_size),
        "exit_layer": integers(0, layers + 1, torch.int32),
        "norm_weight": 1 + 0.1 * normal(layers, case.hidden_size) if case.pre_norm else None,
        "kv_weight": qkv,
        "k_cache": cache,
        "v_cache": cache.clone(),
        "slot_mapping": slots,
        "eps": 1e-5,
    }
    if case.num_loops > 1:  # rows in loops of their own, which skip whole loops
        of_loop = call["loop_slots"] = num_pages * case.page_size
        slots[slots >= 0] += of_loop * integers(0, case.num_loops)[slots >= 0]
        call["exit_layer"] = layers * integers(0, case.num_loops + 1, torch.int32)
    if case.bias:
        call["kv_bias"] = normal(layers, 2 * heads * width)
    if case.k_norm:
        call["k_norm_weight"] = 1 + 0.1 * normal(layers, width * (heads if case.norms_all_k else 1))
    if case.rotary_dim:
        tables = (case.num_ropes,) if case.num_ropes else ()
        angles = normal(*tables, MAX_POSITION, case.rotary_dim // 2)
        call["positions"] = integers(0, MAX_POSITION)
        call["cos_sin"] = torch.cat((angles.cos(), angles.sin()), dim=-1)
    if case.num_ropes:
        places = torch.randint(0, case.num_ropes, (layers, 2), generator=generator)
        call["layer_ropes"] = places.int()
    for name, value in call.items():
        if isinstance(value, torch.Tensor):
            is_model = value.is_floating_point() and name != "cos_sin"
            call[name] = value.to(device=device, dtype=dtype if is_model else value.dtype)
    call["kv_weight"] = call["kv_weight"][:, 2 * heads * width :]
    return call


def packed(call: dict[str, Any]) -> dict[str, Any]:
    """The call as the wrapper takes it, of one as the schema does."""
    rest = dict(call)
    parts = [rest.pop(f"kv_{part}", None) for part in ops.Matrix._fields]
    return {**rest, "kv": ops.Matrix(*parts)}


def filled(fill: Any, call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    k_cache, v_cache = call["k_cache"].clone(), call["v_cache"].clone()
    fill(**packed({**call, "k_cache": k_cache, "v_cache": v_cache}))
    return k_cache, v_cache


def check_against_reference(call: dict[str, Any]) -> None:
    tolerance = TOLERANCES[call["hidden"].dtype]
    expected = filled(reference.kv_fill, call)
    for got, wanted in zip(filled(ops.kv_fill, call), expected, strict=True):
        # Slots that the call does not name keep their NaN.
        assert torch.equal(got.isnan(), wanted.isnan())
        torch.testing.assert_close(
            got, wanted, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", KV_FILL_CASES, ids=str)
def test_matches_the_reference(case: KvFillCase, dtype: torch.dtype, device: torch.device) -> None:
    check_against_reference(random_call(case, dtype, device))


def test_layers_that_no_row_needs_and_rows_without_a_slot_are_never_read(
    device: torch.device,
) -> None:
    call = random_call(KvFillCase(8, num_layers=4, bias=True, k_norm=True), device=device)
    call["exit_layer"] = call["exit_layer"].clamp(min=2)
    call["exit_layer"][3] = 2
    call["slot_mapping"] = torch.arange(8, device=device)
    call["slot_mapping"][5] = -1
    expected = filled(ops.kv_fill, call)
    for name in ("norm_weight", "kv_weight", "kv_bias", "k_norm_weight"):
        call[name][:2] = NAN
    call["hidden"][5] = NAN
    for got, wanted in zip(filled(ops.kv_fill, call), expected, strict=True):
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_are_those_of_append_kv(dtype: torch.dtype, device: torch.device) -> None:
    # A hidden state of one element, 1 after its norm, projects to the weights themselves; their
    # sum with the bias is rounded before the norm of the head.
    case = KvFillCase(5, hidden_size=1, num_kv_heads=2, bias=True, k_norm=True)
    call = random_call(case, dtype, device)
    call["hidden"].fill_(1)
    call["norm_weight"].fill_(1)
    call["exit_layer"].fill_(0)
    call["eps"] = 0.0
    k_cache, v_cache = filled(ops.kv_fill, call)
    for layer in range(3):
        sums = call["kv_weight"][layer][:, 0].float() + call["kv_bias"][layer].float()
        kv = sums.to(dtype).view(1, 2, 2, 64).expand(5, -1, -1, -1)
        wanted = call["k_cache"][layer].clone(), call["v_cache"][layer].clone()
        ops.append_kv(
            None,
            kv[:, 0],
            kv[:, 1],
            *wanted,
            call["slot_mapping"],
            positions=call["positions"],
            cos_sin=call["cos_sin"],
            k_norm_weight=call["k_norm_weight"][layer],
            eps=0.0,
        )
        for got, expected in zip((k_cache[layer], v_cache[layer]), wanted, strict=True):
            if emulated.is_cuda_kernel(device):
                # The sum of squares has another order there.
                tolerance = TOLERANCES[dtype]
                torch.testing.assert_close(
                    got, expected, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True
                )
            else:
                assert torch.equal(got.isnan(), expected.isnan())
                assert torch.equal(got.nan_to_num(), expected.nan_to_num())


SMALL = KvFillCase(2, num_layers=3, hidden_size=8, num_kv_heads=2, head_dim=4, rotary_dim=4,
                   page_size=4, bias=True, k_norm=True)  # fmt: skip


def fuzzed_call(m: Maker) -> Checked:
    layers, heads, width, size = m.size(3), m.size(2, 1), m.size(40, 1), m.columns(70)
    dtype, rotates = m.dtype(), m.chance()
    cache = (layers, m.size(5, 1), m.size(9, 1), heads, width)
    kept, scales = m.cache_format(dtype, layers, heads)
    k_cache, v_cache = m.caches(*cache, dtype=kept)
    tokens = min(m.size(40), cache[1] * cache[2])
    kv = m.weight(dtype, layers, 2 * heads * width, size)

    def norm(columns: int) -> Tensor:
        return m.placed((1 + m.normal(layers, columns) / 8).to(dtype), 1)

    given = {
        "hidden": m.inputs(kv, tokens, size, dtype, 3.0),
        "exit_layer": m.placed(m.whole(layers + 1, tokens).int()),
        "norm_weight": m.maybe(lambda: m.norm_of(kv, dtype, layers, size)),
        "kv_weight": kv.weight,
        "kv_bias": m.maybe(lambda: m.placed(m.normal(layers, 2 * heads * width).to(dtype), 1)),
        "kv_scale": kv.scale,
        "kv_table": kv.table,
        "k_norm_weight": m.maybe(lambda: norm(width * m.one_of(1, heads))),
        "positions": m.placed(m.whole(30, tokens)) if rotates else None,
        "cos_sin": m.rotary(30, width) if rotates else None,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": m.slots(tokens, k_cache),
        "eps": 1e-5,
        **scales,
    }
    if m.chance(0.3):  # some layers have no keys
        numbers = m.shuffled(layers + 3)[:layers].sort().values
        given["layer_numbers"] = m.placed(numbers.int())
        given["exit_layer"] = m.placed(m.whole(layers + 4, tokens).int())
    elif layers and m.chance():  # a looped model, with pages of each loop
        loops = m.one_of(*(count for count in (1, 2, 3, 4, 5) if cache[1] % count == 0))
        of_loop = given["loop_slots"] = cache[1] // loops * cache[2]
        given["exit_layer"] = m.placed((layers * m.whole(loops + 1, tokens)).int())
        slots, count = torch.full((tokens,), -1), min(tokens, of_loop)
        slots[:count] = m.shuffled(of_loop)[:count] + of_loop * m.whole(loops, count)
        given["slot_mapping"] = m.placed(slots)
    if rotates and m.chance():
        given["cos_sin"] = m.placed(torch.stack([given["cos_sin"], given["cos_sin"].flip(0)]))
        given["layer_ropes"] = m.placed(m.whole(2, layers, 2).int())

    def oracle(before: Arguments) -> dict[str, Tensor]:
        made = dict(before)
        parts = [made.pop(f"kv_{part}") for part in ops.Matrix._fields]
        reference.kv_fill(**made, kv=ops.Matrix(*parts))
        return {name: before[name] for name in ("k_cache", "v_cache")}

    return given, compare(oracle, looser(dtype, 8.0))
