"""kv_fill of 16 skipped layers: small ones (SmolLM2-135M) and ones of 134 MB (Llama 3.2 1B)."""

from __future__ import annotations

import pytest
import torch

from bench.harness.ceilings import report
from eecore import ops
from tests.cases import LLAMA_1B, SMOLLM2_135M

NUM_LAYERS, PAGE_SIZE = 16, 16


@pytest.mark.parametrize("num_tokens", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("hidden_size", "num_kv_heads"),
    [(model.hidden_size, model.num_kv_heads) for model in (SMOLLM2_135M, LLAMA_1B)],
)
@pytest.mark.parametrize("peer", [False, True], ids=["eecore", "torch"])
def bench_kv_fill(
    benchmark, peer: bool, hidden_size: int, num_kv_heads: int, dtype: torch.dtype, num_tokens: int
) -> None:
    heads_size = num_kv_heads * 64
    hidden = torch.randn(num_tokens, hidden_size).to(dtype)
    exit_layer = torch.zeros(num_tokens, dtype=torch.int32)
    norm_weight = torch.ones(NUM_LAYERS, hidden_size, dtype=dtype)
    kv_weight = torch.randn(NUM_LAYERS, 2 * heads_size, hidden_size).to(dtype)
    k_cache = torch.zeros(NUM_LAYERS, 16, PAGE_SIZE, num_kv_heads, 64, dtype=dtype)
    v_cache = torch.zeros_like(k_cache)
    slots = torch.arange(num_tokens)
    positions = torch.arange(num_tokens)
    cos_sin = torch.ones(64, 64)

    def composed() -> None:
        cos, sin = cos_sin[positions, None].to(dtype).split(32, dim=-1)
        for layer in range(NUM_LAYERS):
            x = torch.nn.functional.rms_norm(hidden, (hidden_size,), norm_weight[layer], 1e-5)
            kv = torch.nn.functional.linear(x, kv_weight[layer]).view(num_tokens, 2, -1, 64)
            a, b = kv[:, 0].split(32, dim=-1)
            k = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
            k_cache[layer].flatten(0, 1)[slots] = k
            v_cache[layer].flatten(0, 1)[slots] = kv[:, 1]

    def fill() -> None:
        ops.kv_fill(
            hidden,
            exit_layer,
            norm_weight,
            ops.Matrix(kv_weight),
            k_cache,
            v_cache,
            slots,
            positions=positions,
            cos_sin=cos_sin,
            eps=1e-5,
        )

    benchmark(composed if peer else fill)
    report(benchmark, moved_bytes=kv_weight.nbytes)
