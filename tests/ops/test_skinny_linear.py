"""skinny_linear: norm, linear layer and residual, rounded where a model rounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from cases import DTYPES, LARGE_BATCH_SIZES, SKINNY_BATCH_SIZES, SKINNY_LINEARS, TOLERANCES
from eecore import ops
from eecore.ops import AppendKv
from random_calls import Arguments, Checked, Maker, compare, looser, out_of

OPTIONS = ("plain", "all")


def random_call(
    num_tokens: int,
    in_features: int,
    out_features: int,
    options: str = "all",
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    weight = normal(out_features, in_features) / math.sqrt(in_features)
    call: dict[str, Any] = {"x": 3 * normal(num_tokens, in_features), "weight": weight}
    if options == "all":
        call["norm_weight"] = 1 + normal(in_features) / 8
        call["eps"] = 1e-5
        call["bias"] = normal(out_features)
        call["residual"] = normal(num_tokens, out_features)
    return call


def check_against_reference(got: torch.Tensor, call: dict[str, Any]) -> None:
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(
        got, reference.skinny_linear(**call), rtol=tolerance.rtol, atol=2 * tolerance.atol
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("num_tokens", SKINNY_BATCH_SIZES)
def test_matches_the_reference(
    num_tokens: int, options: str, dtype: torch.dtype, device: torch.device
) -> None:
    for in_features, out_features in SKINNY_LINEARS:
        call = random_call(num_tokens, in_features, out_features, options, dtype, device)
        check_against_reference(ops.skinny_linear(**call), call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_relu_comes_before_the_residual(
    num_tokens: int, options: str, dtype: torch.dtype, device: torch.device
) -> None:
    for in_features, out_features in ((64, 65), (576, 192)):
        call = random_call(num_tokens, in_features, out_features, options, dtype, device)
        call["activation"] = "relu"
        got = ops.skinny_linear(**call)
        check_against_reference(got, call)
        if options == "plain":
            assert (got == 0).any()
        else:
            assert (got < 0).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu_of_every_size(dtype: torch.dtype, device: torch.device) -> None:
    values = [0.0, -0.0, 1e-30, -1e-30, 200, -200, torch.inf, -torch.inf, torch.nan]
    x = torch.ones(1, 1, dtype=dtype, device=device)
    weight = torch.tensor(values, dtype=dtype, device=device)[:, None]
    got = ops.skinny_linear(x, weight, activation="relu")
    torch.testing.assert_close(got, weight.T.relu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", LARGE_BATCH_SIZES)
def test_more_rows_than_a_tile_holds(
    num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    call = random_call(num_tokens, 100, 75, dtype=dtype, device=device)
    check_against_reference(ops.skinny_linear(**call), call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounds_the_projection_before_the_residual(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Products of small whole numbers are exact, so that every rounding can be told."""
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-9, 10, shape, generator=generator).to(device=device, dtype=dtype)

    call = {"x": whole(5, 200), "weight": whole(37, 200), "bias": whole(37)}
    call["residual"] = whole(5, 37) * 129
    assert torch.equal(ops.skinny_linear(**call), reference.skinny_linear(**call))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(dtype: torch.dtype, device: torch.device) -> None:
    call = random_call(5, 72, 41, dtype=dtype, device=device)
    expected = reference.skinny_linear(**call)
    for name in ("x", "weight", "residual"):
        width = call[name].shape[1]
        call[name] = torch.cat((call[name], torch.full_like(call[name], torch.nan)), 1)[:, :width]
        assert not call[name].is_contiguous()
    both = torch.full((5, 60), torch.nan, dtype=dtype, device=device)
    out = both[:, 3:44]
    assert ops.skinny_linear(**call, out=out) is out
    torch.testing.assert_close(out, expected, rtol=1.6e-2, atol=2e-2)
    assert both[:, :3].isnan().all()
    assert both[:, 44:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_may_be_the_residual(dtype: torch.dtype, device: torch.device) -> None:
    call = random_call(70, 100, 75, dtype=dtype, device=device)
    expected = ops.skinny_linear(**call)
    ops.skinny_linear(**call, out=call["residual"])
    assert torch.equal(call["residual"], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [1, 4])
def test_rows_that_start_anywhere(start: int, dtype: torch.dtype, device: torch.device) -> None:
    """Beside 16-byte boundaries, and between elements that are not to be read."""
    call = random_call(9, 131, 41, dtype=dtype, device=device)
    expected = ops.skinny_linear(**call)
    for name in ("x", "weight", "norm_weight", "bias", "residual"):
        around = torch.full_like(call[name], torch.nan)
        width = call[name].shape[-1]
        call[name] = torch.cat((around[..., :start], call[name], around), -1)
        call[name] = call[name][..., start : start + width]
    assert torch.equal(ops.skinny_linear(**call), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_features", [100, 1100])
def test_a_row_does_not_depend_on_the_others(
    in_features: int, dtype: torch.dtype, device: torch.device
) -> None:
    call = random_call(41, in_features, 75, dtype=dtype, device=device)
    together = ops.skinny_linear(**call)
    for row in range(41):
        one = {name: call[name][row : row + 1] for name in ("x", "residual")}
        assert torch.equal(ops.skinny_linear(**{**call, **one})[0], together[row])


def test_not_a_number_stays_in_its_row(device: torch.device) -> None:
    call = random_call(5, 64, 33, device=device)
    expected = ops.skinny_linear(**call)
    call["x"][2, 7] = torch.nan
    got = ops.skinny_linear(**call)
    assert got[2].isnan().all()
    rest = [0, 1, 3, 4]
    assert torch.equal(got[rest], expected[rest])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_nothing(dtype: torch.dtype, device: torch.device) -> None:
    call = random_call(5, 576, 1001, dtype=dtype, device=device)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = ops.skinny_linear(**call)
        torch.set_num_threads(2)
        two = ops.skinny_linear(**call)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 8).long()}, r"x: expected float32, bfloat16 .* got int64"),
        ({"x": torch.zeros(2, 8).half()}, r"x: expected float32 or bfloat16 on the CPU"),
        ({"x": torch.zeros(8, 2).T}, r"x: expected the last 1 .* contiguous"),
        ({"x": torch.zeros(2, 0), "weight": torch.zeros(6, 0), "norm_weight": None},
         r"x: expected in_features >= 1, got 0"),
        ({"norm_weight": torch.zeros(7)}, r"norm_weight: expected float32 \[in_features=8\], got"),
        ({"norm_weight": torch.zeros(8).bfloat16()}, r"norm_weight: expected float32 .* bfloat16"),
        ({"weight": torch.zeros(6, 7)}, r"weight: expected float32 \[out_features, in_features=8"),
        ({"weight": torch.zeros(8, 6).T}, r"weight: expected the last 1 .* contiguous"),
        ({"bias": torch.zeros(5)}, r"bias: expected float32 \[out_features=6\], got"),
        ({"residual": torch.zeros(3, 6)}, r"residual: expected float32 \[num_tokens=2, out_featur"),
        ({"residual": torch.zeros(6, 2).T}, r"residual: expected the last 1 .* contiguous"),
        ({"out": torch.zeros(2, 5)}, r"out: expected float32 \[num_tokens=2, out_features=6\], go"),
        ({"out": torch.zeros(6).expand(2, 6)}, r"out: expected elements that do not overlap"),
        ({"eps": -1.0}, r"eps: expected a number >= 0, got -1"),
        ({"activation": "silu"}, r"activation: expected relu, got silu"),
    ],
)  # fmt: skip
def test_bad_input_is_named_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    call = {**random_call(2, 8, 6), "out": torch.zeros(2, 6), **change}
    with pytest.raises(RuntimeError, match=f"skinny_linear: {message}"):
        ops.skinny_linear(**call)
    assert not call["out"].any()


def test_a_residual_that_overlaps_out_is_refused() -> None:
    call = random_call(2, 8, 6)
    memory = torch.zeros(40)
    out = memory[10:22].view(2, 6)
    for residual in (
        memory[4:16].view(2, 6),
        memory[21:33].view(2, 6),
        memory[10:26].view(2, 8)[:, :6],
    ):
        with pytest.raises(RuntimeError, match="out: expected memory apart from residual, or"):
            ops.skinny_linear(**{**call, "residual": residual}, out=out)
    assert not memory.any()
    for residual in (memory[22:34].view(2, 6), memory[:10].as_strided((2, 6), (4, 1))):
        ops.skinny_linear(**{**call, "residual": residual}, out=out)


@pytest.mark.parametrize("activation", [None, "relu"])
def test_opcheck(activation: str | None, device: torch.device) -> None:
    call = random_call(3, 40, 9, device=device)
    call["activation"] = activation
    call["out"] = torch.zeros(3, 9, device=device)
    call["weight_scale"] = None
    torch.library.opcheck(torch.ops.eecore.skinny_linear.default, (), call)


def test_compiles() -> None:
    call = {**random_call(3, 40, 9), "activation": "relu"}
    compiled = torch.compile(ops.skinny_linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**call), ops.skinny_linear(**call))


def fuzzed_call(m: Maker) -> Checked:
    tokens, dtype = m.size(40), m.dtype()
    if m.chance(0.3):
        return appended_call(m, tokens, dtype)
    rows = m.size(70)
    residual = m.maybe(lambda: m.states(tokens, rows, dtype))
    own = residual is None or m.chance()
    given = {
        **m.product(tokens, rows, dtype, (None, "relu")),
        "residual": residual,
        "out": m.states(tokens, rows, dtype) if own else residual,
    }
    return given, compare(out_of(reference.skinny_linear), looser(dtype, 8.0))


def appended_call(m: Maker, tokens: int, dtype: torch.dtype) -> Checked:
    """To heads of q, k and v, which go on to append_kv."""
    width, page_size = m.columns(40), m.size(9, 1)
    heads = m.size(4), m.size(3)
    rows = (heads[0] + 2 * heads[1]) * width
    pages = tokens // page_size + m.size(3, 1)
    k_cache, v_cache = m.caches(pages, page_size, heads[1], width, dtype=dtype)
    rotates, normed = m.chance(), width >= 8 and m.chance()

    def norm() -> Tensor:
        return m.placed((1 + m.normal(width) / 8).to(dtype))

    given = {
        **m.product(tokens, rows, dtype, (None,)),
        "residual": None,
        "out": m.states(tokens, rows, dtype),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": m.slots(tokens, k_cache),
        "positions": m.placed(m.whole(30, tokens)) if rotates else None,
        "cos_sin": m.rotary(30, width) if rotates else None,
        "q_norm_weight": norm() if normed else None,
        "k_norm_weight": norm() if normed else None,
        "key_scales": None,
        "value_scales": None,
    }
    appended = AppendKv._fields

    def oracle(before: Arguments) -> dict[str, Tensor]:
        product = {name: x for name, x in before.items() if name not in (*appended, "out")}
        out = reference.skinny_linear(**product)
        q, k, v = out.view(tokens, sum(heads) + heads[1], width).split((*heads, heads[1]), 1)
        append = {name: before[name] for name in appended}
        turned, k_cache, v_cache = reference.append_kv(q, k, v, **append, eps=before["eps"])
        assert turned is not None
        out = torch.cat((turned.flatten(1), k.flatten(1), v.flatten(1)), 1)
        return {"out": out, "k_cache": k_cache, "v_cache": v_cache}

    return given, compare(oracle, looser(dtype, 8.0))
