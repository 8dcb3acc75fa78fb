"""speculative_accept: six drafts a sequence, greedy and sampled, vocabularies of real models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from bench.gpu.case import CPU, Case, Setting, Work, small_cases
from bench.harness.ceilings import report
from eecore import ops
from tests.cases import REAL_VOCAB_SIZES

NUM_DRAFTS = 6  # of each sequence


def start_loc(num_seqs: int, num_drafts: int, device: torch.device | None = None) -> torch.Tensor:
    return torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * num_drafts


def accept(num_seqs: int, num_drafts: int, setting: Setting = CPU) -> Work:
    """Inputs of which all drafts are accepted."""
    device = setting.device
    drafts = torch.zeros(num_seqs * num_drafts, dtype=torch.int64, device=device)
    targets = torch.zeros(num_seqs * (num_drafts + 1), dtype=torch.int64, device=device)
    starts = start_loc(num_seqs, num_drafts, device)
    return Work(partial(ops.speculative_accept, drafts, starts, target_tokens=targets))


@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def bench_speculative_accept_greedy(benchmark, num_seqs: int) -> None:
    benchmark(accept(num_seqs, NUM_DRAFTS).call)
    report(benchmark, moved_bytes=num_seqs * (2 * NUM_DRAFTS + 1) * 8)


@pytest.mark.parametrize("accepted", [True, False], ids=["accepted", "rejected"])
@pytest.mark.parametrize("vocab_size", REAL_VOCAB_SIZES)
@pytest.mark.parametrize("num_seqs", [1, 8])
def bench_speculative_accept_sampling(
    benchmark, num_seqs: int, vocab_size: int, accepted: bool
) -> None:
    num_drafts = num_seqs * NUM_DRAFTS
    drafts = torch.zeros(num_drafts, dtype=torch.int64)
    draft_probs = torch.randn(num_drafts, vocab_size).softmax(dim=-1)
    target_probs = torch.randn(num_drafts + num_seqs, vocab_size).softmax(dim=-1)
    target_probs[:, 0] = 1.0 if accepted else 0.0  # the first draft decides
    benchmark(
        ops.speculative_accept,
        drafts,
        start_loc(num_seqs, NUM_DRAFTS),
        draft_probs=draft_probs,
        target_probs=target_probs,
        uniform=torch.full((num_drafts + num_seqs,), 0.5),
    )
    # One target row of a sequence is summed; after a rejection, also the draft's row.
    report(benchmark, moved_bytes=num_seqs * vocab_size * 4 * (1 if accepted else 2))


def gpu_cases(setting: Setting) -> Iterator[Case]:
    make = partial(accept, num_drafts=8, setting=setting)
    return small_cases(
        "speculative_accept", "greedy, 8 drafts, B={}", 17 * 8, make, microseconds=None
    )
