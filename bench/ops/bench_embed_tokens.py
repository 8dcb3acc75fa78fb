"""embed_tokens of a step and of a prompt: rows copied, and rows in int8."""

from __future__ import annotations

import pytest
import torch

from bench.harness.ceilings import report
from eecore import ops
from eecore.models.int8 import quantise_rows
from tests.cases import REAL_VOCAB_SIZES, SMOLLM2_135M

VOCAB_SIZE, HIDDEN_SIZE = REAL_VOCAB_SIZES[0], SMOLLM2_135M.hidden_size


@pytest.mark.parametrize("num_tokens", [1, 8, 512])
@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
def bench_embed_tokens(benchmark, int8: bool, num_tokens: int) -> None:
    weight, scale = torch.randn(VOCAB_SIZE, HIDDEN_SIZE), None
    if int8:
        weight, scale = quantise_rows(weight)
    token_ids = torch.randint(0, VOCAB_SIZE, (num_tokens,))
    out = torch.empty(num_tokens, HIDDEN_SIZE)
    benchmark(lambda: ops.embed_tokens(token_ids, weight, scale=scale, out=out))
    moved = num_tokens * HIDDEN_SIZE * (weight.itemsize + out.itemsize)
    report(benchmark, moved_bytes=moved)
