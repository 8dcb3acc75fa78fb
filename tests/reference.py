"""Plain PyTorch oracles: one function per op, and the semantics of the runtime, restated simply."""

from __future__ import annotations

import torch
from torch import Tensor


def accept_mask(
    confidence: Tensor, thresholds: Tensor, layer: int, status: Tensor, exit_layer: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """New (status, exit_layer, survivors); see eecore.ops.accept_mask."""
    accepted = (confidence >= thresholds) & (thresholds < 1)
    new_exit_layer = torch.where(accepted & ~status, layer, exit_layer)
    new_status = status | accepted
    survivors = (~new_status).nonzero().flatten().to(torch.int32)
    return new_status, new_exit_layer, survivors
