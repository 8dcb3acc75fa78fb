"""Sets of layers as the ops take them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class LayerFlags:
    """bool [num_layers] tensors, true for the layers of a set, each made once."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._made: dict[frozenset[int], Tensor] = {}

    def of(self, layers: frozenset[int]) -> Tensor | None:
        """None for no layers."""
        if not layers:
            return None
        if layers not in self._made:
            flags = np.array([i in layers for i in range(self._num_layers)])
            self._made[layers] = torch.from_numpy(flags)  # may be while a tape is recorded
        return self._made[layers]
