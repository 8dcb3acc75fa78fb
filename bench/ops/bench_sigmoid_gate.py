"""sigmoid_gate of a step and of a prompt, with the heads of Qwen3.5-0.8B."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from bench.gpu.case import CPU, Case, Setting, Work, small_cases
from bench.harness.ceilings import report
from eecore import ops

HEADS, DIM = 8, 256


def gate(num_rows: int, setting: Setting = CPU) -> Work:
    """The output of attention, and gates beside the queries of their heads."""
    x = setting.states(num_rows, HEADS * DIM).view(num_rows, HEADS, DIM)
    rows = setting.states(num_rows, 2 * HEADS * DIM).view(num_rows, HEADS, 2 * DIM)
    return Work(partial(ops.sigmoid_gate, x, rows[:, :, DIM:], out=x))


@pytest.mark.parametrize("num_rows", [1, 8, 512])
def bench_sigmoid_gate(benchmark, num_rows: int) -> None:
    benchmark(gate(num_rows).call)
    report(benchmark, moved_bytes=3 * num_rows * HEADS * DIM * 4)


def gpu_cases(setting: Setting) -> Iterator[Case]:
    moved, name = 3 * HEADS * DIM * setting.dtype.itemsize, f"{HEADS} heads of {DIM}, B={{}}"
    return small_cases("sigmoid_gate", name, moved, lambda b: gate(b, setting))
