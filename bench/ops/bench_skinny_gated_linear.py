"""skinny_gated_linear of real layers: 128 MB of layers in turn, and 8 MB that stay in cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.case import EPS, Case, Setting, Work, rms_norm
from bench.harness.ceilings import report
from eecore import ops
from tests.cases import LLAMA_1B, LLAMA_8B, SMOLLM2_135M


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


def gated_work(num_tokens: int, in_features: int, inner_size: int, setting: Setting) -> Work:
    x = setting.states(num_tokens, in_features)
    norm = torch.rand(in_features, device=setting.device).to(setting.dtype)
    weight = setting.states(2 * inner_size, in_features) * in_features**-0.5
    out = x.new_empty(num_tokens, inner_size)

    def gated() -> Tensor:
        return ops.skinny_gated_linear(
            x, weight, norm_weight=norm, eps=EPS, constant_weight=True, out=out
        )

    def in_torch() -> Tensor:
        gate, up = functional.linear(rms_norm(x, norm), weight).chunk(2, dim=-1)
        return functional.silu(gate) * up

    return Work(gated, {"cuBLAS + torch": in_torch}, gated, lambda _: in_torch())


def gpu_cases(setting: Setting) -> Iterator[Case]:
    real = [(model.hidden_size, model.inner_size) for model in (LLAMA_8B, LLAMA_1B)]
    shapes = [(64, 96)] if setting.tiny else real
    for (k, n), b in itertools.product(shapes, (1, 8, 16, 32, 64)):
        moved = (2 * k * n + b * (k + n)) * setting.dtype.itemsize
        make = partial(gated_work, b, k, n, setting)
        yield Case("skinny_gated_linear", f"{k} -> 2 x {n}, B={b}", moved, make)
