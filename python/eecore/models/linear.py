"""Linear layers of few rows and of many, in whatever the weights are stored in."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from eecore import ops
from eecore.ops import Matrix

# Up to so many rows a product is bound by reading its weight, and the skinny ops read it best.
MAX_SKINNY_ROWS = 32


class Linear:
    """How one model multiplies.

    Args:
        device: of the model.
        dtype: of its states.
        eps: of its norms.
        is_int8: weights have scales.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, eps: float, *, is_int8: bool
    ) -> None:
        self._eps = eps
        self._is_int8 = is_int8
        self._widens = (
            device.type == "cpu"
            and dtype == torch.bfloat16
            and "avx512_bf16" not in ops.build_info()["cpu_capabilities"]
        )

    def is_skinny(self, x: Tensor) -> bool:
        """Whether the skinny ops take so many rows."""
        return x.shape[0] <= MAX_SKINNY_ROWS or self._is_int8

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

        Of many rows in float32 where the CPU is slow at bfloat16; ``few``: as of few rows.
        """
        weight, bias, scale = matrix
        if few or self.is_skinny(x):
            return ops.skinny_linear(
                x,
                weight,
                weight_scale=scale,
                norm_weight=norm,
                eps=self._eps,
                bias=bias,
                residual=residual,
            )
        if norm is not None:
            x = self.normed(x, norm)
        if self._widens:
            wide_bias = None if bias is None else bias.float()
            out = functional.linear(x.float(), weight.float(), wide_bias).to(x.dtype)
        else:
            out = functional.linear(x, weight, bias)
        return out if residual is None else out.add_(residual)

    def normed(self, x: Tensor, norm: Tensor) -> Tensor:
        """RMS norm."""
        return functional.rms_norm(x, norm.shape, norm, self._eps)
