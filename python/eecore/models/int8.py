"""Weights in int8: each row is whole numbers from -127 to 127 times the row's float32 scale."""

from __future__ import annotations

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
    """[..., num_rows, n] in ``dtype``: int8 rows [..., num_rows, n] times ``scale``.

    The products are float32 and rounded once; on a GPU they are never all in memory as float32.
    """
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    return torch.mul(weight, scale[..., None], out=out)
