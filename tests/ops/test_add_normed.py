"""add_normed: adds a sublayer's normed output to the residual stream."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import emulated
import reference
from cases import DTYPES, HIDDEN_SIZES, TOLERANCES
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
