"""begin_verification of eight drafts a row, at the batch sizes of serving."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.cases import drafting_rows
from eecore import ops


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def bench_begin_verification(benchmark, num_rows: int) -> None:
    made = drafting_rows(num_rows, 8, torch.float32, torch.device("cpu"))
    benchmark(ops.begin_verification, made.draft_round, made.verification)
