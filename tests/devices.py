"""Where, and how, the tests of the runtime decode.

EECORE_TEST_DEVICE: ``cpu`` unless it says ``cuda``, a GPU, or ``emulated``, the path of CUDA over
the emulator, on the CPU's memory. Those two leave out what is about the CPU's own kernels
(:data:`cpu_only`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import eecore
import emulated
from eecore import ops
from eecore.decoding.capture import CallByCall, RunProgram, Tapes
from eecore.models import draft_head
from eecore.models.linear import MAX_SKINNY_ROWS
from eecore.ops import Matrix

DEVICE = os.environ.get("EECORE_TEST_DEVICE", "cpu")
if DEVICE not in ("cpu", "cuda", "emulated"):
    raise ValueError(f"EECORE_TEST_DEVICE: expected cpu, cuda or emulated, got {DEVICE!r}")


def heads_in_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have draft heads that are loaded draft with floats on the CPU too, as on a GPU."""
    monkeypatch.setattr(draft_head._Form, "matrix", lambda form, t, *_: Matrix(form.floats(t)))


cpu_only = pytest.mark.skipif(DEVICE != "cpu", reason="about the CPU's kernels")
# What a probability or its logarithm differs by when other rows run beside its own. On the CPU a row
# rounds alike whatever runs beside it.
ROUNDING = 0.0 if DEVICE == "cpu" else 1e-4
if DEVICE == "emulated":
    emulated.route(pytest.MonkeyPatch())  # for good
    heads_in_floats(pytest.MonkeyPatch())


def load(directory: Path, **settings: Any) -> eecore.Model:
    """``eecore.load`` on the device that is asked for."""
    model = eecore.load(directory, device="cuda" if DEVICE == "cuda" else "cpu", **settings)
    if DEVICE == "emulated":
        as_on_cuda(model)
    return model


def as_on_cuda(model: eecore.Model) -> eecore.Model:
    """The model on the CPU's memory as it runs on CUDA: single ops, rows masked, call by call."""
    model.network.calls_single_ops = True
    model.network.linear.max_rows = MAX_SKINNY_ROWS
    model.run_program = CallByCall()
    return model


class Traced(Tapes):
    """Runs programs on the CPU, and keeps which calls their replays made."""

    def __init__(self) -> None:
        super().__init__(lambda tape: self.calls.extend(tape.trace()))
        self.calls: list[ops.CallTrace] = []

    def of(self, op: str) -> list[ops.CallTrace]:
        """The calls of one op."""
        return [call for call in self.calls if call.op == op]

    @property
    def executions(self) -> int:
        """(row, layer) pairs that ran."""
        return sum(
            call.num_tokens * (call.end_layer - call.begin_layer)
            for call in self.of("decoder_layers")
        )


def engine_of(
    model: eecore.Model,
    config: eecore.EngineConfig | None = None,
    *,
    run: RunProgram | None = None,
    ahead: bool | None = None,
) -> eecore.Engine:
    """An engine that decodes as the model's own does, or a run ahead of what it knows."""
    return eecore.Engine(
        model.network,
        model.tokenizer,
        config or model.engine_config,
        run=run or model.run_program,
        ahead=ahead,
    )
