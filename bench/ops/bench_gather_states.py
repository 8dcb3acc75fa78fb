"""gather_states of eight drafts a row, at the batch sizes of serving."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from bench.gpu.case import CPU, Case, Setting, Work, small_cases
from bench.harness.ceilings import report
from bench.ops.draft_round import drafting_rows
from eecore import ops
from tests.cases import LLAMA_1B


def gather(num_rows: int, hidden_size: int, setting: Setting = CPU) -> Work:
    made = drafting_rows(num_rows, hidden_size, setting)
    states = made.draft_round.states
    assert states is not None
    out = states.new_empty(9 * num_rows, hidden_size)
    return Work(partial(ops.gather_states, states, made.hidden, made.verification, out))


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def bench_gather_states(benchmark, num_rows: int) -> None:
    benchmark(gather(num_rows, LLAMA_1B.hidden_size).call)
    report(benchmark, moved_bytes=2 * 9 * num_rows * LLAMA_1B.hidden_size * 4)


def gpu_cases(setting: Setting) -> Iterator[Case]:
    size = setting.hidden_size
    moved, name = 2 * 9 * size * setting.dtype.itemsize, f"hidden {size}, 8 drafts, B={{}}"
    return small_cases("gather_states", name, moved, lambda b: gather(b, size, setting))
