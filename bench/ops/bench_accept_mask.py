"""accept_mask at the batch sizes of serving."""

from __future__ import annotations

import pytest
import torch

from eecore import ops


@pytest.mark.parametrize("num_seqs", [1, 8, 64, 512])
def bench_accept_mask(benchmark, num_seqs: int) -> None:
    confidence = torch.rand(num_seqs)
    thresholds = torch.rand(num_seqs)
    status = torch.zeros(num_seqs, dtype=torch.bool)
    exit_layer = torch.zeros(num_seqs, dtype=torch.int32)
    benchmark(ops.accept_mask, confidence, thresholds, 4, status, exit_layer)
