"""kv_fill of 16 skipped layers: of SmolLM2-135M, and of Llama 3.2 1B (134 MB together)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.case import EPS, PAGE_SIZE, Case, Setting, Work, rms_norm
from bench.harness.ceilings import report
from eecore import ops
from tests.cases import LLAMA_1B, LLAMA_8B, SMOLLM2_135M

NUM_LAYERS = 16
PEER = "cuBLAS a layer"


def kv_fill_work(
    num_layers: int,
    hidden_size: int,
    heads: tuple[int, int],
    exit_layers: list[int],
    setting: Setting,
) -> Work:
    """Rows that exited after ``exit_layers``; the peer uses torch's own products."""
    num_tokens, (num_kv_heads, head_dim) = len(exit_layers), heads
    dtype, device = setting.dtype, setting.device
    kv_size = 2 * num_kv_heads * head_dim
    hidden = setting.states(num_tokens, hidden_size)
    norm = torch.rand(num_layers, hidden_size, device=device).to(dtype)
    weight = setting.states(num_layers, kv_size, hidden_size) * hidden_size**-0.5
    cache_shape = (num_layers, 4 * num_tokens, PAGE_SIZE, num_kv_heads, head_dim)
    k_cache, v_cache = (torch.zeros(cache_shape, dtype=dtype, device=device) for _ in range(2))
    slots = torch.randperm(4 * num_tokens * PAGE_SIZE, device=device)[:num_tokens]
    positions = torch.arange(num_tokens, device=device) + 100
    angles = torch.rand(100 + num_tokens, head_dim // 2, device=device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    exit_layer = torch.tensor(exit_layers, dtype=torch.int32, device=device)

    def fill() -> None:
        ops.kv_fill(
            hidden,
            exit_layer,
            norm,
            ops.Matrix(weight),
            k_cache,
            v_cache,
            slots,
            positions=positions,
            cos_sin=cos_sin,
            eps=EPS,
        )

    # A layer at a time: norm, product, rotary and write, with torch's own kernels.
    pages, offsets = slots // PAGE_SIZE, slots % PAGE_SIZE
    cos, sin = (part[:, None].to(dtype) for part in cos_sin[positions].chunk(2, dim=1))
    k_other, v_other = torch.zeros_like(k_cache), torch.zeros_like(v_cache)

    def layer_by_layer() -> None:
        for layer in range(min(exit_layers), num_layers):
            projected = functional.linear(rms_norm(hidden, norm[layer]), weight[layer])
            k, v = projected.view(num_tokens, 2, num_kv_heads, head_dim).unbind(1)
            a, b = k.chunk(2, dim=-1)
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
            k_other[layer, pages, offsets] = rotated
            v_other[layer, pages, offsets] = v

    def filled() -> Tensor:
        fill()
        return torch.stack((k_cache, v_cache))[:, max(exit_layers) :, pages, offsets]

    def filled_layer_by_layer(_: str) -> Tensor:
        layer_by_layer()
        return torch.stack((k_other, v_other))[:, max(exit_layers) :, pages, offsets]

    return Work(fill, {PEER: layer_by_layer}, filled, filled_layer_by_layer)


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
    work = kv_fill_work(
        NUM_LAYERS, hidden_size, (num_kv_heads, 64), [0] * num_tokens, Setting(dtype)
    )
    benchmark(work.peers[PEER] if peer else work.call)
    report(benchmark, moved_bytes=NUM_LAYERS * 2 * num_kv_heads * 64 * hidden_size * dtype.itemsize)


def gpu_cases(setting: Setting) -> Iterator[Case]:
    real = (NUM_LAYERS, LLAMA_8B.hidden_size, LLAMA_8B.heads[1:])  # 16 of 32 layers, after an exit
    layers, hidden_size, heads = (3, 64, (2, 64)) if setting.tiny else real
    kv_size = 2 * heads[0] * heads[1]
    for num_tokens, ragged in itertools.product((1, 4, 8, 16, 32), (False, True)):
        exits = [i * layers // num_tokens if ragged else 0 for i in range(num_tokens)]
        if ragged and num_tokens == 1:
            continue
        needed = sum(layers - exit_layer for exit_layer in exits)
        weights = (layers - min(exits)) * kv_size * hidden_size
        rows = num_tokens * hidden_size + needed * kv_size
        yield Case(
            "kv_fill",
            f"{layers} layers, {hidden_size} -> {kv_size}, B={num_tokens}"
            + (", exits spread" if ragged else ""),
            (weights + rows) * setting.dtype.itemsize,
            partial(kv_fill_work, layers, hidden_size, heads, exits, setting),
            of_copy=0.75 if num_tokens <= 16 and not ragged else None,
            over_peer=2.0 if num_tokens <= 16 and not ragged else None,
        )
