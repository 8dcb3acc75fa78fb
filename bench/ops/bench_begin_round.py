"""begin_round at the batch sizes of serving, eight drafts a row at most."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.cases import PAGE_SIZE, drafting_rows
from eecore import ops


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def bench_begin_round(benchmark, num_rows: int) -> None:
    made = drafting_rows(num_rows, 8, torch.float32, torch.device("cpu"))
    benchmark(ops.begin_round, made.draft_round, made.active, PAGE_SIZE)
