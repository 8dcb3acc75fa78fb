"""compact_rows when every other row exits, at the batch sizes of serving."""

from __future__ import annotations

import pytest
import torch

from bench.ops.rows import active_rows
from eecore import ops
from tests.cases import LLAMA_1B


@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def bench_compact_rows(benchmark, num_seqs: int) -> None:
    active = active_rows(num_seqs)
    hidden = torch.randn(num_seqs, LLAMA_1B.hidden_size)
    row, done = torch.arange(num_seqs, dtype=torch.int32), torch.arange(num_seqs) % 2 == 0

    def exit_half() -> None:
        active.row.copy_(row)
        ops.compact_rows(done, active, hidden)

    benchmark(exit_half)
