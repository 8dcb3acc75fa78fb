"""kv_fill: the K/V of skipped layers, as those layers would have computed them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import emulated
import reference
from cache_layouts import LAYOUTS, assert_nothing_beside_was_written, laid_out
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
    cache = torch.full((layers, num_pages, case.page_size, heads, width), NAN)
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


@pytest.mark.parametrize("exit_layer", [0, 2, 6, 7, 10, 11, 2**31 - 1])
def test_layers_that_follow_others(exit_layer: int, device: torch.device) -> None:
    call = random_call(KvFillCase(6, num_layers=4), device=device)
    call["exit_layer"][::2] = exit_layer
    call["exit_layer"][1::2] += 6
    check_against_reference({**call, "first_layer": 6})


@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("exit_layer", [0, 1, 3, 4])
def test_one_exit_layer_for_all(num_tokens: int, exit_layer: int, device: torch.device) -> None:
    call = random_call(KvFillCase(num_tokens, num_layers=4), device=device)
    call["exit_layer"].fill_(exit_layer)
    check_against_reference(call)
    call["slot_mapping"] = torch.arange(num_tokens, device=device)
    for cache in filled(ops.kv_fill, call):
        assert cache[:exit_layer].isnan().all()
        assert not cache[exit_layer:].flatten(1, 2)[:, :num_tokens].isnan().any()


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


def test_inputs_and_caches_with_strides(device: torch.device) -> None:
    call = random_call(
        KvFillCase(9, hidden_size=72, num_kv_heads=2, head_dim=80, rotary_dim=80, bias=True,
                   k_norm=True),
        device=device,
    )  # fmt: skip
    for name in ("hidden", "norm_weight", "kv_weight", "kv_bias", "k_norm_weight"):
        width = call[name].shape[-1]
        call[name] = torch.cat((call[name], call[name]), dim=-1)[..., width:]
        assert not call[name].is_contiguous()
    expected = filled(reference.kv_fill, call)
    # K and V of a layer side by side in one allocation.
    both = torch.full((*call["k_cache"].shape[:3], 4, 80), NAN, device=device)
    call["k_cache"], call["v_cache"] = both[..., :2, :], both[..., 2:, :]
    ops.kv_fill(**packed(call))
    torch.testing.assert_close(
        both, torch.cat(expected, dim=-2), rtol=2e-5, atol=2e-5, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_caches(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    case = KvFillCase(9, num_kv_heads=2, head_dim=72, rotary_dim=16, page_size=4, k_norm=True)
    call = random_call(case, dtype, device)
    expected = filled(ops.kv_fill, call)
    caches = laid_out(layout, call["k_cache"], call["v_cache"])
    ops.kv_fill(**packed({**call, "k_cache": caches.k, "v_cache": caches.v}))
    for got, wanted in zip((caches.k, caches.v), expected, strict=True):
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num())
    assert_nothing_beside_was_written(caches)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [1, 4])
def test_rows_that_start_anywhere(start: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rows are off 16-byte boundaries, between elements that must not be read."""
    call = random_call(KvFillCase(9, hidden_size=131, bias=True, k_norm=True), dtype, device)
    expected = filled(ops.kv_fill, call)
    for name in ("hidden", "norm_weight", "kv_weight", "kv_bias", "k_norm_weight"):
        around = torch.full_like(call[name], NAN)
        width = call[name].shape[-1]
        call[name] = torch.cat((around[..., :start], call[name], around), -1)
        call[name] = call[name][..., start : start + width]
    for got, wanted in zip(filled(ops.kv_fill, call), expected, strict=True):
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, device: torch.device) -> None:
    call = random_call(KvFillCase(9, hidden_size=100, k_norm=True), dtype, device)
    call["slot_mapping"] = torch.arange(9, device=device)
    together = filled(ops.kv_fill, call)
    alone = call["k_cache"].clone(), call["v_cache"].clone()
    for row in range(9):
        one = {
            name: call[name][row : row + 1]
            for name in ("hidden", "exit_layer", "slot_mapping", "positions")
        }
        ops.kv_fill(**packed({**call, **one, "k_cache": alone[0], "v_cache": alone[1]}))
    for got, wanted in zip(alone, together, strict=True):
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num())


def test_the_number_of_threads_changes_nothing(device: torch.device) -> None:
    call = random_call(KvFillCase(70, num_layers=5, hidden_size=576, num_kv_heads=3), device=device)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = filled(ops.kv_fill, call)
        torch.set_num_threads(2)
        two = filled(ops.kv_fill, call)
    finally:
        torch.set_num_threads(before)
    for got, wanted in zip(two, one, strict=True):
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num())


SMALL = KvFillCase(2, num_layers=3, hidden_size=8, num_kv_heads=2, head_dim=4, rotary_dim=4,
                   page_size=4, bias=True, k_norm=True)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 8, dtype=torch.int64)}, r"hidden: expected float32, bfloat16"),
        ({"hidden": torch.zeros(2, 8).half()}, r"hidden: expected float32 or bfloat16 on the CPU"),
        ({"exit_layer": torch.zeros(2).long()}, r"exit_layer: expected int32 .* got int64"),
        ({"exit_layer": torch.tensor([-1, 0]).int()},
         r"exit_layer: expected values in \[0, 2147483648\), got -1 at row 0"),
        ({"norm_weight": torch.zeros(3, 7)}, r"norm_weight: expected float32 \[num_layers, hidden"),
        ({"kv_weight": torch.zeros(3, 15, 8)}, r"kv_weight: expected float32 \[num_layers=3, 16, "),
        ({"kv_weight": torch.zeros(3, 8, 16).mT}, r"kv_weight: expected the last 1 .* contiguous"),
        ({"kv_bias": torch.zeros(3, 8)}, r"kv_bias: expected float32 \[num_layers=3, 16\]"),
        ({"k_norm_weight": torch.zeros(2, 4)}, r"k_norm_weight: expected .* \[num_layers=3, head_"),
        ({"k_cache": torch.zeros(2, 2, 4, 2, 4)}, r"k_cache: expected float32.*num_layers=3"),
        ({"k_cache": torch.zeros(3, 2, 4, 2, 8)[..., ::2]}, r"k_cache: expected the last 1 .* con"),
        ({"k_cache": torch.zeros(3, 2, 2, 4, 4).permute(0, 1, 4, 2, 3)}, r"k_cache: .* stride 4 "),
        ({"k_cache": torch.zeros(3, 2, 1, 2, 4).expand(3, 2, 4, 2, 4)}, r"k_cache: .* not overlap"),
        ({"k_cache": torch.zeros(1, 2, 4, 2, 4).expand(3, 2, 4, 2, 4)}, r"k_cache: .* not overlap"),
        ({"v_cache": torch.zeros(3, 2, 4, 1, 4)}, r"v_cache: expected float32.*num_layers=3"),
        ({"v_cache": torch.zeros(3, 2, 4, 1, 4).expand(3, 2, 4, 2, 4)}, r"v_cache: .* not overlap"),
        ({"slot_mapping": torch.tensor([0, 8])},
         r"slot_mapping: expected values in \[-1, 8\), got 8 at row 1"),
        ({"slot_mapping": torch.tensor([-2, 0])},
         r"slot_mapping: expected values in \[-1, 8\), got -2 at row 0"),
        ({"positions": torch.tensor([0, MAX_POSITION])},
         r"positions: expected values in \[0, 40\), got 40 at row 1"),
        ({"positions": None}, r"positions: expected all or none of .*, got cos_sin$"),
        ({"cos_sin": None}, r"cos_sin: expected all or none of positions, cos_sin, got positions$"),
        ({"cos_sin": torch.zeros(9, 6)}, r"cos_sin: expected an even rotary_dim of at most head_d"),
        ({"cos_sin": torch.zeros(9, 3)}, r"cos_sin: expected an even rotary_dim of at most head_d"),
        ({"eps": -1.0}, r"eps: expected a number >= 0, got -1"),
        ({"k_cache": torch.zeros(3, 2, 4, 0, 4), "v_cache": torch.zeros(3, 2, 4, 0, 4),
          "kv_weight": torch.zeros(3, 0, 8), "kv_bias": torch.zeros(3, 0)},
         "k_cache: expected at least one head .*, got num_kv_heads=0, head_dim=4"),
    ],
)  # fmt: skip
def test_bad_input_is_named_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    call = random_call(SMALL)
    call.update(
        exit_layer=torch.zeros(2, dtype=torch.int32),
        k_cache=torch.zeros(3, 2, 4, 2, 4),
        v_cache=torch.zeros(3, 2, 4, 2, 4),
    )
    call.update(change)
    with pytest.raises(RuntimeError, match=f"kv_fill: {message}"):
        ops.kv_fill(**packed(call))
    assert not call["k_cache"].any()
    assert not call["v_cache"].any()


def test_opcheck(device: torch.device) -> None:
    call = random_call(dataclasses.replace(SMALL, num_tokens=5), device=device)
    for name in ("k_cache", "v_cache"):
        call[name] = torch.zeros_like(call[name])
    torch.library.opcheck(torch.ops.eecore.kv_fill.default, (), {**call, "kv_scale": None})


def test_compiles() -> None:
    call = random_call(SMALL)
    expected = filled(ops.kv_fill, call)
    compiled = torch.compile(ops.kv_fill, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(filled(compiled, call), expected, strict=True):
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num())


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
    if m.chance():  # layers that follow others
        given["first_layer"] = m.size(3)
        given["exit_layer"] = m.placed((m.whole(layers + 1 + given["first_layer"], tokens)).int())
    if rotates and m.chance():
        given["cos_sin"] = m.placed(torch.stack([given["cos_sin"], given["cos_sin"].flip(0)]))
        given["layer_ropes"] = m.placed(m.whole(2, layers, 2).int())

    def oracle(before: Arguments) -> dict[str, Tensor]:
        made = dict(before)
        parts = [made.pop(f"kv_{part}") for part in ops.Matrix._fields]
        reference.kv_fill(**made, kv=ops.Matrix(*parts))
        return {name: before[name] for name in ("k_cache", "v_cache")}

    return given, compare(oracle, looser(dtype, 8.0))
