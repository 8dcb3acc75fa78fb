"""sigmoid_gate: the output of attention times a gate."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch import Tensor

import emulated
from cases import DTYPES, TOLERANCES
from eecore import ops
from random_calls import Checked, Maker, compare, looser


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return x.double() * gate.double().sigmoid()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    if not emulated.supports(device, dtype):
        pytest.skip("float16 is for CUDA")
    draw = torch.Generator().manual_seed(0)
    x, rows = (torch.randn(3, 2, n, generator=draw).to(dtype).to(device) for n in (37, 74))
    gate = rows[:, :, 37:]  # beside the queries of its head
    gate *= 40
    got = ops.sigmoid_gate(x, gate)
    expected = sigmoid_gate(x.cpu(), gate.cpu()).to(dtype)
    torch.testing.assert_close(got.cpu(), expected, **asdict(TOLERANCES[dtype]))
    assert ops.sigmoid_gate(x, gate, out=x) is x
    assert torch.equal(x, got)


def fuzzed_call(m: Maker) -> Checked:
    dtype, shape = m.dtype(), (m.size(9), m.size(5, 1), m.size(40, 1))
    x = m.placed((m.normal(*shape)).to(dtype))
    gate = m.placed((m.normal(*shape) * 10).to(dtype), 1)
    out = x if m.chance(0.3) else m.placed(torch.full(shape, torch.nan).to(dtype))
    given = {"x": x, "gate": gate, "out": out}
    return given, compare(lambda b: {"out": sigmoid_gate(b["x"], b["gate"])}, looser(dtype))
