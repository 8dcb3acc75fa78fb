"""exit_rows when every row leaves, at the batch sizes of serving."""

from __future__ import annotations

import pytest
import torch

from eecore import ops


@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def bench_exit_rows(benchmark, num_seqs: int) -> None:
    hidden, confidence = torch.rand(num_seqs, 2048), torch.rand(num_seqs)
    head = ops.SoftmaxConfidence(
        confidence, torch.zeros(num_seqs, dtype=torch.int64), confidence, confidence
    )
    rows = ops.ExitingRows(
        gone=torch.zeros(num_seqs, dtype=torch.bool),
        slot_mapping=torch.zeros(num_seqs, dtype=torch.int64),
        seq_lens=torch.ones(num_seqs, dtype=torch.int32),
        hidden=torch.empty_like(hidden),
        confidence=torch.empty_like(confidence),
        exit_layer=torch.zeros(num_seqs, dtype=torch.int32),
        token=torch.empty_like(head.token),
        logprob=torch.empty_like(confidence),
    )

    def leave() -> None:
        rows.gone.zero_()
        ops.exit_rows(hidden, confidence, 4, rows, head=head)

    benchmark(leave)
