"""exit_confidence_cosine at the widths of real models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from bench.gpu.case import Case, Setting, Work, small_cases
from bench.harness.ceilings import report
from eecore import ops
from tests.cases import LLAMA_8B, SMOLLM2_135M


def cosine(num_seqs: int, hidden_size: int, setting: Setting) -> Work:
    previous, hidden = setting.states(2, num_seqs, hidden_size)
    call = partial(ops.exit_confidence_cosine, previous, hidden)

    def in_torch() -> torch.Tensor:
        return torch.cosine_similarity(previous.float(), hidden.float())

    return Work(call, {"torch": in_torch}, call, lambda _: in_torch())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden_size", [SMOLLM2_135M.hidden_size, LLAMA_8B.hidden_size])
@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def bench_exit_confidence_cosine(
    benchmark, num_seqs: int, hidden_size: int, dtype: torch.dtype
) -> None:
    benchmark(cosine(num_seqs, hidden_size, Setting(dtype)).call)
    report(benchmark, moved_bytes=num_seqs * (2 * hidden_size * dtype.itemsize + 4))


def gpu_cases(setting: Setting) -> Iterator[Case]:
    size = setting.hidden_size
    moved = 2 * size * setting.dtype.itemsize
    make = partial(cosine, hidden_size=size, setting=setting)
    return small_cases("exit_confidence_cosine", f"{size}, B={{}}", moved, make)
