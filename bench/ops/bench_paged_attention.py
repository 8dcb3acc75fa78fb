"""paged_attention: decoding against long contexts, verification, a prefill chunk; T5's kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench.gpu.attention import (
    ATTENTION_SHAPES,
    TINY_ATTENTION_SHAPES,
    attention_work,
    contiguous_call,
)
from bench.gpu.case import Case, Setting
from bench.harness.ceilings import report
from bench.ops.attention_peers import PEERS
from eecore import ops
from tests.cases import LLAMA_1B, LLAMA_3B, LLAMA_8B, SMOLLM2_135M, T5_SMALL

MODELS = [model.heads for model in (SMOLLM2_135M, LLAMA_1B, LLAMA_3B, LLAMA_8B)]


def report_reads(benchmark: Any, call: dict[str, Any], flops: float | None = None) -> None:
    """Report the bytes of one read of keys, values and queries, and one write of results."""
    cache = call["k_cache"].nbytes + call["v_cache"].nbytes
    moved = cache + 2 * call["q"].nbytes
    report(benchmark, moved_bytes=moved, working_set=cache, flops=flops)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("num_seqs", [1, 8])
@pytest.mark.parametrize("peer", [None, *PEERS], ids=lambda peer: peer or "eecore")
def bench_paged_attention_decode(
    benchmark,
    peer: str | None,
    num_seqs: int,
    model: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    call = contiguous_call(1, 4096, num_seqs, model, dtype)
    if peer is None:
        benchmark(ops.paged_attention, **call)
    else:
        attend = PEERS[peer](call)
        torch.testing.assert_close(attend(), ops.paged_attention(**call), atol=2e-3, rtol=2e-2)
        benchmark(attend)
    report_reads(benchmark, call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_queries", "seq_len"), [(7, 1024), (512, 2048)])
def bench_paged_attention_queries(
    benchmark, num_queries: int, seq_len: int, dtype: torch.dtype
) -> None:
    call = contiguous_call(num_queries, seq_len, 1, SMOLLM2_135M.heads, dtype)
    benchmark(ops.paged_attention, **call)
    keys = seq_len - (num_queries - 1) / 2  # keys that a query sees, on average
    report_reads(benchmark, call, flops=4 * call["q"].numel() * keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "position bias"])
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def bench_paged_attention_t5(benchmark, kind: str, biased: bool, dtype: torch.dtype) -> None:
    num_queries = {"decoder": 1, "encoder": 512}[kind]
    call = contiguous_call(num_queries, 512, 1, T5_SMALL.heads, dtype)
    call |= {"scale": 1.0, "causal": kind == "decoder", "bidirectional": kind == "encoder"}
    call["position_bias"] = torch.randn(32, T5_SMALL.num_q_heads) if biased else None
    benchmark(ops.paged_attention, **call)
    report_reads(benchmark, call, flops=4 * call["q"].numel() * 512)


def gpu_cases(setting: Setting) -> Iterator[Case]:
    size = setting.dtype.itemsize
    for shape in TINY_ATTENTION_SHAPES if setting.tiny else ATTENTION_SHAPES:
        kv = 2 * shape.num_seqs * shape.seq_len * shape.num_kv_heads * shape.head_dim * size
        rows = 2 * shape.num_seqs * shape.num_queries * shape.num_q_heads * shape.head_dim * size
        decode, verify = shape.num_queries == 1, 1 < shape.num_queries <= 16
        keys = shape.seq_len - ((shape.num_queries - 1) / 2 if shape.causal else 0)
        yield Case(
            "paged_attention",
            shape.name,
            kv + rows + 4 * shape.num_buckets * shape.num_q_heads,
            lambda shape=shape: attention_work(shape, setting.dtype, setting.device),
            of_copy=(0.88 if decode else 0.80 if verify else None) if kv >= 100e6 else None,
            flops=None if decode else 2 * rows / size * keys,
        )
