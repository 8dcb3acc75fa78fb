"""accept_mask at the batch sizes of serving."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from bench.gpu.case import CPU, Case, Setting, Work, small_cases
from eecore import ops


def accept(num_seqs: int, setting: Setting = CPU) -> Work:
    confidence, thresholds = torch.rand(2, num_seqs, device=setting.device)
    status = torch.zeros(num_seqs, dtype=torch.bool, device=setting.device)
    exit_layer = torch.zeros(num_seqs, dtype=torch.int32, device=setting.device)
    return Work(partial(ops.accept_mask, confidence, thresholds, 4, status, exit_layer))


@pytest.mark.parametrize("num_seqs", [1, 8, 64, 512])
def bench_accept_mask(benchmark, num_seqs: int) -> None:
    benchmark(accept(num_seqs).call)


def gpu_cases(setting: Setting) -> Iterator[Case]:
    return small_cases("accept_mask", "B={}", 18, lambda b: accept(b, setting))
