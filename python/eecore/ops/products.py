"""Embeddings, and products of few rows with a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from eecore.ops.attention import AppendKv
from eecore.ops.registered import compiled

__all__ = ["add_normed", "embed_tokens", "skinny_gated_linear", "skinny_linear"]

_add_normed = compiled("add_normed")
_embed_tokens = compiled("embed_tokens")
_skinny_gated_linear = compiled("skinny_gated_linear")
_skinny_linear = compiled("skinny_linear")


def add_normed(
    x: Tensor,
    norm_weight: Tensor,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-6,
    multiplier: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """``residual + multiplier * norm(x)``: a sublayer's normed output added to the residual stream.

    As in a model of x's dtype, the RMS norm, its multiple and the sum are each rounded to that
    dtype. A row's result depends neither on the other rows nor on the number of threads.

    Args:
        x: [num_tokens, hidden_size], any row stride.
        norm_weight: [hidden_size].
        residual: [num_tokens, hidden_size], any row stride; ``out`` itself, or apart from it. None:
            nothing is added to the multiple of the norm.
        eps: epsilon of the RMS norm.
        multiplier: factor of the normed rows.
        out: [num_tokens, hidden_size], any row stride that keeps rows apart.

    Returns:
        ``out``, allocated when left out.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _add_normed(x, norm_weight, eps, multiplier, residual, out)
    return out


def embed_tokens(
    token_ids: Tensor,
    weight: Tensor,
    *,
    scale: Tensor | None = None,
    table: Tensor | None = None,
    previous: Tensor | None = None,
    sources: Tensor | None = None,
    multiplier: float = 1.0,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rows of an embedding table, for tokens that are given or that an earlier step made.

    Args:
        token_ids: int64 [num_tokens], in [0, vocab_size) where they are read; -1 leaves the row of
            ``out`` as it is.
        weight: [vocab_size, hidden_size], any row stride; int8 with ``scale``; packed bytes with
            ``table``.
        scale: float32 [vocab_size], see :func:`skinny_linear`; the product is rounded to float32,
            then to out's dtype.
        table: int64 [vocab_size], see :func:`pack_weight`; rows are rounded to out's dtype.
        previous: int64 [num_previous], tokens of an earlier step, with ``sources``; -1, where the
            step made no token, is embedded as 0.
        sources: int32 [num_tokens]: the token is ``previous[sources[i]]``; -1: ``token_ids[i]``.
        multiplier: factor of the rows in out's dtype; the product is rounded to it again.
        dtype: of out where it is allocated; weight's when None. With ``table`` out must be given.
        out: [num_tokens, hidden_size], any row stride that keeps rows apart.

    Returns:
        ``out``, allocated when left out.
    """
    if out is None:
        shape = (token_ids.shape[0], weight.shape[1])
        out = torch.empty(shape, dtype=dtype or weight.dtype, device=weight.device)
    _embed_tokens(token_ids, weight, scale, previous, sources, out, table, multiplier)
    return out


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    *,
    weight_scale: Tensor | None = None,
    weight_table: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    bias: Tensor | None = None,
    activation: str | None = None,
    multiplier: float = 1.0,
    soft_cap: float = 0.0,
    residual: Tensor | None = None,
    constant_weight: bool = False,
    append: AppendKv | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``activation(norm(x) @ weight.T + bias) + residual``: the weight read once for few rows.

    As in a model of x's dtype, the RMS norm (with ``norm_weight`` only), the linear layer with its
    bias, its multiple, the cap and the sum with the residual are each rounded to that dtype; only
    the norm is where out is float32. A row's result depends neither on the other rows nor on the
    number of threads.

    With ``weight_scale`` the weight is int8 and row r of it stands for ``weight[r] *
    weight_scale[r]``. On the CPU each (normed) row of x is then quantised to 16 bits, at 1/32767 of
    its largest magnitude, and the products are summed as integers; a row that holds NaN or infinity
    gives NaN throughout. On CUDA x stays as it is, and the products are summed in float32 before
    the scale. With ``weight_table`` the weight is packed: :func:`pack_weight`.

    Args:
        x: [num_tokens, in_features], any row stride.
        weight: [out_features, in_features], any row stride; int8 with ``weight_scale``; uint8
            [num_bytes] with ``weight_table``.
        weight_scale: float32 [out_features].
        weight_table: int64 [out_features].
        norm_weight: [in_features].
        eps: epsilon of the RMS norm.
        bias: [out_features].
        activation: None or "relu".
        multiplier: factor of the linear layer with its bias, before the residual.
        soft_cap: c > 0: the multiplied values y become ``c * tanh(y / c)``; 0: no cap.
        residual: [num_tokens, out_features], any row stride; ``out`` itself, or apart from it.
        constant_weight: no work in flight writes the weight: on a GPU the weight is then read while
            earlier kernels still run.
        append: the columns of out are heads, those of q, then num_kv_heads of k, then as many of v;
            they are appended as by :func:`append_kv`, with ``eps`` for their norms too. Not with
            activation, residual, multiplier or cap.
        dtype: of out where it is allocated; x's when None.
        out: [num_tokens, out_features], any row stride that keeps rows apart; float32, or x's
            dtype, as it must be with ``append``.

    Returns:
        ``out``, allocated when left out.
    """
    if out is None:
        rows = weight if weight_table is None else weight_table
        out = x.new_empty(x.shape[0], rows.shape[0], dtype=dtype)
    _skinny_linear(
        x,
        norm_weight,
        eps,
        weight,
        weight_scale,
        bias,
        residual,
        out,
        activation,
        weight_table,
        constant_weight,
        *((None,) * 9 if append is None else append[:9]),
        multiplier,
        soft_cap,
        None if append is None else append.q_cos_sin,
        append is not None and append.constant_places,
    )
    return out


def skinny_gated_linear(
    x: Tensor,
    weight: Tensor,
    *,
    weight_scale: Tensor | None = None,
    weight_table: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    bias: Tensor | None = None,
    activation: str = "silu",
    constant_weight: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``activation(gate) * up`` of ``gate, up = norm(x) @ weight.T + bias``.

    As in a model of x's dtype, the RMS norm (with ``norm_weight`` only), gate and up,
    activation(gate) and the product are each rounded to that dtype. A row's result depends neither
    on the other rows nor on the number of threads. (Shazeer 2020: SwiGLU and GEGLU.)

    Args:
        x: [num_tokens, in_features], any row stride.
        weight: [2 * inner_size, in_features], any row stride; gate rows, then up rows; int8 with
            ``weight_scale``, uint8 [num_bytes] with ``weight_table``.
        weight_scale: float32 [2 * inner_size], see :func:`skinny_linear`.
        weight_table: int64 [2 * inner_size], see :func:`pack_weight`.
        norm_weight: [in_features].
        eps: epsilon of the RMS norm.
        bias: [2 * inner_size].
        activation: "silu", or "gelu_tanh": ``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``.
        constant_weight: as in :func:`skinny_linear`.
        out: [num_tokens, inner_size], any row stride that keeps rows apart.

    Returns:
        ``out``, allocated when left out.
    """
    if out is None:
        rows = weight if weight_table is None else weight_table
        out = x.new_empty(x.shape[0], rows.shape[0] // 2)
    _skinny_gated_linear(
        x,
        norm_weight,
        eps,
        weight,
        weight_scale,
        bias,
        out,
        activation,
        weight_table,
        constant_weight,
    )
    return out
