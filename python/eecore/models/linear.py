"""Linear layers for few rows and for many, with weights in floats, int8 or packed blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from eecore import ops
from eecore.config import Activation
from eecore.models.int8 import dequantise_rows
from eecore.ops import AppendKv, Matrix

# Rows that eecore's products take on a GPU: with more rows multiplying is the limit, and torch's
# products are faster. On the CPU they take any number, so that a row is rounded alike whichever
# rows run with it.
MAX_SKINNY_ROWS = 32
ADA = (8, 9)
# The same on Ada, whose L2 cache, from which rows are read again and again, is five times as fast
# as its memory.
MAX_SKINNY_ROWS_ON_ADA = 64


def max_skinny_rows(device: torch.device) -> int | None:
    """How many rows eecore's products take; None: any number."""
    if device.type == "cpu":
        return None
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return MAX_SKINNY_ROWS_ON_ADA if capability == ADA else MAX_SKINNY_ROWS


def product(x: Tensor, matrix: Matrix, **options: Any) -> Tensor:
    """:func:`eecore.ops.skinny_linear` with a matrix that stays the same, and the op's options."""
    return ops.skinny_linear(x, matrix.weight, **_parts(matrix), **options)


def gated_product(x: Tensor, matrix: Matrix, **options: Any) -> Tensor:
    """:func:`eecore.ops.skinny_gated_linear` likewise."""
    return ops.skinny_gated_linear(x, matrix.weight, **_parts(matrix), **options)


def _parts(matrix: Matrix) -> dict[str, Any]:
    _, bias, scale, table = matrix
    return {"bias": bias, "weight_scale": scale, "weight_table": table, "constant_weight": True}


class Linear:
    """The linear layers of one model, by eecore's or torch's products."""

    def __init__(self, device: torch.device, eps: float) -> None:
        self._eps = eps
        self.max_rows = max_skinny_rows(device)
        """Rows that eecore's products take; None: any number."""

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's result is bit for bit the same whichever rows run with it."""
        return self.max_rows is None

    def is_skinny(self, x: Tensor) -> bool:
        """Whether eecore's products take as many rows as x has."""
        return self.max_rows is None or x.shape[0] <= self.max_rows

    def __call__(
        self,
        x: Tensor,
        matrix: Matrix,
        *,
        norm: Tensor | None = None,
        residual: Tensor | None = None,
        multiplier: float = 1.0,
        few: bool = False,
    ) -> Tensor:
        """Linear layer of x, normed first when there is a norm, added to the residual if any.

        ``multiplier``: see :func:`eecore.ops.skinny_linear`.

        ``few``: eecore's product computes it for any number of rows. For torch's product quantised
        weights are first rounded to floats of x's dtype.
        """
        if few or self.is_skinny(x):
            options = {"residual": residual, "multiplier": multiplier}
            return product(x, matrix, norm_weight=norm, eps=self._eps, **options)
        weight, bias, scale, table = matrix
        if norm is not None:
            x = self.normed(x, norm)
        if scale is not None:
            weight = dequantise_rows(weight, scale, x.dtype)
        if table is not None:
            every = torch.arange(len(table), device=x.device)
            weight = x.new_empty(len(table), x.shape[1])
            ops.embed_tokens(every, matrix.weight, table=table, out=weight)
        out = functional.linear(x, weight, bias)
        if multiplier != 1:
            out.mul_(multiplier)
        return out if residual is None else out.add_(residual)

    def into_cache(self, x: Tensor, qkv: Matrix, norm: Tensor | None, append: AppendKv) -> Tensor:
        """Queries [num_tokens, num_q_heads, head_dim] of x; its keys and values go to the cache.

        ``qkv`` has heads of q, then of k, then of v; x is normed first if there is a norm.
        """
        num_kv_heads, head_dim = append.k_cache.shape[-2:]
        skinny = self.is_skinny(x)
        if skinny:
            rows = product(x, qkv, norm_weight=norm, eps=self._eps, append=append)
        else:
            rows = self(x, qkv, norm=norm)
        num_heads = rows.shape[1] // head_dim
        counts = (num_heads - 2 * num_kv_heads, num_kv_heads, num_kv_heads)
        q, k, v = rows.view(len(rows), num_heads, head_dim).split_with_sizes(counts, 1)
        if not skinny:
            ops.append_kv(q, k, v, **append._asdict(), eps=self._eps)
        return q

    def gated(
        self,
        x: Tensor,
        gate_up: Matrix,
        norm: Tensor | None,
        activation: Activation = "silu",
        *,
        few: bool = False,
    ) -> Tensor:
        """``activation(gate) * up`` of x, normed first when there is a norm; "relu" has no up.

        ``few``: as in :meth:`__call__`.
        """
        if not few and not self.is_skinny(x):
            return _activated(self(x, gate_up, norm=norm), activation)
        into_inner = product if activation == "relu" else gated_product
        return into_inner(x, gate_up, norm_weight=norm, eps=self._eps, activation=activation)

    def normed(self, x: Tensor, norm: Tensor) -> Tensor:
        """RMS norm."""
        return functional.rms_norm(x, norm.shape, norm, self._eps)


def _activated(inner: Tensor, activation: Activation) -> Tensor:
    if activation == "relu":
        return inner.relu_()
    gate, up = inner.chunk(2, dim=1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    return functional.gelu(gate, approximate="tanh").mul_(up)
