"""exit_confidence_cosine at the widths of real models."""

from __future__ import annotations

import pytest
import torch

from bench.harness.ceilings import report
from eecore import ops
from tests.cases import LLAMA_8B, SMOLLM2_135M


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden_size", [SMOLLM2_135M.hidden_size, LLAMA_8B.hidden_size])
@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def bench_exit_confidence_cosine(
    benchmark, num_seqs: int, hidden_size: int, dtype: torch.dtype
) -> None:
    previous = torch.randn(num_seqs, hidden_size).to(dtype)
    hidden = torch.randn(num_seqs, hidden_size).to(dtype)
    benchmark(ops.exit_confidence_cosine, previous, hidden)
    report(benchmark, moved_bytes=2 * hidden.nbytes + 4 * num_seqs)
