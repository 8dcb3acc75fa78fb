"""skinny_gated_linear: norm, gate and up projections, activation(gate) * up, rounded as a model
does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import reference
from cases import DTYPES, LARGE_BATCH_SIZES, SKINNY_BATCH_SIZES, SKINNY_LINEARS, TOLERANCES
from eecore import ops
from random_calls import Checked, Maker, compare, looser, out_of

OPTIONS = ("plain", "all")
ACTIVATIONS = ("silu", "gelu_tanh")


def random_call(
    num_tokens: int,
    in_features: int,
    inner_size: int,
    options: str = "all",
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    weight = normal(2 * inner_size, in_features) / math.sqrt(in_features)
    call: dict[str, Any] = {"x": 3 * normal(num_tokens, in_features), "weight": weight}
    if options == "all":
        call["norm_weight"] = 1 + normal(in_features) / 8
        call["eps"] = 1e-5
        call["bias"] = normal(2 * inner_size)
    return call


def check_against_reference(got: torch.Tensor, call: dict[str, Any]) -> None:
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(
        got, reference.skinny_gated_linear(**call), rtol=tolerance.rtol, atol=2 * tolerance.atol
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("num_tokens", SKINNY_BATCH_SIZES)
def test_matches_the_reference(
    num_tokens: int, options: str, dtype: torch.dtype, device: torch.device
) -> None:
    for in_features, inner_size in SKINNY_LINEARS:
        call = random_call(num_tokens, in_features, inner_size, options, dtype, device)
        check_against_reference(ops.skinny_gated_linear(**call), call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_the_gate_may_go_through_gelu(
    num_tokens: int, options: str, dtype: torch.dtype, device: torch.device
) -> None:
    for in_features, inner_size in ((64, 65), (576, 192)):
        call = random_call(num_tokens, in_features, inner_size, options, dtype, device)
        call["activation"] = "gelu_tanh"
        check_against_reference(ops.skinny_gated_linear(**call), call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", LARGE_BATCH_SIZES)
def test_more_rows_than_a_tile_holds(
    num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    call = random_call(num_tokens, 100, 75, dtype=dtype, device=device)
    check_against_reference(ops.skinny_gated_linear(**call), call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_of_every_size(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    """0 stays 0, large stays large, -large goes to 0, and what is not a number stays so."""
    gates = [0.0, -0.0, 1e-30, 20, -20, 87, -87, 89, -89, 200, -200, 1e30, -1e30, torch.inf]
    gates += [0.5, -0.5, 2, -2, 5, -5, 9, -9, 11, -11, -torch.inf, torch.nan]
    x = torch.ones(1, 1, dtype=dtype, device=device)
    weight = torch.tensor([*gates, *[1.0] * len(gates)], dtype=dtype, device=device)[:, None]
    got = ops.skinny_gated_linear(x, weight, activation=activation)
    expected = reference.activate_gate(weight[: len(gates), 0], activation)[None]
    # 1 + tanh of the oracle loses digits where it is nearly 0.
    atol = 1e-30 if activation == "silu" else 1e-15
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(dtype: torch.dtype, device: torch.device) -> None:
    call = random_call(5, 72, 41, dtype=dtype, device=device)
    expected = reference.skinny_gated_linear(**call)
    for name in ("x", "weight"):
        width = call[name].shape[1]
        call[name] = torch.cat((call[name], torch.full_like(call[name], torch.nan)), 1)[:, :width]
        assert not call[name].is_contiguous()
    both = torch.full((5, 60), torch.nan, dtype=dtype, device=device)
    out = both[:, 3:44]
    assert ops.skinny_gated_linear(**call, out=out) is out
    torch.testing.assert_close(out, expected, rtol=1.6e-2, atol=2e-2)
    assert both[:, :3].isnan().all()
    assert both[:, 44:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [1, 4])
def test_rows_that_start_anywhere(start: int, dtype: torch.dtype, device: torch.device) -> None:
    """Beside 16-byte boundaries, and between elements that are not to be read."""
    call = random_call(9, 131, 41, dtype=dtype, device=device)
    expected = ops.skinny_gated_linear(**call)
    for name in ("x", "weight", "norm_weight", "bias"):
        around = torch.full_like(call[name], torch.nan)
        width = call[name].shape[-1]
        call[name] = torch.cat((around[..., :start], call[name], around), -1)
        call[name] = call[name][..., start : start + width]
    assert torch.equal(ops.skinny_gated_linear(**call), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_features", [100, 1100])
def test_a_row_does_not_depend_on_the_others(
    in_features: int, dtype: torch.dtype, device: torch.device
) -> None:
    call = random_call(41, in_features, 75, dtype=dtype, device=device)
    together = ops.skinny_gated_linear(**call)
    for row in range(41):
        one = {**call, "x": call["x"][row : row + 1]}
        assert torch.equal(ops.skinny_gated_linear(**one)[0], together[row])


def test_not_a_number_stays_in_its_row(device: torch.device) -> None:
    call = random_call(5, 64, 33, device=device)
    expected = ops.skinny_gated_linear(**call)
    call["x"][2, 7] = torch.nan
    got = ops.skinny_gated_linear(**call)
    assert got[2].isnan().all()
    rest = [0, 1, 3, 4]
    assert torch.equal(got[rest], expected[rest])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_nothing(dtype: torch.dtype, device: torch.device) -> None:
    call = random_call(5, 576, 1001, dtype=dtype, device=device)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = ops.skinny_gated_linear(**call)
        torch.set_num_threads(2)
        two = ops.skinny_gated_linear(**call)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 8).long()}, r"x: expected float32, bfloat16 .* got int64"),
        ({"x": torch.zeros(2, 8).half()}, r"x: expected float32 or bfloat16 on the CPU"),
        ({"x": torch.zeros(8, 2).T}, r"x: expected the last 1 .* contiguous"),
        ({"x": torch.zeros(2, 0), "weight": torch.zeros(12, 0), "norm_weight": None},
         r"x: expected in_features >= 1, got 0"),
        ({"norm_weight": torch.zeros(7)}, r"norm_weight: expected float32 \[in_features=8\], got"),
        ({"norm_weight": torch.zeros(8).bfloat16()}, r"norm_weight: expected float32 .* bfloat16"),
        ({"weight": torch.zeros(12, 7)}, r"weight: expected float32 \[12, in_features=8\], got"),
        ({"weight": torch.zeros(11, 8)}, r"weight: expected float32 \[12, in_features=8\], got"),
        ({"weight": torch.zeros(8, 12).T}, r"weight: expected the last 1 .* contiguous"),
        ({"bias": torch.zeros(6)}, r"bias: expected float32 \[12\], got"),
        ({"out": torch.zeros(3, 6)}, r"out: expected float32 \[num_tokens=2, inner_size\], got"),
        ({"out": torch.zeros(6).expand(2, 6)}, r"out: expected elements that do not overlap"),
        ({"eps": -1.0}, r"eps: expected a number >= 0, got -1"),
        ({"activation": "relu"}, r"activation: expected silu or gelu_tanh, got relu"),
    ],
)  # fmt: skip
def test_bad_input_is_named_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    call = {**random_call(2, 8, 6), "out": torch.zeros(2, 6), **change}
    with pytest.raises(RuntimeError, match=f"skinny_gated_linear: {message}"):
        ops.skinny_gated_linear(**call)
    assert not call["out"].any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_opcheck(activation: str, device: torch.device) -> None:
    call = random_call(3, 40, 9, device=device)
    call["activation"] = activation
    call["out"] = torch.zeros(3, 9, device=device)
    call["weight_scale"] = None
    torch.library.opcheck(torch.ops.eecore.skinny_gated_linear.default, (), call)


def test_compiles() -> None:
    call = {**random_call(3, 40, 9), "activation": "gelu_tanh"}
    compiled = torch.compile(ops.skinny_gated_linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**call), ops.skinny_gated_linear(**call))


def fuzzed_call(m: Maker) -> Checked:
    tokens, inner, dtype = m.size(40), m.size(40), m.dtype()
    given = {
        **m.product(tokens, 2 * inner, dtype, ("silu", "gelu_tanh")),
        "out": m.states(tokens, inner, dtype),
    }
    return given, compare(out_of(reference.skinny_gated_linear), looser(dtype, 12.0))
