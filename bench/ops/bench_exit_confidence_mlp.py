"""exit_confidence_mlp: CALM's linear classifier, and one with a ReLU hidden layer."""

from __future__ import annotations

import pytest
import torch

from bench.harness.ceilings import report
from eecore import ops
from tests.cases import LLAMA_8B, SMOLLM2_135M


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inner_size", [None, 512], ids=["linear", "inner512"])
@pytest.mark.parametrize("hidden_size", [SMOLLM2_135M.hidden_size, LLAMA_8B.hidden_size])
@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def bench_exit_confidence_mlp(
    benchmark, num_seqs: int, hidden_size: int, inner_size: int | None, dtype: torch.dtype
) -> None:
    rows = inner_size or 2
    hidden = torch.randn(num_seqs, hidden_size).to(dtype)
    weights = [torch.randn(rows, hidden_size), torch.randn(rows)]
    if inner_size is not None:
        weights += [torch.randn(2, inner_size), torch.randn(2)]
    benchmark(ops.exit_confidence_mlp, hidden, *weights)
    report(
        benchmark,
        moved_bytes=hidden.nbytes + sum(weight.nbytes for weight in weights) + 4 * num_seqs,
        flops=2 * num_seqs * rows * hidden_size,
    )
