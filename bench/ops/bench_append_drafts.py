"""append_drafts when every row drafts on, at the batch sizes of serving."""

from __future__ import annotations

import pytest
import torch

from eecore import ops
from gpu_cases import drafting_rows


@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def bench_append_drafts(benchmark, num_seqs: int) -> None:
    rows = drafting_rows(num_seqs, 2048, torch.float32, torch.device("cpu"))
    benchmark(lambda: ops.append_drafts(*rows[:2], 0, rows[2]))
