"""exit_confidence_softmax on the LM heads of real models; the head is larger than any cache."""

from __future__ import annotations

import pytest
import torch

from bench.harness.ceilings import report
from eecore import ops
from tests.cases import LLAMA_1B, SMOLLM2_135M


@pytest.mark.parametrize("num_seqs", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("hidden_size", "vocab_size"), [SMOLLM2_135M.lm_head, LLAMA_1B.lm_head])
@pytest.mark.parametrize("peer", [False, True], ids=["eecore", "torch"])
def bench_exit_confidence_softmax(
    benchmark, peer: bool, hidden_size: int, vocab_size: int, dtype: torch.dtype, num_seqs: int
) -> None:
    hidden = torch.randn(num_seqs, hidden_size).to(dtype)
    norm_weight = torch.ones(hidden_size, dtype=dtype)
    lm_head = (torch.randn(vocab_size, hidden_size) / hidden_size**0.5).to(dtype)

    def composed() -> torch.Tensor:
        x = torch.nn.functional.rms_norm(hidden, (hidden_size,), norm_weight, 1e-5)
        logits = torch.nn.functional.linear(x, lm_head).float()
        top = logits.softmax(-1).topk(2, dim=-1)
        return top.values[:, 0] - top.values[:, 1]

    if peer:
        benchmark(composed)
    else:
        benchmark(ops.exit_confidence_softmax, hidden, norm_weight, lm_head, 1e-5)
    report(benchmark, moved_bytes=lm_head.nbytes)
