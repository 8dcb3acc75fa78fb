"""skinny_gated_linear of real layers: 128 MB of them in turn, and 8 MB that stay in cache."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from bench.harness.ceilings import report
from eecore import ops
from tests.cases import LLAMA_1B, SMOLLM2_135M


@pytest.mark.parametrize("num_tokens", [1, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("in_features", "inner_size", "working_set"),
    [
        (SMOLLM2_135M.hidden_size, SMOLLM2_135M.inner_size, 8 << 20),
        (LLAMA_1B.hidden_size, LLAMA_1B.inner_size, 128 << 20),
    ],
    ids=["8 MB", "128 MB"],
)
@pytest.mark.parametrize("peer", [False, True], ids=["eecore", "torch"])
def bench_skinny_gated_linear(
    benchmark,
    peer: bool,
    in_features: int,
    inner_size: int,
    working_set: int,
    dtype: torch.dtype,
    num_tokens: int,
) -> None:
    x = torch.randn(num_tokens, in_features).to(dtype)
    norm_weight = torch.ones(in_features, dtype=dtype)
    layer_bytes = 2 * inner_size * in_features * x.element_size()
    weights = torch.randn(max(1, working_set // layer_bytes), 2 * inner_size, in_features).to(dtype)
    layers = weights.unbind(0)

    def composed() -> None:
        for weight in layers:
            normed = functional.rms_norm(x, (in_features,), norm_weight, 1e-5)
            gate, up = functional.linear(normed, weight).chunk(2, dim=1)
            functional.silu(gate).mul_(up)

    def fused() -> None:
        for weight in layers:
            ops.skinny_gated_linear(x, weight, norm_weight=norm_weight, eps=1e-5)

    benchmark(composed if peer else fused)
    report(benchmark, moved_bytes=weights.nbytes)
