"""sample_tokens: the most probable token, plain sampling, filters; vocabularies of real models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from bench.gpu.case import CPU, Case, Setting, Work, small_cases
from bench.harness.ceilings import report
from eecore import ops
from tests.cases import LLAMA_8B, REAL_VOCAB_SIZES

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
GPU_WAYS = {"plain": {}, "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9}}


def sample(num_rows: int, vocab_size: int, way: dict[str, float], setting: Setting = CPU) -> Work:
    """Inputs of requests that sample, after 100 tokens of text."""
    device = setting.device

    def each(name: str, otherwise: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((num_rows,), way.get(name, otherwise), dtype=dtype, device=device)

    rows = ops.SamplingRows(
        temperature=each("temperature", 1.0),
        top_k=each("top_k", 0, torch.int32),
        top_p=each("top_p", 1.0),
        min_p=each("min_p", 0.0),
        repetition_penalty=each("repetition_penalty", 1.0),
        seed=torch.arange(num_rows, device=device),
        seen=torch.randint(0, vocab_size, (num_rows, 100), device=device),
    )
    numbers = (torch.empty(num_rows, device=device) for _ in range(3))
    out = ops.SampledRows(torch.empty_like(rows.seed), *numbers)
    logits = 3 * setting.states(num_rows, vocab_size)
    positions = torch.arange(num_rows, device=device)
    return Work(partial(ops.sample_tokens, logits, rows, out, purpose=0, positions=positions))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("vocab_size", REAL_VOCAB_SIZES)
@pytest.mark.parametrize("num_rows", [1, 8])
def bench_sample_tokens(benchmark, num_rows: int, vocab_size: int, way: str) -> None:
    benchmark(sample(num_rows, vocab_size, WAYS[way]).call)
    report(benchmark, moved_bytes=num_rows * vocab_size * 4)


def gpu_cases(setting: Setting) -> Iterator[Case]:
    vocab = 1000 if setting.tiny else LLAMA_8B.vocab_size
    for name, way in GPU_WAYS.items():
        yield from small_cases(
            "sample_tokens",
            f"vocabulary {vocab}, {name}, B={{}}",
            vocab * setting.dtype.itemsize,
            partial(sample, vocab_size=vocab, way=way, setting=setting),
            microseconds=None,
        )
