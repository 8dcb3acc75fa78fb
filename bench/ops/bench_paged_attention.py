"""paged_attention: decoding against long contexts, verification, a prefill chunk; T5's kinds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from bench.harness.ceilings import report
from bench.ops.attention_peers import PEERS
from eecore import ops
from tests.cases import LLAMA_1B, LLAMA_3B, LLAMA_8B, SMOLLM2_135M, T5_SMALL

MODELS = [model.heads for model in (SMOLLM2_135M, LLAMA_1B, LLAMA_3B, LLAMA_8B)]


def contiguous_call(
    num_queries: int,
    seq_len: int,
    num_seqs: int,
    model: tuple[int, int, int],
    dtype: torch.dtype,
    page_size: int = 16,
) -> dict[str, Any]:
    num_q_heads, num_kv_heads, head_dim = model
    pages = -(-seq_len // page_size)
    cache_shape = (pages * num_seqs, page_size, num_kv_heads, head_dim)
    starts = itertools.accumulate([num_queries] * num_seqs, initial=0)
    return {
        "q": torch.randn(num_seqs * num_queries, num_q_heads, head_dim).to(dtype),
        "k_cache": torch.randn(cache_shape).to(dtype),
        "v_cache": torch.randn(cache_shape).to(dtype),
        "page_table": torch.randperm(pages * num_seqs).int().view(num_seqs, pages),
        "seq_lens": torch.full((num_seqs,), seq_len, dtype=torch.int32),
        "query_start_loc": torch.tensor(list(starts), dtype=torch.int32),
        "scale": head_dim**-0.5,
    }


def report_reads(benchmark: Any, call: dict[str, Any], flops: float | None = None) -> None:
    """Keys and values read once, queries read and their results written."""
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
    keys = seq_len - (num_queries - 1) / 2  # that a query sees, on average
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
