"""speculative_accept: six drafts a sequence, greedy and sampled, vocabularies of real models."""

from __future__ import annotations

import pytest
import torch

from bench.harness.ceilings import report
from eecore import ops
from tests.cases import REAL_VOCAB_SIZES

NUM_DRAFTS = 6  # of each sequence


def start_loc(num_seqs: int) -> torch.Tensor:
    return torch.arange(num_seqs + 1, dtype=torch.int32) * NUM_DRAFTS


@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def bench_speculative_accept_greedy(benchmark, num_seqs: int) -> None:
    drafts = torch.zeros(num_seqs * NUM_DRAFTS, dtype=torch.int64)
    targets = torch.zeros(num_seqs * (NUM_DRAFTS + 1), dtype=torch.int64)
    benchmark(ops.speculative_accept, drafts, start_loc(num_seqs), target_tokens=targets)
    report(benchmark, moved_bytes=drafts.nbytes + targets.nbytes)


@pytest.mark.parametrize("accept", [True, False], ids=["accepted", "rejected"])
@pytest.mark.parametrize("vocab_size", REAL_VOCAB_SIZES)
@pytest.mark.parametrize("num_seqs", [1, 8])
def bench_speculative_accept_sampling(
    benchmark, num_seqs: int, vocab_size: int, accept: bool
) -> None:
    num_drafts = num_seqs * NUM_DRAFTS
    drafts = torch.zeros(num_drafts, dtype=torch.int64)
    draft_probs = torch.randn(num_drafts, vocab_size).softmax(dim=-1)
    target_probs = torch.randn(num_drafts + num_seqs, vocab_size).softmax(dim=-1)
    target_probs[:, 0] = 1.0 if accept else 0.0  # the first draft decides
    benchmark(
        ops.speculative_accept,
        drafts,
        start_loc(num_seqs),
        draft_probs=draft_probs,
        target_probs=target_probs,
        uniform=torch.full((num_drafts + num_seqs,), 0.5),
    )
    # One target row a sequence is summed; after a rejection, the draft's row beside it.
    report(benchmark, moved_bytes=num_seqs * vocab_size * 4 * (1 if accept else 2))
