"""paged_attention on a GPU: the shapes, and torch's SDPA as a peer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from bench.gpu.case import PAGE_SIZE, Work
from eecore import ops
from eecore.models.attention import keys_per_split
from tests.cases import LLAMA_8B, SMOLLM2_135M


@dataclass(frozen=True)
class AttentionShape:
    num_seqs: int
    num_queries: int
    seq_len: int
    num_q_heads: int = LLAMA_8B.num_q_heads
    num_kv_heads: int = LLAMA_8B.num_kv_heads
    head_dim: int = LLAMA_8B.head_dim
    causal: bool = True
    num_buckets: int = 0  # of a T5 position bias, bidirectional if the call is not causal

    @property
    def name(self) -> str:
        heads = f"{self.num_q_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        ways = ("" if self.causal else ", not causal") + (", T5 bias" if self.num_buckets else "")
        return f"B={self.num_seqs} m={self.num_queries} L={self.seq_len}, {heads}{ways}"


SHORT_HEADS = (SMOLLM2_135M.heads, LLAMA_8B.heads)
ATTENTION_SHAPES = (
    AttentionShape(8, 1, 4096),
    AttentionShape(32, 1, 4096),
    AttentionShape(1, 1, 32768),
    AttentionShape(128, 1, 1024),
    AttentionShape(16, 1, 4096, 32, 32),
    AttentionShape(64, 1, 4096, *SMOLLM2_135M.heads),
    # Short contexts, which are the most frequent in decoding.
    *(AttentionShape(b, 1, 160, *heads) for heads in SHORT_HEADS for b in (1, 8, 32)),
    AttentionShape(8, 8, 4096),
    AttentionShape(32, 8, 4096),
    AttentionShape(4, 512, 4096),
    # T5-base: its decoder against its own keys and against its encoder's, and its encoder.
    AttentionShape(8, 1, 512, 12, 12, 64, num_buckets=32),
    AttentionShape(64, 1, 512, 12, 12, 64, num_buckets=32),
    AttentionShape(8, 1, 512, 12, 12, 64, causal=False),
    AttentionShape(8, 8, 512, 12, 12, 64, causal=False),
    AttentionShape(8, 512, 512, 12, 12, 64, causal=False, num_buckets=32),
)
TINY_ATTENTION_SHAPES = (
    AttentionShape(2, 1, 40, 4, 2, 64),
    AttentionShape(2, 3, 40, 4, 2, 64),
    AttentionShape(2, 1, 40, 4, 4, 64, num_buckets=32),
    AttentionShape(2, 50, 40, 4, 4, 64, causal=False),
    AttentionShape(2, 40, 40, 4, 4, 64, causal=False, num_buckets=32),
)
MAX_DISTANCE = 128


def contiguous_call(
    num_queries: int,
    seq_len: int,
    num_seqs: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Arguments of ops.paged_attention for sequences of equal length, pages in random order."""
    num_q_heads, num_kv_heads, head_dim = heads
    pages = -(-seq_len // PAGE_SIZE)
    cache_shape = (pages * num_seqs, PAGE_SIZE, num_kv_heads, head_dim)
    starts = list(itertools.accumulate([num_queries] * num_seqs, initial=0))
    pages_in_order = torch.randperm(pages * num_seqs, device=device).int()
    return {
        "q": torch.randn(num_seqs * num_queries, num_q_heads, head_dim, device=device).to(dtype),
        "k_cache": torch.randn(cache_shape, device=device).to(dtype),
        "v_cache": torch.randn(cache_shape, device=device).to(dtype),
        "page_table": pages_in_order.view(num_seqs, pages),
        "seq_lens": torch.full((num_seqs,), seq_len, dtype=torch.int32, device=device),
        "query_start_loc": torch.tensor(starts, dtype=torch.int32, device=device),
        "scale": head_dim**-0.5,
    }


def attention_work(
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    fixed_split_size: int | None = None,
) -> Work:
    """The inputs and peers of a shape; ``fixed_split_size`` defaults to that of a model."""
    split = keys_per_split(device) if fixed_split_size is None else fixed_split_size
    heads = (shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
    call = contiguous_call(shape.num_queries, shape.seq_len, shape.num_seqs, heads, dtype, device)
    q, k_cache, v_cache, page_table = (
        call[name] for name in ("q", "k_cache", "v_cache", "page_table")
    )
    bias = torch.randn(shape.num_buckets, shape.num_q_heads, device=device)
    position_bias = bias if shape.num_buckets else None
    call |= {
        "causal": shape.causal,
        "position_bias": position_bias,
        "max_distance": MAX_DISTANCE,
        "bidirectional": not shape.causal,
        "fixed_split_size": split,
        "out": torch.empty_like(q),
    }

    def attend() -> Tensor:
        return ops.paged_attention(**call)

    if position_bias is not None:  # a mask that adds a bias puts SDPA on a slow path
        return Work(attend)

    def gathered(cache: Tensor) -> Tensor:
        """[num_seqs, num_kv_heads, seq_len, head_dim]"""
        rows = cache[page_table.long()].flatten(1, 2)[:, : shape.seq_len]
        return rows.transpose(1, 2).contiguous()

    k, v = gathered(k_cache), gathered(v_cache)
    by_seq = q.unflatten(0, (shape.num_seqs, shape.num_queries)).transpose(1, 2)
    several = shape.causal and shape.num_queries > 1
    # The queries are the last positions; torch's is_causal aligns them with the first keys.
    mask = causal_lower_right(shape.num_queries, shape.seq_len) if several else None

    def sdpa() -> Tensor:
        attention = functional.scaled_dot_product_attention
        return attention(by_seq, k, v, attn_mask=mask, scale=call["scale"], enable_gqa=True)

    peers: dict[str, Callable[[], Tensor]] = {"torch SDPA": sdpa}
    if device.type == "cuda" and mask is None:

        def cudnn() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return sdpa()

        peers["SDPA, cuDNN"] = cudnn
    return Work(
        attend, dict(peers), attend, lambda name: peers[name]().transpose(1, 2).reshape(q.shape)
    )
