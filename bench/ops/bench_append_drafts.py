"""append_drafts when every row drafts on, at the batch sizes of serving."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from bench.gpu.case import CPU, Case, Setting, Work, small_cases
from bench.ops.draft_round import drafting_rows
from eecore import ops
from tests.cases import LLAMA_1B


def append(num_rows: int, hidden_size: int, setting: Setting = CPU) -> Work:
    made = drafting_rows(num_rows, hidden_size, setting)
    given = (made.hidden, made.token, made.confidence)
    return Work(partial(ops.append_drafts, *given, 0, made.draft_round, made.active))


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def bench_append_drafts(benchmark, num_rows: int) -> None:
    benchmark(append(num_rows, LLAMA_1B.hidden_size).call)


def gpu_cases(setting: Setting) -> Iterator[Case]:
    size = setting.hidden_size
    moved, name = 2 * size * setting.dtype.itemsize, f"hidden {size}, B={{}}"
    return small_cases("append_drafts", name, moved, lambda b: append(b, size, setting))
