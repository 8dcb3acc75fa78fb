"""accept_round of eight drafts a row: greedy, and sampled when all are accepted or none."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from bench.gpu.case import CPU, Case, Setting, Work, small_cases
from bench.harness.ceilings import report
from bench.ops.draft_round import drafting_rows
from eecore import ops
from tests.cases import REAL_VOCAB_SIZES


def accept(num_rows: int, setting: Setting = CPU, **sampling: torch.Tensor) -> Work:
    made = drafting_rows(num_rows, 8, setting)
    given = (made.draft_round, made.verification, made.target, made.ended, made.num_accepted)
    return Work(partial(ops.accept_round, *given, **sampling))


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def bench_accept_round_greedy(benchmark, num_rows: int) -> None:
    benchmark(accept(num_rows).call)


@pytest.mark.parametrize("accepted", [True, False], ids=["accepted", "rejected"])
@pytest.mark.parametrize("vocab_size", [REAL_VOCAB_SIZES[0], REAL_VOCAB_SIZES[-1]])
@pytest.mark.parametrize("num_rows", [1, 8])
def bench_accept_round_sampling(benchmark, num_rows: int, vocab_size: int, accepted: bool) -> None:
    target_probs = torch.randn(9 * num_rows, vocab_size).softmax(dim=-1)
    target_probs[:, 1] = 1.0 if accepted else 0.0  # of the drafts' token
    sampling = {
        "sampled": torch.ones(num_rows, dtype=torch.bool),
        "draft_probs": torch.randn(8 * num_rows, vocab_size).softmax(dim=-1),
        "target_probs": target_probs,
        "uniform": torch.full((9 * num_rows, 2), 0.5),
    }
    benchmark(accept(num_rows, **sampling).call)
    # After a rejection, a row of each distribution is read.
    report(benchmark, moved_bytes=num_rows * (9 * 16 if accepted else vocab_size * 4 * 2))


def gpu_cases(setting: Setting) -> Iterator[Case]:
    return small_cases("accept_round", "8 drafts, B={}", 9 * 16, lambda b: accept(b, setting))
