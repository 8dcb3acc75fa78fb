"""exit_confidence_softmax on the LM heads of real models; the head is larger than any cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.case import EPS, Case, Setting, Work, rms_norm
from bench.harness.ceilings import report
from eecore import ops
from tests.cases import LLAMA_1B, LLAMA_8B, SMOLLM2_135M

PEER = "torch matmul + topk"


def softmax_work(num_seqs: int, hidden_size: int, vocab_size: int, setting: Setting) -> Work:
    hidden = setting.states(num_seqs, hidden_size)
    norm = torch.rand(hidden_size, device=setting.device).to(setting.dtype)
    lm_head = setting.states(vocab_size, hidden_size) * hidden_size**-0.5

    def confidence() -> ops.SoftmaxConfidence:
        return ops.exit_confidence_softmax(hidden, norm, lm_head, EPS)

    def logits() -> Tensor:
        return functional.linear(rms_norm(hidden, norm), lm_head)

    def in_torch() -> Tensor:
        top = logits().float().softmax(-1).topk(2, dim=-1).values
        return top[:, 0] - top[:, 1]

    # torch rounds logits to 16 bits, which changes gaps by more than their size, but not the sums.
    return Work(
        confidence,
        {PEER: in_torch},
        lambda: confidence().logsumexp,
        lambda _: logits().float().logsumexp(-1),
    )


@pytest.mark.parametrize("num_seqs", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("hidden_size", "vocab_size"), [SMOLLM2_135M.lm_head, LLAMA_1B.lm_head])
@pytest.mark.parametrize("peer", [False, True], ids=["eecore", "torch"])
def bench_exit_confidence_softmax(
    benchmark, peer: bool, hidden_size: int, vocab_size: int, dtype: torch.dtype, num_seqs: int
) -> None:
    work = softmax_work(num_seqs, hidden_size, vocab_size, Setting(dtype))
    benchmark(work.peers[PEER] if peer else work.call)
    report(benchmark, moved_bytes=vocab_size * hidden_size * dtype.itemsize)


def gpu_cases(setting: Setting) -> Iterator[Case]:
    real = [model.lm_head for model in (LLAMA_8B, LLAMA_1B, SMOLLM2_135M)]
    heads = [(64, 300)] if setting.tiny else real
    for (hidden_size, vocab_size), num_seqs in itertools.product(heads, (1, 4, 8, 16, 32)):
        aimed_at = (hidden_size, vocab_size) == LLAMA_8B.lm_head and num_seqs <= 16
        yield Case(
            "exit_confidence_softmax",
            f"{vocab_size} x {hidden_size}, B={num_seqs}",
            (vocab_size + num_seqs) * hidden_size * setting.dtype.itemsize,
            partial(softmax_work, num_seqs, hidden_size, vocab_size, setting),
            of_copy=0.88 if aimed_at else None,
        )
