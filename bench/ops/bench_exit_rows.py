"""exit_rows when every row leaves, at the batch sizes of serving."""

from __future__ import annotations

import pytest
import torch

from eecore import ops
from gpu_cases import exiting_rows


@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def bench_exit_rows(benchmark, num_seqs: int) -> None:
    hidden, head, rows = exiting_rows(num_seqs, 2048, torch.float32, torch.device("cpu"))

    def leave() -> None:
        rows.gone.zero_()
        ops.exit_rows(hidden, head.confidence, 4, rows, head=head)

    benchmark(leave)
