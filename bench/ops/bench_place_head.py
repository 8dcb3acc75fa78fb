"""place_head of every row, at the batch sizes of serving."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from bench.gpu.case import CPU, Case, Setting, Work, small_cases
from bench.ops.rows import head_rows
from eecore import ops


def place(num_seqs: int, setting: Setting = CPU) -> Work:
    head = head_rows(num_seqs, setting.device)
    out = ops.HeadRows(*(torch.zeros_like(tensor) for tensor in (head.token, *head[2:])))
    index = torch.arange(num_seqs, dtype=torch.int32, device=setting.device)
    return Work(partial(ops.place_head, head, out, index=index, as_probability=True))


@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def bench_place_head(benchmark, num_seqs: int) -> None:
    benchmark(place(num_seqs).call)


def gpu_cases(setting: Setting) -> Iterator[Case]:
    return small_cases("place_head", "B={}", 48, lambda b: place(b, setting))
