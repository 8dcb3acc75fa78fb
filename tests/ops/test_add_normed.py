"""add_normed: adds a sublayer's normed output to the residual stream."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import emulated
import reference
from cases import BATCH_SIZES, DTYPES, HIDDEN_SIZES, TOLERANCES
from eecore import ops
from random_calls import Arguments, Checked, Maker, compare, looser


def random_call(
    num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device | None = None
) -> dict[str, Any]:
    """Arguments of a call, rows of x and of the residual with others between them."""
    generator = torch.Generator().manual_seed(num_tokens + hidden_size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    return {
        "x": 3 * normal(num_tokens, hidden_size + 3)[:, 1 : 1 + hidden_size],
        "norm_weight": 1 + normal(hidden_size) / 8,
        "residual": normal(num_tokens, hidden_size + 2)[:, :hidden_size],
        "eps": 1e-5,
        "multiplier": 0.3,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_matches_the_reference(hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    if not emulated.supports(device, dtype):
        pytest.skip("float16 is for CUDA")
    call = random_call(5, hidden_size, dtype, device)
    tolerance = dataclasses.asdict(TOLERANCES[dtype])
    torch.testing.assert_close(ops.add_normed(**call), reference.add_normed(**call), **tolerance)


@pytest.mark.parametrize("num_tokens", BATCH_SIZES)
def test_any_batch_onto_the_residual_itself(num_tokens: int, device: torch.device) -> None:
    call = random_call(num_tokens, 72, torch.float32, device)
    expected = reference.add_normed(**call)
    wide = call["residual"]
    assert ops.add_normed(**call, out=wide) is wide
    torch.testing.assert_close(wide, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_alone(dtype: torch.dtype, device: torch.device) -> None:
    if not emulated.supports(device, dtype):
        pytest.skip("float16 is for CUDA")
    call = {**random_call(5, 72, dtype, device), "residual": None}
    tolerance = dataclasses.asdict(TOLERANCES[dtype])
    torch.testing.assert_close(ops.add_normed(**call), reference.add_normed(**call), **tolerance)


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    call = random_call(9, 100, torch.float32, device)
    together = ops.add_normed(**call)
    for row in range(9):
        one = {name: call[name][row : row + 1] for name in ("x", "residual")}
        assert torch.equal(ops.add_normed(**{**call, **one}), together[row : row + 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 8).long()}, "x: expected float32, bfloat16"),
        ({"x": torch.zeros(2, 0), "norm_weight": torch.zeros(0)}, r"residual: .*hidden_size=0\]"),
        ({"norm_weight": torch.ones(9)}, r"norm_weight: expected float32 \[hidden_size=8\], got"),
        ({"residual": torch.zeros(3, 8)}, r"residual: expected float32 \[num_tokens=2, hidden_si"),
        ({"residual": torch.zeros(2, 8).bfloat16()}, "residual: expected float32 .* got bfloat16"),
        ({"eps": -1.0}, "eps: expected a number >= 0, got -1"),
        ({"out": torch.zeros(1, 8).expand(2, 8)}, "out: expected elements that do not overlap"),
        ({"out": torch.zeros(2, 7)}, r"out: expected float32 \[num_tokens=2, hidden_size=8\]"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    out = torch.full((2, 8), 9.0)
    call = {**random_call(2, 8, torch.float32), "out": out, **change}
    with pytest.raises(RuntimeError, match=f"add_normed: {message}"):
        ops.add_normed(**call)
    assert (out == 9).all()


def test_opcheck(device: torch.device) -> None:
    call = random_call(3, 16, torch.float32, device)
    call["out"] = torch.zeros(3, 16, device=device)
    torch.library.opcheck(torch.ops.eecore.add_normed.default, (), call)


def fuzzed_call(m: Maker) -> Checked:
    tokens, size, dtype = m.size(20), m.columns(70), m.dtype()
    residual = m.maybe(lambda: m.states(tokens, size, dtype))
    given = {
        "x": m.states(tokens, size, dtype),
        "norm_weight": m.placed((1 + m.normal(size) / 8).to(dtype)),
        "eps": 1e-5,
        "multiplier": m.one_of(1.0, 0.3),
        "residual": residual,
        "out": residual if residual is not None and m.chance() else m.states(tokens, size, dtype),
    }

    def oracle(before: Arguments) -> dict[str, Tensor]:
        return {"out": reference.add_normed(**{n: t for n, t in before.items() if n != "out"})}

    return given, compare(oracle, looser(dtype))
