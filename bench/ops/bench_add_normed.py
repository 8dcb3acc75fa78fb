"""add_normed of a step and of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from bench.gpu.case import CPU, Case, Setting, Work, small_cases
from bench.harness.ceilings import report
from eecore import ops
from tests.cases import LLAMA_1B


def add(num_rows: int, hidden_size: int, setting: Setting = CPU) -> Work:
    x, residual = (setting.states(num_rows, hidden_size) for _ in range(2))
    weight, out = setting.states(hidden_size), torch.empty_like(residual)
    return Work(partial(ops.add_normed, x, weight, residual, out=out))


@pytest.mark.parametrize("num_rows", [1, 8, 512])
def bench_add_normed(benchmark, num_rows: int) -> None:
    benchmark(add(num_rows, LLAMA_1B.hidden_size).call)
    report(benchmark, moved_bytes=3 * num_rows * LLAMA_1B.hidden_size * 4)


def gpu_cases(setting: Setting) -> Iterator[Case]:
    size = setting.hidden_size
    moved, name = 3 * size * setting.dtype.itemsize, f"hidden {size}, B={{}}"
    return small_cases("add_normed", name, moved, lambda b: add(b, size, setting))
