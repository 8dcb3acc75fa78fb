"""append_drafts when every row drafts on, at the batch sizes of serving."""

from __future__ import annotations

import pytest
import torch

from eecore import ops

NUM_STEPS = 8


@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def bench_append_drafts(benchmark, num_seqs: int) -> None:
    hidden, confidence = torch.rand(num_seqs, 2048), torch.rand(num_seqs)
    token = torch.ones(num_seqs, dtype=torch.int64)
    head = ops.SoftmaxConfidence(confidence, token, confidence, confidence)
    draft_round = ops.DraftRound(
        thresholds=torch.zeros(num_seqs),
        stop_tokens=torch.full((num_seqs, 2), -1),
        max_drafts=torch.full((num_seqs,), NUM_STEPS),
        round_slots=torch.zeros(num_seqs, NUM_STEPS + 1, dtype=torch.int64),
        states=torch.empty(num_seqs, NUM_STEPS + 1, 2048),
        tokens=torch.zeros(num_seqs, NUM_STEPS + 1, dtype=torch.int64),
        confidences=torch.zeros(num_seqs, NUM_STEPS),
        num_drafted=torch.zeros(num_seqs, dtype=torch.int64),
        drafting=torch.ones(num_seqs, dtype=torch.bool),
        last_token=token.clone(),
        positions=torch.zeros(num_seqs, dtype=torch.int64),
        slot_mapping=torch.zeros(num_seqs, dtype=torch.int64),
        seq_lens=torch.ones(num_seqs, dtype=torch.int32),
        all_done=torch.zeros(1, dtype=torch.bool),
    )
    benchmark(ops.append_drafts, hidden, head, 0, draft_round)
