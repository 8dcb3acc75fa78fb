"""decoder_layers: layers of two small models while decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.harness.ceilings import report
from eecore import ops
from tests.cases import SMALL_12_LAYERS, SMOLLM2_135M, ModelSizes

CONTEXT, PAGE_SIZE = 128, 16
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


def decoding_call(model: ModelSizes, num_seqs: int, dtype: torch.dtype) -> dict[str, Any]:
    pages = CONTEXT // PAGE_SIZE
    cache_shape = (model.num_layers, num_seqs * pages, PAGE_SIZE, model.num_kv_heads, 64)
    page_table = torch.arange(num_seqs * pages, dtype=torch.int32).view(num_seqs, pages)
    angles = torch.randn(CONTEXT, model.head_dim // 2)
    return {
        "hidden": torch.randn(num_seqs, model.hidden_size).to(dtype),
        "weights": random_weights(model, dtype),
        "k_cache": torch.randn(cache_shape).to(dtype),
        "v_cache": torch.randn(cache_shape).to(dtype),
        "slot_mapping": page_table[:, -1].long() * PAGE_SIZE + PAGE_SIZE - 1,
        "positions": torch.full((num_seqs,), CONTEXT - 1),
        "cos_sin": torch.cat((angles.cos(), angles.sin()), 1),
        "page_table": page_table,
        "seq_lens": torch.full((num_seqs,), CONTEXT, dtype=torch.int32),
        "query_start_loc": torch.arange(num_seqs + 1, dtype=torch.int32),
        "begin_layer": 0,
        "end_layer": model.num_layers,
        "scale": model.head_dim**-0.5,
        "eps": EPS,
        "fixed_split_size": KEYS_PER_SPLIT,
    }


@pytest.mark.parametrize("num_seqs", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "model", [SMALL_12_LAYERS, SMOLLM2_135M], ids=["12 layers of 256", "SmolLM2-135M"]
)
def bench_decoder_layers(benchmark, model: ModelSizes, dtype: torch.dtype, num_seqs: int) -> None:
    call = decoding_call(model, num_seqs, dtype)
    with torch.inference_mode():
        benchmark(lambda: ops.decoder_layers(**call))
    weights = (f.weight if isinstance(f, ops.Matrix) else f for f in call["weights"])
    moved = sum(weight.nbytes for weight in weights if weight is not None)
    report(benchmark, moved_bytes=moved)
