"""decoder_layers: layers of three small models while decoding, compared with single ops."""

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


def single_ops(model: ModelSizes, call: dict[str, Any]) -> Any:
    """A call that runs the same layers op by op, on views made before."""
    layers = call["weights"].unbind()
    caches = list(zip(call["k_cache"].unbind(0), call["v_cache"].unbind(0), strict=True))
    heads = (model.num_q_heads, model.num_kv_heads, model.num_kv_heads)
    num_seqs = call["hidden"].shape[0]
    batch = [call[name] for name in ("page_table", "seq_lens", "query_start_loc")]
    attention = {"scale": call["scale"], "fixed_split_size": KEYS_PER_SPLIT}
    crosses: Any = [None] * model.num_layers
    if call["cross"] is not None:
        *stacked, cross_page_table, cross_seq_lens = call["cross"]
        crosses = list(zip(*(weights.unbind() for weights in stacked), strict=True))
        cross_batch = (cross_page_table, cross_seq_lens, call["query_start_loc"])

    def run() -> None:
        hidden = call["hidden"]
        for w, cross, (k_cache, v_cache) in zip(layers, crosses, caches, strict=True):
            qkv = ops.skinny_linear(hidden, w.qkv.weight, norm_weight=w.attention_norm, eps=EPS)
            q, k, v = qkv.view(num_seqs, sum(heads), 64).split_with_sizes(heads, 1)
            rotary = {"positions": call["positions"], "cos_sin": call["cos_sin"]}
            ops.append_kv(q, k, v, k_cache, v_cache, call["slot_mapping"], **rotary)
            attended = ops.paged_attention(
                q, k_cache, v_cache, *batch, **attention, position_bias=call["position_bias"]
            )
            hidden = ops.skinny_linear(attended.flatten(1), w.o.weight, residual=hidden)
            if cross is not None:
                norm, into, out_of = cross
                q = ops.skinny_linear(hidden, into.weight, norm_weight=norm, eps=EPS)
                q = q.view(num_seqs, model.num_q_heads, 64)
                attended = ops.paged_attention(
                    q, k_cache, v_cache, *cross_batch, **attention, causal=False
                )
                hidden = ops.skinny_linear(attended.flatten(1), out_of.weight, residual=hidden)
            gated = ops.skinny_gated_linear(
                hidden,
                w.gate_up.weight,
                norm_weight=w.mlp_norm,
                eps=EPS,
                activation=call["activation"],
            )
            hidden = ops.skinny_linear(gated, w.down.weight, residual=hidden)

    return run


@pytest.mark.parametrize("num_seqs", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "model",
    [SMALL_12_LAYERS, SMOLLM2_135M, T5_SMALL],
    ids=["12 layers of 256", "SmolLM2-135M", "T5 v1.1 small"],
)
@pytest.mark.parametrize("peer", [False, True], ids=["eecore", "single ops"])
def bench_decoder_layers(
    benchmark, peer: bool, model: ModelSizes, dtype: torch.dtype, num_seqs: int
) -> None:
    call = decoding_call(model, num_seqs, dtype)
    with torch.inference_mode():
        benchmark(single_ops(model, call) if peer else lambda: ops.decoder_layers(**call))
    fields = (*call["weights"], *(call["cross"] or ()))
    weights = (f.weight if isinstance(f, ops.Matrix) else f for f in fields)
    moved = sum(weight.nbytes for weight in weights if weight is not None)
    report(benchmark, moved_bytes=moved)
