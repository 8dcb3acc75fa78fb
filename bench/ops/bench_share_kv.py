"""share_kv for rows that exit after the first of four loops of Ouro 1.4B's 24 layers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from bench.gpu.case import CPU, Case, Setting, Work, small_cases
from bench.harness.ceilings import report
from eecore import ops

LOOPS, LAYERS, HEADS, HEAD_DIM = 4, 24, 16, 128
ROW_BYTES = 2 * HEADS * HEAD_DIM
"""Bytes of keys and values of one row and layer, in bfloat16."""


def share(num_rows: int, setting: Setting = CPU) -> Work:
    place = {"device": setting.device}
    shape = LOOPS * LAYERS, num_rows, 16, HEADS, HEAD_DIM
    k_cache, v_cache = (torch.zeros(shape, dtype=torch.bfloat16, **place) for _ in "kv")
    exits = torch.full((num_rows,), LAYERS, dtype=torch.int32, **place)
    slots = 16 * torch.arange(num_rows, **place)
    return Work(partial(ops.share_kv, exits, k_cache, v_cache, slots, LAYERS))


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def bench_share_kv(benchmark, num_rows: int) -> None:
    benchmark(share(num_rows).call)
    report(benchmark, moved_bytes=moved(num_rows))


def moved(num_rows: int) -> int:
    """Bytes that are read and written: each of the three other loops gets a copy."""
    return 2 * num_rows * (LOOPS - 1) * LAYERS * 2 * ROW_BYTES


def gpu_cases(setting: Setting) -> Iterator[Case]:
    return small_cases(
        "share_kv", "24 layers in 4 loops, B={}", moved(1), lambda b: share(b, setting)
    )
