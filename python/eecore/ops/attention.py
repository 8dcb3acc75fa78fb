"""Attention to a paged KV cache, and the ops that write that cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eecore.ops.registered import compiled
from eecore.ops.weights import Matrix

__all__ = ["AppendKv", "append_kv", "kv_fill", "paged_attention"]

_append_kv = compiled("append_kv")
_kv_fill = compiled("kv_fill")
_paged_attention = compiled("paged_attention")


class AppendKv(NamedTuple):
    """The arguments of :func:`append_kv` after the heads, for :func:`skinny_linear` to append too.

    On CUDA up to 32 rows (8 in float32) are multiplied and appended in one launch, where heads have
    no norms, head_dim and rotary_dim are multiples of 16, the weight is not packed and the caches
    hold the model's dtype.
    """

    k_cache: Tensor
    """[num_pages, page_size, num_kv_heads, head_dim], as in :func:`append_kv`."""
    v_cache: Tensor
    """[num_pages, page_size, num_kv_heads, head_dim]"""
    slot_mapping: Tensor
    """int64 [num_tokens]"""
    positions: Tensor | None = None
    """int64 [num_tokens]"""
    cos_sin: Tensor | None = None
    """float32 [max_position, rotary_dim]"""
    q_norm_weight: Tensor | None = None
    """[head_dim], or [num_q_heads * head_dim]"""
    k_norm_weight: Tensor | None = None
    """[head_dim], or [num_kv_heads * head_dim]"""
    key_scales: Tensor | None = None
    """float32 [num_kv_heads], of keys in float8"""
    value_scales: Tensor | None = None
    """float32 [num_kv_heads]"""
    q_cos_sin: Tensor | None = None
    """float32 [max_position, rotary_dim], for queries only"""
    constant_places: bool = False
    """No work in flight writes slot_mapping or positions."""


def append_kv(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    q_cos_sin: Tensor | None = None,
    constant_places: bool = False,
) -> None:
    """Write new keys and values to their cache slots, with head norms and rotary embedding fused.

    ``q``, when given, gets its head norm and rotary embedding in place. ``k`` and ``v`` are read
    only. A slot is ``page * page_size + offset``; slot -1 writes nothing.

    A cache may be in float8 (e4m3), whatever the model's dtype: a key or value is divided by its
    head's scale and rounded to the nearest number, ties to even; a larger magnitude than 448
    becomes 448. NaN stays NaN.

    Args:
        q: [num_tokens, num_q_heads, head_dim], any strides with contiguous head_dim; or None.
        k: [num_tokens, num_kv_heads, head_dim], likewise.
        v: [num_tokens, num_kv_heads, head_dim], likewise.
        k_cache: [num_pages, page_size, num_kv_heads, head_dim], one layer, any strides with
            contiguous head_dim: where heads come before slots, ``cache.transpose(1, 2)``. In the
            model's dtype, float8_e4m3fn, or on the CPU bfloat16 with a model in float32.
        v_cache: [num_pages, page_size, num_kv_heads, head_dim], likewise, in the same dtype.
        slot_mapping: int64 [num_tokens].
        positions: int64 [num_tokens]; None switches the rotary embedding off.
        cos_sin: float32 [max_position, rotary_dim]: rotary_dim/2 cosines, then as many sines; pairs
            (i, i + rotary_dim/2) are rotated.
        q_norm_weight: [head_dim], RMS norm of each query head; or [num_q_heads * head_dim], of all
            query heads of a token at once.
        k_norm_weight: [head_dim] of key heads, or [num_kv_heads * head_dim], likewise.
        eps: epsilon of the head norms.
        key_scales: float32 [num_kv_heads], positive, of keys in float8; None: 1.
        value_scales: float32 [num_kv_heads], likewise of values.
        q_cos_sin: float32 [max_position, rotary_dim], by which queries are rotated in place of
            ``cos_sin``: with other frequencies, or with a factor by position.
        constant_places: no work in flight writes ``slot_mapping`` or ``positions``: on a GPU
            :func:`skinny_linear` then reads them while earlier kernels still run.
    """
    _append_kv(
        q,
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        positions,
        cos_sin,
        q_norm_weight,
        k_norm_weight,
        eps,
        key_scales,
        value_scales,
        q_cos_sin,
        constant_places,
    )


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
    causal: bool = True,
    sliding_window: int = 0,
    fixed_split_size: int = 0,
    position_bias: Tensor | None = None,
    max_distance: int = 128,
    bidirectional: bool = False,
    arrivals: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    constant_places: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of ragged queries to a paged KV cache.

    Sequence s has queries ``query_start_loc[s]..query_start_loc[s+1]``, which are its last
    positions: query i of n sits at position ``seq_lens[s] - n + i`` and, with ``causal``, sees keys
    up to its own. One query a sequence is decoding, a few are verification, many are a prefill
    chunk. A query that sees no key gives zeros; without ``causal`` a sequence may have more
    queries than keys. Cache slots and page-table entries that no key uses are never read.

    With ``position_bias`` the score of a query at position p and a key at position j gets the bias
    of the bucket of j - p. Half of a side's buckets hold one distance each, the other half ever
    longer ranges, in equal steps of the logarithm up to ``max_distance``; the last one holds all
    distances beyond. Keys ahead are at distance 0 or, if ``bidirectional``, have the upper half of
    the buckets. (T5: Raffel et al. 2020 §2.1; the buckets, float32 rounding included, are those of
    T5Attention in transformers.)

    Sums are float32. In bfloat16 on tensor cores, and on CPUs that multiply pairs of it (AVX-512
    BF16), the weights of values are rounded to bfloat16 first; elsewhere they stay float32. On such
    CPUs queries in float32 over caches in bfloat16 are rounded to bfloat16, too.

    Args:
        q: [num_tokens, num_q_heads, head_dim], any strides with contiguous head_dim; head_dim is a
            multiple of 8 up to 256.
        k_cache: [num_pages, page_size, num_kv_heads, head_dim], strides and dtype as in
            :func:`append_kv`. In float8, which every dtype holds exactly, the stored numbers are
            multiplied; a GPU has no kernel for float8 with a ``position_bias``.
        v_cache: [num_pages, page_size, num_kv_heads, head_dim], likewise.
        page_table: int32 [num_seqs, max_pages_per_seq].
        seq_lens: int32 [num_seqs], keys in the cache, this call's included.
        query_start_loc: int32 [num_seqs + 1], from 0 to num_tokens.
        scale: factor of the scores, usually head_dim ** -0.5.
        soft_cap: c > 0: scaled scores s become ``c * tanh(s / c)``; 0: no cap. Not with a
            ``position_bias``.
        causal: False for cross attention and encoders.
        sliding_window: how many keys a query sees, itself included; 0 for all.
        fixed_split_size: keys per split of a long context; 0 lets the call's shape decide. With a
            fixed size a row's result does not depend, to the bit, on the rest of the batch, on the
            queries that come with it (one when decoding, several when verifying; on a GPU up to 32
            of a sequence) or, on the CPU, on the number of threads.
        position_bias: float32 [num_buckets, num_q_heads], added to the scaled scores; 2 to 128
            buckets, or, when ``bidirectional``, an even number of 4 to 256.
        max_distance: where the last bucket starts; more than half the buckets of a side.
        bidirectional: whether keys ahead of a query have buckets of their own.
        arrivals: int32 [num_arrivals], zeros before the call and again after it; calls that follow
            each other on one stream may share it. The blocks of a GPU that share a long context
            count in it, so that the last block merges small results and no second kernel is
            needed. 4096 numbers are enough on any present GPU; with fewer, or with None, results
            are the same.
        key_scales: float32 [num_kv_heads], positive, factors of keys in float8, applied in the
            score. None: 1.
        value_scales: float32 [num_kv_heads], likewise of values, applied in the result.
        constant_places: no work in flight writes ``page_table``, ``seq_lens``,
            ``query_start_loc``, the scales, or keys and values of positions before a sequence's
            queries: on a GPU these are then read while earlier kernels still run.
        out: [num_tokens, num_q_heads, head_dim]; allocated when None.

    Returns:
        out.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _paged_attention(
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        query_start_loc,
        out,
        scale,
        causal,
        sliding_window,
        fixed_split_size,
        position_bias,
        max_distance,
        bidirectional,
        arrivals,
        key_scales,
        value_scales,
        soft_cap,
        constant_places,
    )
    return out


def kv_fill(
    hidden: Tensor,
    exit_layer: Tensor,
    norm_weight: Tensor | None,
    kv: Matrix,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_norm_weight: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    eps: float = 1e-6,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    layer_ropes: Tensor | None = None,
    loop_slots: int = 0,
    layer_numbers: Tensor | None = None,
) -> None:
    """Fill the KV cache of the layers that each row skipped, all layers in one call.

    For row t and every layer l >= exit_layer[t], layer l's own norm, K/V projection,
    k-norm and rotary are applied to hidden[t] and written to the row's slot of layer l.
    (Early-exit framework §3.2; CALM §3.1.)

    Args:
        hidden: [num_tokens, hidden_size], each row's exit state before any norm.
        exit_layer: int32 [num_tokens], 0 or more; num_layers and more fill nothing.
        norm_weight: [num_layers, hidden_size], the norms before attention; None: there are none.
        kv: [num_layers, 2 * num_kv_heads * head_dim, hidden_size], K rows then V rows; any layer
            and row stride, so a view of a stacked QKV matrix will do.
        k_cache: [num_layers, num_pages, page_size, num_kv_heads, head_dim], any strides with
            contiguous head_dim; dtype as in :func:`append_kv`.
        v_cache: [num_layers, num_pages, page_size, num_kv_heads, head_dim], likewise.
        slot_mapping: int64 [num_tokens]; -1 writes nothing.
        k_norm_weight: [num_layers, head_dim]; or [num_layers, num_kv_heads * head_dim], of all key
            heads at once.
        positions: int64 [num_tokens]; None switches the rotary embedding off.
        cos_sin: float32 [max_position, rotary_dim], as in :func:`append_kv`; with ``layer_ropes``
            [num_ropes, max_position, rotary_dim].
        eps: epsilon of the norms.
        key_scales: float32 [num_layers, num_kv_heads], as in :func:`append_kv`.
        value_scales: float32 [num_layers, num_kv_heads], likewise.
        layer_ropes: int32 [num_layers, 2]: the table of ``cos_sin`` for each layer's queries, and
            the table for its keys.
        loop_slots: for a looped model, whose cache has the pages of all loops, one loop after the
            other: the slots of a loop. A row then fills all layers of every loop after those that
            ``exit_layer``, a multiple of num_layers, has run, counted from the loop that its slot
            is in; they are computed once.
        layer_numbers: int32 [num_layers], ascending: the layers' numbers in ``exit_layer``, for a
            model some of whose layers have no keys; None: 0, 1, ...
    """
    _kv_fill(
        hidden,
        exit_layer,
        norm_weight,
        kv.weight,
        kv.bias,
        kv.scale,
        k_norm_weight,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slot_mapping,
        eps,
        kv.table,
        key_scales,
        value_scales,
        layer_ropes,
        loop_slots,
        layer_numbers,
    )
