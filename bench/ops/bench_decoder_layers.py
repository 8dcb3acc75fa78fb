"""decoder_layers: layers of three small models while decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.harness.ceilings import report
from eecore import ops
from tests.cases import SMALL_12_LAYERS, SMOLLM2_135M, T5_SMALL, ModelSizes

CONTEXT, PAGE_SIZE = 128, 16
CROSS_KEYS = 64  # of a T5's encoder
KEYS_PER_SPLIT, EPS = 512, 1e-5


def random_weights(model: ModelSizes, dtype: torch.dtype) -> ops.DecoderWeights:
    layers, hidden, inner = model.num_layers, model.hidden_size, model.inner_size

    def linear(rows: int, columns: int) -> ops.Matrix:
        return ops.Matrix(torch.randn(layers, rows, columns).mul_(columns**-0.5).to(dtype))

    return ops.DecoderWeights(
        attention_norm=torch.ones(layers, hidden, dtype=dtype),
        qkv=linear(model.qkv_size, hidden),
        q_norm=None,
        k_norm=None,
        o=linear(hidden, model.q_size),
        mlp_norm=torch.ones(layers, hidden, dtype=dtype),
        gate_up=linear(2 * inner, hidden),
        down=linear(hidden, inner),
    )


def random_cross(
    model: ModelSizes, page_table: torch.Tensor, dtype: torch.dtype
) -> ops.CrossAttention:
    layers, hidden, q_size = model.num_layers, model.hidden_size, model.q_size
    return ops.CrossAttention(
        norm=torch.ones(layers, hidden, dtype=dtype),
        q=ops.Matrix(torch.randn(layers, q_size, hidden).mul_(hidden**-0.5).to(dtype)),
        o=ops.Matrix(torch.randn(layers, hidden, q_size).mul_(q_size**-0.5).to(dtype)),
        page_table=page_table,
        seq_lens=torch.full((page_table.shape[0],), CROSS_KEYS, dtype=torch.int32),
    )


def decoding_call(model: ModelSizes, num_seqs: int, dtype: torch.dtype) -> dict[str, Any]:
    is_t5, pages = model.is_t5, CONTEXT // PAGE_SIZE
    cross_pages = CROSS_KEYS // PAGE_SIZE if is_t5 else 0
    num_pages = num_seqs * (pages + cross_pages)
    cache_shape = (model.num_layers, num_pages, PAGE_SIZE, model.num_kv_heads, 64)
    page_table, cross_page_table = (
        torch.arange(num_pages, dtype=torch.int32)
        .view(num_seqs, pages + cross_pages)
        .split((pages, cross_pages), 1)
    )
    angles = torch.randn(CONTEXT, model.head_dim // 2)
    return {
        "hidden": torch.randn(num_seqs, model.hidden_size).to(dtype),
        "weights": random_weights(model, dtype),
        "k_cache": torch.randn(cache_shape).to(dtype),
        "v_cache": torch.randn(cache_shape).to(dtype),
        "slot_mapping": page_table[:, -1].long() * PAGE_SIZE + PAGE_SIZE - 1,
        "positions": None if is_t5 else torch.full((num_seqs,), CONTEXT - 1),
        "cos_sin": None if is_t5 else torch.cat((angles.cos(), angles.sin()), 1),
        "page_table": page_table,
        "seq_lens": torch.full((num_seqs,), CONTEXT, dtype=torch.int32),
        "query_start_loc": torch.arange(num_seqs + 1, dtype=torch.int32),
        "begin_layer": 0,
        "end_layer": model.num_layers,
        "scale": model.head_dim**-0.5,
        "eps": EPS,
        "fixed_split_size": KEYS_PER_SPLIT,
        "cross": random_cross(model, cross_page_table, dtype) if is_t5 else None,
        "position_bias": torch.randn(32, model.num_q_heads) if is_t5 else None,
        "activation": "gelu_tanh" if is_t5 else "silu",
    }


@pytest.mark.parametrize("num_seqs", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "model",
    [SMALL_12_LAYERS, SMOLLM2_135M, T5_SMALL],
    ids=["12 layers of 256", "SmolLM2-135M", "T5 v1.1 small"],
)
def bench_decoder_layers(benchmark, model: ModelSizes, dtype: torch.dtype, num_seqs: int) -> None:
    call = decoding_call(model, num_seqs, dtype)
    with torch.inference_mode():
        benchmark(lambda: ops.decoder_layers(**call))
    fields = (*call["weights"], *(call["cross"] or ()))
    weights = (f.weight if isinstance(f, ops.Matrix) else f for f in fields)
    moved = sum(weight.nbytes for weight in weights if weight is not None)
    report(benchmark, moved_bytes=moved)
