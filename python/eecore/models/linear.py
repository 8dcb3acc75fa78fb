"""Linear layers of few rows and of many, in whatever the weights are stored in."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from eecore import ops
from eecore.models.int8 import dequantise_rows
from eecore.ops import Matrix

# Rows that eecore's products take on a GPU: those of more are bound by multiplying, and torch's are
# faster. On the CPU they take all, so that a row rounds alike whatever runs beside it.
MAX_SKINNY_ROWS = 32


class Linear:
    """How one model multiplies.

    Args:
        device: of the model.
        eps: of its norms.
    """

    def __init__(self, device: torch.device, eps: float) -> None:
        self._eps = eps
        self.max_rows = None if device.type == "cpu" else MAX_SKINNY_ROWS
        """Of eecore's products; None: any number."""

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's result is the same bit for bit whatever rows are beside it."""
        return self.max_rows is None

    def is_skinny(self, x: Tensor) -> bool:
        """Whether eecore's products take so many rows."""
        return self.max_rows is None or x.shape[0] <= self.max_rows

    def __call__(
        self,
        x: Tensor,
        matrix: Matrix,
        *,
        norm: Tensor | None = None,
        residual: Tensor | None = None,
        few: bool = False,
    ) -> Tensor:
        """Linear layer of x, normed first when there is a norm, added to the residual if any.

        ``few``: by eecore's product, however many rows there are. For others quantised weights
        become floats of x's dtype first, rounded to it.
        """
        weight, bias, scale, table = matrix
        if few or self.is_skinny(x):
            return ops.skinny_linear(
                x,
                weight,
                weight_scale=scale,
                weight_table=table,
                norm_weight=norm,
                eps=self._eps,
                bias=bias,
                residual=residual,
                constant_weight=True,
            )
        if norm is not None:
            x = self.normed(x, norm)
        if scale is not None:
            weight = dequantise_rows(weight, scale, x.dtype)
        if table is not None:
            every = torch.arange(len(table), device=x.device)
            weight = x.new_empty(len(table), x.shape[1])
            ops.embed_tokens(every, matrix.weight, table=table, out=weight)
        out = functional.linear(x, weight, bias)
        return out if residual is None else out.add_(residual)

    def normed(self, x: Tensor, norm: Tensor) -> Tensor:
        """RMS norm."""
        return functional.rms_norm(x, norm.shape, norm, self._eps)
