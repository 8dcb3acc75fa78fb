"""Weights before a checkpoint is read: their memory, and the places that its tensors fill."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eecore.models.int8 import quantise_rows
from eecore.ops import Matrix


@dataclass(frozen=True)
class NewWeights:
    """Makes uninitialised weights; on device "meta" they take no memory."""

    device: torch.device | str
    dtype: torch.dtype
    """Of all that is not quantised."""
    int8: bool
    """Whether matrices are."""

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """In the weights' dtype, or the one given."""
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)

    def matrix(self, *shape: int, bias: bool = False) -> Matrix:
        """[..., out_features, in_features] with a scale in int8, and a bias where wanted."""
        rows = shape[:-1]
        return Matrix(
            self.tensor(*shape, dtype=torch.int8 if self.int8 else None),
            self.tensor(*rows) if bias else None,
            self.tensor(*rows, dtype=torch.float32) if self.int8 else None,
        )


@dataclass(frozen=True)
class WeightView:
    """Where one tensor of a checkpoint goes."""

    weight: Tensor
    """Of the tensor's shape; int8 where there is a scale."""
    scale: Tensor | None = None
    """float32, of that shape without its last axis."""
    table: Tensor | None = None
    """int64, of that shape too; the weight is packed bytes then."""

    @classmethod
    def of(cls, matrix: Matrix) -> WeightView:
        """Of a matrix, whose bias is a tensor of its own."""
        return cls(matrix.weight, matrix.scale, matrix.table)

    def fill(self, stored: Tensor) -> None:
        """Copy a stored tensor, converted to the weight's dtype and device, or quantised."""
        if self.scale is None:
            self.weight.copy_(stored)
            return
        whole, scale = quantise_rows(stored)
        self.weight.copy_(whole)
        self.scale.copy_(scale)
