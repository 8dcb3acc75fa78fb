"""accept_round of eight drafts a row: greedy, and sampled when all are accepted or none."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.cases import drafting_rows
from bench.harness.ceilings import report
from eecore import ops
from tests.cases import REAL_VOCAB_SIZES


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def bench_accept_round_greedy(benchmark, num_rows: int) -> None:
    made = drafting_rows(num_rows, 8, torch.float32, torch.device("cpu"))
    given = (made.draft_round, made.verification, made.target, made.ended, made.num_accepted)
    benchmark(ops.accept_round, *given)


@pytest.mark.parametrize("accept", [True, False], ids=["accepted", "rejected"])
@pytest.mark.parametrize("vocab_size", [REAL_VOCAB_SIZES[0], REAL_VOCAB_SIZES[-1]])
@pytest.mark.parametrize("num_rows", [1, 8])
def bench_accept_round_sampling(benchmark, num_rows: int, vocab_size: int, accept: bool) -> None:
    made = drafting_rows(num_rows, 8, torch.float32, torch.device("cpu"))
    target_probs = torch.randn(9 * num_rows, vocab_size).softmax(dim=-1)
    target_probs[:, 1] = 1.0 if accept else 0.0  # of the drafts' token
    benchmark(
        ops.accept_round,
        *(made.draft_round, made.verification, made.target, made.ended, made.num_accepted),
        sampled=torch.ones(num_rows, dtype=torch.bool),
        draft_probs=torch.randn(8 * num_rows, vocab_size).softmax(dim=-1),
        target_probs=target_probs,
        uniform=torch.full((9 * num_rows, 2), 0.5),
    )
    # After a rejection, a row of each distribution is read.
    report(benchmark, moved_bytes=num_rows * (9 * 16 if accept else vocab_size * 4 * 2))
