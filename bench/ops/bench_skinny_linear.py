"""skinny_linear of real layers: 128 MB of layers in turn, 8 MB that stay in cache; many rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.case import EPS, PAGE_SIZE, Case, Setting, Work
from bench.harness.ceilings import report
from eecore import ops
from eecore.models.int8 import quantise_rows
from tests.cases import LLAMA_1B, LLAMA_8B, SMOLLM2_135M, ModelSizes

NUM_SLOTS = 1024


@pytest.mark.parametrize("num_tokens", [1, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("in_features", "out_features", "working_set"),
    [
        (SMOLLM2_135M.hidden_size, SMOLLM2_135M.qkv_size, 8 << 20),
        (LLAMA_1B.q_size, LLAMA_1B.hidden_size, 128 << 20),
    ],
    ids=["8 MB", "128 MB"],
)
@pytest.mark.parametrize("peer", [False, True], ids=["eecore", "torch"])
def bench_skinny_linear(
    benchmark,
    peer: bool,
    in_features: int,
    out_features: int,
    working_set: int,
    dtype: torch.dtype,
    num_tokens: int,
) -> None:
    x = torch.randn(num_tokens, in_features).to(dtype)
    norm_weight = torch.ones(in_features, dtype=dtype)
    residual = torch.randn(num_tokens, out_features).to(dtype)
    layer_bytes = in_features * out_features * x.element_size()
    weights = torch.randn(max(1, working_set // layer_bytes), out_features, in_features).to(dtype)
    layers = weights.unbind(0)

    def composed() -> None:
        for weight in layers:
            normed = functional.rms_norm(x, (in_features,), norm_weight, 1e-5)
            functional.linear(normed, weight).add_(residual)

    def fused() -> None:
        for weight in layers:
            ops.skinny_linear(x, weight, norm_weight=norm_weight, eps=1e-5, residual=residual)

    benchmark(composed if peer else fused)
    report(benchmark, moved_bytes=weights.nbytes)


@pytest.mark.parametrize("num_tokens", [32, 72, 128, 512])
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    "sizes",
    [
        (SMOLLM2_135M.hidden_size, 2 * SMOLLM2_135M.inner_size),
        (SMOLLM2_135M.inner_size, SMOLLM2_135M.hidden_size),
    ],
    ids="{0[0]}x{0[1]}".format,
)
@pytest.mark.parametrize("peer", [False, True], ids=["eecore", "torch"])
def bench_skinny_linear_of_many_rows(
    benchmark, peer: bool, sizes: tuple[int, int], weights: str, num_tokens: int
) -> None:
    """Products that are bound by multiplication; the peer of int8 is torch in bfloat16."""
    in_features, out_features = sizes
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    x = torch.randn(num_tokens, in_features).to(dtype)
    weight, scale = torch.randn(out_features, in_features).to(dtype), None
    if weights == "int8" and not peer:
        weight, scale = quantise_rows(weight)
    if peer:
        benchmark(lambda: functional.linear(x, weight))
    else:
        benchmark(lambda: ops.skinny_linear(x, weight, weight_scale=scale))
    report(
        benchmark,
        moved_bytes=weight.nbytes + x.nbytes + num_tokens * out_features * x.element_size(),
        flops=2 * num_tokens * in_features * out_features,
        dtype=dtype,
    )


def linear_work(num_tokens: int, in_features: int, out_features: int, setting: Setting) -> Work:
    x = setting.states(num_tokens, in_features)
    weight = setting.states(out_features, in_features) * in_features**-0.5
    out = x.new_empty(num_tokens, out_features)

    def linear() -> Tensor:
        return ops.skinny_linear(x, weight, constant_weight=True, out=out)

    return Work(
        linear,
        {"cuBLAS": lambda: functional.linear(x, weight)},
        linear,
        lambda _: functional.linear(x, weight),
    )


def appended_work(num_tokens: int, sizes: ModelSizes, setting: Setting) -> Work:
    """Q, K and V of a layer, rotated, with K and V appended to the cache; or by two ops."""
    device, shape = setting.device, (NUM_SLOTS // PAGE_SIZE, PAGE_SIZE, *sizes.heads[1:])
    x = setting.states(num_tokens, sizes.hidden_size)
    weight = setting.states(sizes.qkv_size, sizes.hidden_size) * sizes.hidden_size**-0.5
    norm = torch.ones(sizes.hidden_size, dtype=setting.dtype, device=device)
    angles = torch.rand(NUM_SLOTS, sizes.head_dim // 2, device=device)
    append = ops.AppendKv(
        *(torch.zeros(shape, dtype=setting.dtype, device=device) for _ in "kv"),
        torch.randperm(NUM_SLOTS, device=device)[:num_tokens],
        torch.arange(num_tokens, device=device),
        torch.cat([angles.cos(), angles.sin()], dim=-1),
    )
    heads_of = (sizes.num_q_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    product = partial(ops.skinny_linear, x, weight, norm_weight=norm, eps=EPS, constant_weight=True)

    def apart() -> Tensor:
        out = product()
        heads = out.view(num_tokens, sum(heads_of), sizes.head_dim).split_with_sizes(heads_of, 1)
        ops.append_kv(*heads, **append._asdict(), eps=EPS)
        return out

    def appended() -> Tensor:
        return product(append=append)

    return Work(appended, {"two ops": apart}, appended, lambda _: apart())


def gpu_cases(setting: Setting) -> Iterator[Case]:
    large, small = LLAMA_8B, LLAMA_1B
    real = [
        (large.q_size, large.hidden_size),
        (large.hidden_size, large.qkv_size),
        (large.inner_size, large.hidden_size),
        (small.q_size, small.hidden_size),
        (small.inner_size, small.hidden_size),
        (SMOLLM2_135M.inner_size, SMOLLM2_135M.hidden_size),
    ]
    shapes = [(64, 96)] if setting.tiny else real
    for (k, n), b in itertools.product(shapes, (1, 8, 32)):
        moved = (k * n + b * (k + n)) * setting.dtype.itemsize
        make = partial(linear_work, b, k, n, setting)
        yield Case("skinny_linear", f"{k} -> {n}, B={b}", moved, make)
    tiny = ModelSizes(1, 64, 96, 4, 2, 16)
    for b in (1, 8):
        for model in (tiny,) if setting.tiny else (large, small):
            k, n = model.hidden_size, model.qkv_size
            moved = (k * n + b * (k + n + 2 * model.kv_size)) * setting.dtype.itemsize
            make = partial(appended_work, b, model, setting)
            yield Case("skinny_linear", f"{k} -> {n} and the cache, B={b}", moved, make)
