"""embed_tokens of a step and of a prompt: rows copied, and rows in int8."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.nn import functional

from bench.gpu.case import Case, Setting, Work, small_cases
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


def gpu_cases(setting: Setting) -> Iterator[Case]:
    size = setting.hidden_size

    def make(num_tokens: int) -> Work:
        weight = setting.states(1000, size)
        token_ids = torch.randint(0, 1000, (num_tokens,), device=setting.device)
        call = partial(ops.embed_tokens, token_ids, weight)
        peer = partial(functional.embedding, token_ids, weight)
        return Work(call, {"torch.embedding": peer}, call, lambda _: peer())

    moved = 2 * size * setting.dtype.itemsize
    return small_cases("embed_tokens", f"hidden {size}, B={{}}", moved, make)
