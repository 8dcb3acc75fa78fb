"""sample_tokens: the most probable token, plain sampling, filters; vocabularies of real models."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.cases import sampling_rows
from bench.harness.ceilings import report
from eecore import ops
from tests.cases import REAL_VOCAB_SIZES

WAYS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "all": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("vocab_size", REAL_VOCAB_SIZES)
@pytest.mark.parametrize("num_rows", [1, 8])
def bench_sample_tokens(benchmark, num_rows: int, vocab_size: int, way: str) -> None:
    logits = 3 * torch.randn(num_rows, vocab_size)
    rows, out = sampling_rows(num_rows, vocab_size, torch.device("cpu"), **WAYS[way])
    positions = torch.arange(num_rows)
    benchmark(ops.sample_tokens, logits, rows, out, purpose=0, positions=positions)
    report(benchmark, moved_bytes=logits.nbytes)
