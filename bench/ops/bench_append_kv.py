"""append_kv at decode and prefill sizes of small and large Llamas."""

from __future__ import annotations

import pytest
import torch

from bench.harness.ceilings import report
from eecore import ops
from tests.cases import LLAMA_8B, SMOLLM2_135M


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
    qkv = torch.randn(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim).to(dtype)
    q, k, v = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    k_cache = torch.zeros(64, 16, num_kv_heads, head_dim, dtype=dtype)
    v_cache = torch.zeros_like(k_cache)
    angles = torch.rand(1024, head_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.arange(num_tokens)
    slots = torch.randperm(1024)[:num_tokens]
    benchmark(ops.append_kv, q, k, v, k_cache, v_cache, slots, positions=positions, cos_sin=cos_sin)
    moved = 2 * qkv.nbytes + num_tokens * (16 + head_dim * 4)  # read and written, indices, angles
    report(benchmark, moved_bytes=moved)
