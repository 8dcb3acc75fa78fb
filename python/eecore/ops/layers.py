"""Whole decoder layers in one call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eecore.ops.registered import compiled
from eecore.ops.weights import Matrix, arguments_of, tables_of

__all__ = [
    "DELTA_TILE",
    "CrossAttention",
    "DecoderWeights",
    "DeltaState",
    "DeltaWeights",
    "decoder_layers",
    "gated_delta",
    "gated_delta_fill",
    "short_conv",
    "short_conv_fill",
    "sigmoid_gate",
]

# CPU only: it saves the waking of threads between kernels.
_decoder_layers = compiled("decoder_layers", cpu_only=True)
_short_conv = compiled("short_conv")
_gated_delta = compiled("gated_delta")
_sigmoid_gate = compiled("sigmoid_gate")


class DecoderWeights(NamedTuple):
    """The weights of a decoder's layers, each for all layers at once."""

    attention_norm: Tensor | None
    """[num_layers, hidden_size], before attention."""
    qkv: Matrix
    """[num_layers, q_size + 2 * num_kv_heads * head_dim, hidden_size]; rows of the heads of q, then
    of k, then of v."""
    q_norm: Tensor | None
    """[num_layers, head_dim], RMS norm of each query head, or [num_layers, q_size], of all query
    heads at once."""
    k_norm: Tensor | None
    """[num_layers, head_dim] or [num_layers, num_kv_heads * head_dim], likewise for keys."""
    o: Matrix
    """[num_layers, hidden_size, q_size]"""
    mlp_norm: Tensor | None
    """[num_layers, hidden_size], before the MLP."""
    gate_up: Matrix
    """[num_layers, 2 * inner_size, hidden_size]; gate, then up rows. For an MLP without a gate
    [num_layers, inner_size, hidden_size]."""
    down: Matrix
    """[num_layers, hidden_size, inner_size]"""
    attention_post_norm: Tensor | None = None
    """[num_layers, hidden_size], norm of the output of attention."""
    mlp_post_norm: Tensor | None = None
    """[num_layers, hidden_size], norm of the output of the MLP."""

    def unbind(self) -> list[DecoderWeights]:
        """The weights of each layer, as views."""
        num_layers = len(self.o.unbind())
        each = ([None] * num_layers if f is None else f.unbind() for f in self)
        return [DecoderWeights(*fields) for fields in zip(*each, strict=True)]


class CrossAttention(NamedTuple):
    """Attention of a decoder's layers over the keys and values that an encoder left in the cache.

    The encoder's keys and values lie in pages of the same caches. Each query sees all of them that
    belong to its sequence.
    """

    norm: Tensor
    """[num_layers, hidden_size]"""
    q: Matrix
    """[num_layers, q_size, hidden_size]"""
    o: Matrix
    """[num_layers, hidden_size, q_size]"""
    page_table: Tensor
    """int32 [num_seqs, max_cross_pages]"""
    seq_lens: Tensor
    """int32 [num_seqs], keys of the encoder; where it is 0 the attention adds nothing."""


_NO_CROSS_ATTENTION = (None,) * 9


_NO_CROSS_TABLES = (None, None)


def decoder_layers(
    hidden: Tensor,
    weights: DecoderWeights,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    page_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    begin_layer: int,
    end_layer: int,
    scale: float,
    eps: float = 1e-6,
    sliding_window: Tensor | None = None,
    skip_attention: Tensor | None = None,
    skip_mlp: Tensor | None = None,
    fixed_split_size: int = 0,
    cross: CrossAttention | None = None,
    position_bias: Tensor | None = None,
    max_distance: int = 128,
    activation: str = "silu",
    residual_multiplier: float = 1.0,
    soft_cap: float = 0.0,
    layer_ropes: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    causal: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """A range of a decoder's layers, in one call that wakes its threads once.

    Bit for bit the results of the single ops, layer by layer: :func:`skinny_linear` with the norm
    to queries, keys and values, :func:`append_kv`, :func:`paged_attention`, :func:`skinny_linear`
    onto the residual stream; with ``cross`` :func:`skinny_linear` with its norm to queries,
    :func:`paged_attention` without ``causal``, :func:`skinny_linear` onto the residual stream;
    :func:`skinny_gated_linear` with the norm (:func:`skinny_linear` where the activation is
    "relu"), :func:`skinny_linear` onto the residual stream. An output with a post-norm is
    added by :func:`skinny_linear` and :func:`add_normed`.

    Args:
        hidden: [num_tokens, hidden_size], the residual stream, any row stride.
        weights: the weights of all layers.
        k_cache: [num_layers, num_pages, page_size, num_kv_heads, head_dim], strides and dtype as in
            :func:`kv_fill`; head_dim is a multiple of 8 up to 256.
        v_cache: [num_layers, num_pages, page_size, num_kv_heads, head_dim], likewise.
        slot_mapping: int64 [num_tokens]; slot -1 writes nothing.
        positions: int64 [num_tokens]; None switches the rotary embedding off.
        cos_sin: float32 [max_position, rotary_dim], as in :func:`append_kv`; with ``layer_ropes``
            [num_ropes, max_position, rotary_dim].
        page_table: int32 [num_seqs, max_pages_per_seq].
        seq_lens: int32 [num_seqs], keys in the cache, this call's included.
        query_start_loc: int32 [num_seqs + 1], from 0 to num_tokens.
        begin_layer: the first layer that runs.
        end_layer: the layer before which the call ends, up to num_layers.
        scale: factor of the attention scores, usually head_dim ** -0.5.
        eps: epsilon of all norms.
        sliding_window: int32 [num_layers], how many keys a query sees, itself included; 0 for all.
        skip_attention: bool [num_layers], layers whose attention, ``cross`` included, is left out:
            they add nothing and write no keys or values.
        skip_mlp: bool [num_layers], layers whose MLP is left out.
        fixed_split_size: keys per split of a long context, as in :func:`paged_attention`. With a
            fixed size a row's result depends neither on the other sequences' rows nor on the
            number of threads.
        cross: cross attention of a decoder with an encoder, between self attention and MLP.
        position_bias: float32 [num_buckets, num_q_heads], bias of the self attention of all layers,
            as in :func:`paged_attention`.
        max_distance: of ``position_bias``, as in :func:`paged_attention`.
        activation: "silu" or "gelu_tanh" for a gated MLP, "relu" for an MLP without a gate.
        residual_multiplier: factor of the outputs of attention, ``cross`` included, and MLP.
        soft_cap: cap of the scores of self attention, as in :func:`paged_attention`.
        layer_ropes: int32 [num_layers, 2], as in :func:`kv_fill`.
        key_scales: float32 [num_layers, num_kv_heads], as in :func:`kv_fill`.
        value_scales: float32 [num_layers, num_kv_heads], likewise.
        causal: whether self attention is causal; False: a query sees all keys of its sequence,
            also at positions after its own, as where a block of drafts is made in one pass.
        out: [num_tokens, hidden_size], any row stride that keeps rows apart; ``hidden`` itself, or
            apart from it.

    Returns:
        ``out``, allocated when left out.
    """
    if out is None:
        out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    _decoder_layers(
        hidden,
        *arguments_of(weights),
        k_cache,
        v_cache,
        slot_mapping,
        positions,
        cos_sin,
        page_table,
        seq_lens,
        query_start_loc,
        sliding_window,
        skip_attention,
        skip_mlp,
        out,
        begin_layer,
        end_layer,
        scale,
        eps,
        fixed_split_size,
        *(_NO_CROSS_ATTENTION if cross is None else arguments_of(cross)),
        position_bias,
        max_distance,
        activation,
        *tables_of(weights),
        *(_NO_CROSS_TABLES if cross is None else tables_of(cross)),
        key_scales,
        value_scales,
        layer_ropes,
        residual_multiplier,
        soft_cap,
        causal,
    )
    return out


def short_conv(
    bcx: Tensor,
    state: Tensor,
    slot_mapping: Tensor,
    weight: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A gated convolution over the last positions of each sequence, feature by feature.

    Each row of bcx has three parts, B, C and x. ``u = B * x``, rounded to the state's dtype, goes
    to the row's slot, and ``out = C * sum(weight[k] * u of the position num_taps - 1 - k before)``
    with u = 0 before the text. u of earlier positions is that of the call's own rows, and of
    earlier calls what the pages hold, so a row's result does not depend on the cut of a text.
    (LFM2.)

    Args:
        bcx: [num_tokens, 3 * hidden_size], any row stride.
        state: [num_pages, page_size, hidden_size], contiguous, written; in the dtype of bcx, or
            bfloat16 for float32 on a CPU.
        slot_mapping: int64 [num_tokens]; slot -1 writes nothing.
        weight: [num_taps, hidden_size], the oldest position first; 1 to 8 taps.
        page_table: int32 [num_seqs, max_pages_per_seq].
        seq_lens: int32 [num_seqs], positions, this call's included: row i of the n rows of a
            sequence is at ``seq_lens - n + i``.
        query_start_loc: int32 [num_seqs + 1], from 0 to num_tokens.
        out: [num_tokens, hidden_size], any row stride.

    Returns:
        ``out``, allocated when left out.
    """
    if out is None:
        out = torch.empty(len(bcx), state.shape[-1], dtype=bcx.dtype, device=bcx.device)
    places = slot_mapping, weight, page_table, seq_lens, query_start_loc
    _short_conv(bcx, state, *places, None, 0, out)
    return out


def short_conv_fill(
    bcx: Tensor, state: Tensor, slot_mapping: Tensor, exit_layer: Tensor, layer: int
) -> None:
    """Write the states of a layer's :func:`short_conv` for the rows that skipped the layer.

    Args:
        bcx: [num_tokens, 3 * hidden_size], as there, from each row's exit state.
        state: [num_pages, page_size, hidden_size], written.
        slot_mapping: int64 [num_tokens]; slot -1 writes nothing.
        exit_layer: int32 [num_tokens]; a row above ``layer`` writes nothing.
        layer: the number of the layer.
    """
    _short_conv(bcx, state, slot_mapping, None, None, None, None, exit_layer, layer, None)


DELTA_TILE = 32
"""Features of the values that lie side by side in a state."""


class DeltaState(NamedTuple):
    """What a layer's gated delta rule keeps of each text, one entry a text."""

    state: Tensor
    """float32 [num_states, num_value_heads, ceil(value_dim / 32), key_dim, 32]: S of each head, in
    tiles of 32 features of the values."""
    rows: Tensor
    """[num_states, num_kept, conv_size + 2 * num_value_heads], in the model's dtype: the row (q, k,
    v, b, a) of position p at ``p % num_kept``. conv_size is that of q, k and v together."""
    applied: Tensor
    """int32 [num_states, num_key_heads]: how many positions S has; the next ones are in rows."""


class DeltaWeights(NamedTuple):
    """The weights of a layer's gated delta rule, without its projections."""

    taps: Tensor
    """[num_taps, conv_size], the oldest position first; 1 to 8 taps."""
    log_rate: Tensor
    """float32 [num_value_heads], the logarithm of the decay's rate."""
    dt_bias: Tensor
    """float32 [num_value_heads]"""
    norm: Tensor
    """[value_dim], RMS norm of each head's output."""


def gated_delta(
    qkvz: Tensor,
    ba: Tensor,
    kept: DeltaState,
    states: Tensor,
    weights: DeltaWeights,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    slot_mapping: Tensor | None = None,
    tiled_heads: bool = False,
    eps: float = 1e-6,
    out: Tensor | None = None,
) -> Tensor:
    """A gated delta rule over the positions of each text, head by head.

    q, k and v pass a causal convolution over num_taps positions, feature by feature, and SiLU; q
    and k are scaled to length 1 and q by ``key_dim ** -0.5``. With ``beta = sigmoid(b)`` and
    ``decay = exp(-exp(log_rate) * softplus(a + dt_bias))``, in float32,

        S = decay * S + outer(k, beta * (v - decay * S^T k));  out = norm(S^T q) * silu(z)

    with S = 0 before the text. (Yang et al. 2024, "Gated Delta Networks", equation 10.)

    S holds the positions that are certain, and the rows of the next ones are kept: a call first
    repeats these. So positions that turn out wrong, as rejected drafts, leave no trace when later
    calls give other rows for them, and a position's result depends neither on the cut of a text
    nor on when it became certain. At most ``num_kept - 8`` positions may be kept that are not in S.

    Args:
        qkvz: [num_tokens, conv_size + num_value_heads * value_dim], any row stride: q, k, v, z.
        ba: [num_tokens, 2 * num_value_heads], any row stride: b, a.
        kept: written.
        states: int32 [num_seqs, 2]: the number of each text's entry in ``kept``, from 1, or 0 for
            none, so that the text begins with the call and nothing is kept; and how many of its
            positions are certain, this call's included.
        weights: the layer's own.
        seq_lens: int32 [num_seqs], positions, this call's included: row i of the n rows of a text
            is at ``seq_lens - n + i``. A text whose first row is at 0 begins anew.
        query_start_loc: int32 [num_seqs + 1], from 0 to num_tokens.
        slot_mapping: int64 [num_tokens]; with -1 for its first row, as rows have that are masked
            in a graph, a text is one without a state. None: no row is masked.
        tiled_heads: whether value head v belongs to key head ``v % num_key_heads``, as in GGUF
            files; else those of a key head are side by side.
        eps: epsilon of the norm of the output.
        out: [num_tokens, num_value_heads * value_dim], any row stride.

    Returns:
        ``out``, allocated when left out.
    """
    if out is None:
        size = weights.log_rate.shape[0] * weights.norm.shape[0]
        out = torch.empty(len(qkvz), size, dtype=qkvz.dtype, device=qkvz.device)
    texts = seq_lens, query_start_loc, slot_mapping
    _gated_delta(qkvz, ba, *kept, states, *weights, *texts, None, 0, tiled_heads, eps, out)
    return out


def gated_delta_fill(
    qkvz: Tensor,
    ba: Tensor,
    kept: DeltaState,
    states: Tensor,
    weights: DeltaWeights,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    exit_layer: Tensor,
    layer: int,
    *,
    tiled_heads: bool = False,
) -> None:
    """Keep the rows of a layer's :func:`gated_delta` for texts that skipped the layer.

    S follows when a quarter of the rows that can be kept are not in it.

    Args:
        qkvz: as there, from each row's exit state; z is not read.
        exit_layer: int32 [num_tokens]; a text whose first row is above ``layer`` is left alone.
        layer: the number of the layer.
        tiled_heads: as there.
    """
    texts = seq_lens, query_start_loc, None
    numbers = layer, tiled_heads, 0.0
    _gated_delta(qkvz, ba, *kept, states, *weights, *texts, exit_layer, *numbers, None)


def sigmoid_gate(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``x * sigmoid(gate)``: attention's output times a gate. (Qwen3.5.)

    Args:
        x: [num_tokens, num_heads, head_dim], contiguous.
        gate: [num_tokens, num_heads, head_dim], any strides of tokens and heads.
        out: [num_tokens, num_heads, head_dim], contiguous; ``x`` itself, or apart from it.

    Returns:
        ``out``, allocated when left out.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _sigmoid_gate(x, gate, out)
    return out
