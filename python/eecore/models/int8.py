"""Weights in int8: each row as whole numbers of -127 to 127 times a float32 scale of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to 127 steps of its largest magnitude.

    Args:
        weight: [..., num_rows, n], float32 or bfloat16; a row with NaN or infinity gets scale NaN.

    Returns:
        int8 [..., num_rows, n] and float32 [..., num_rows], whose product is the weight to within
        half a step.
    """
    wide = weight.float()
    scale = wide.abs().amax(dim=-1) / 127
    steps = torch.where(scale > 0, 1 / scale, 0.0)
    whole = (wide * steps[..., None]).round_().nan_to_num_(0.0).clamp_(-127, 127)
    poisoned = torch.where(scale.isfinite(), scale, torch.nan)
    return whole.to(torch.int8), poisoned


def dequantise_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., num_rows, n] in ``dtype``, of int8 rows [..., num_rows, n] times ``scale``."""
    return (weight * scale[..., None]).to(dtype)  # the product is in float32


@dataclass(frozen=True)
class WeightView:
    """Where one tensor of a checkpoint goes."""

    weight: Tensor
    """Of the tensor's shape; int8 where there is a scale."""
    scale: Tensor | None = None
    """float32, of that shape without its last axis."""

    def fill(self, stored: Tensor) -> None:
        """Copy a stored tensor, converted to the weight's dtype and device, or quantised."""
        if self.scale is None:
            self.weight.copy_(stored)
            return
        whole, scale = quantise_rows(stored)
        self.weight.copy_(whole)
        self.scale.copy_(scale)
