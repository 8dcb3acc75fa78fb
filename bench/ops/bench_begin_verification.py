"""begin_verification of eight drafts a row, at the batch sizes of serving."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from bench.gpu.case import CPU, Case, Setting, Work, small_cases
from bench.ops.draft_round import drafting_rows
from eecore import ops


def begin(num_rows: int, setting: Setting = CPU) -> Work:
    made = drafting_rows(num_rows, 8, setting)
    return Work(partial(ops.begin_verification, made.draft_round, made.verification))


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def bench_begin_verification(benchmark, num_rows: int) -> None:
    benchmark(begin(num_rows).call)


def gpu_cases(setting: Setting) -> Iterator[Case]:
    return small_cases("begin_verification", "8 drafts, B={}", 9 * 44, lambda b: begin(b, setting))
