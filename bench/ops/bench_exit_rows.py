"""exit_rows when every row is accepted and leaves, at the batch sizes of serving."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.cases import active_rows, exiting_rows, head_rows
from eecore import ops


@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def bench_exit_rows(benchmark, num_seqs: int) -> None:
    cpu = torch.device("cpu")
    hidden, rows = exiting_rows(num_seqs, 2048, torch.float32, cpu)
    head, active, thresholds = (
        head_rows(num_seqs, cpu),
        active_rows(num_seqs, cpu),
        torch.zeros(num_seqs),
    )

    def leave() -> None:
        rows.gone.zero_()
        ops.exit_rows(hidden, 4, rows, active, thresholds=thresholds, head=head)

    benchmark(leave)
