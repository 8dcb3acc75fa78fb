"""append_kv at decode and prefill sizes of small and large Llamas."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from bench.gpu.case import PAGE_SIZE, Case, Setting, Work, small_cases
from bench.harness.ceilings import report
from eecore import ops
from tests.cases import LLAMA_8B, SMOLLM2_135M

NUM_SLOTS = 1024


def append(num_tokens: int, heads: tuple[int, int, int], setting: Setting) -> Work:
    (num_q_heads, num_kv_heads, head_dim), device = heads, setting.device
    num_heads = [num_q_heads, num_kv_heads, num_kv_heads]
    qkv = setting.states(num_tokens, sum(num_heads), head_dim).split(num_heads, dim=1)
    cache_shape = (NUM_SLOTS // PAGE_SIZE, PAGE_SIZE, num_kv_heads, head_dim)
    caches = (torch.zeros(cache_shape, dtype=setting.dtype, device=device) for _ in "kv")
    angles = torch.rand(NUM_SLOTS, head_dim // 2, device=device)
    return Work(
        partial(
            ops.append_kv,
            *(*qkv, *caches, torch.randperm(NUM_SLOTS, device=device)[:num_tokens]),
            positions=torch.arange(num_tokens, device=device),
            cos_sin=torch.cat([angles.cos(), angles.sin()], dim=-1),
        )
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim"), [SMOLLM2_135M.heads, LLAMA_8B.heads]
)
@pytest.mark.parametrize("num_tokens", [1, 8, 512])
def bench_append_kv(
    benchmark,
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    benchmark(append(num_tokens, (num_q_heads, num_kv_heads, head_dim), Setting(dtype)).call)
    # Heads are read and written; indices and angles are read.
    per_token = 2 * (num_q_heads + 2 * num_kv_heads) * head_dim * dtype.itemsize
    report(benchmark, moved_bytes=num_tokens * (per_token + 16 + head_dim * 4))


def gpu_cases(setting: Setting) -> Iterator[Case]:
    num_q_heads, num_kv_heads, head_dim = LLAMA_8B.heads
    row = (2 * (num_q_heads + num_kv_heads) + 2 * num_kv_heads) * head_dim * setting.dtype.itemsize
    name = f"{num_q_heads}/{num_kv_heads} heads of {head_dim}, B={{}}"
    make = partial(append, heads=LLAMA_8B.heads, setting=setting)
    return small_cases("append_kv", name, row, make, microseconds=None)
