"""select_rows when every other row is picked, at the batch sizes of serving."""

from __future__ import annotations

import pytest
import torch

from eecore import ops


@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def bench_select_rows(benchmark, num_seqs: int) -> None:
    hidden, states = torch.randn(2, num_seqs, 2048).unbind()
    accepted = torch.arange(num_seqs) % 2 == 1
    benchmark(lambda: ops.select_rows(hidden, accepted=accepted, states=states))
