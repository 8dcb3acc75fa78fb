"""How methods of quantisation store the tensors of a linear layer, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from eecore.errors import CheckpointError, UnsupportedModelError
from eecore.files.json_fields import REQUIRED
from eecore.models.readers.checkpoint import FLOAT_DTYPES, Checkpoint
from eecore.models.readers.config_fields import ConfigFields
from eecore.models.readers.quantised_matrix import QuantisedMatrix
from eecore.values import shown

BITS = (4, 8)
FLOATS = tuple(FLOAT_DTYPES)
MAX_GROUP_SIZE = 1 << 20
Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredModule:
    """The tensors of one linear layer, named after it, with checks."""

    checkpoint: Checkpoint
    name: str
    num_rows: int
    num_columns: int

    def __contains__(self, part: str) -> bool:
        return f"{self.name}.{part}" in self.checkpoint

    def shape(self, part: str) -> Shape:
        """The shape of a tensor, which must be there."""
        return self.checkpoint.shape(f"{self.name}.{part}")

    def tensor(self, part: str) -> Tensor:
        """A tensor as stored."""
        return self.checkpoint.tensor(f"{self.name}.{part}")

    def dtype(self, part: str) -> str:
        """The file's name of a tensor's dtype."""
        return self.checkpoint.stored_dtype(f"{self.name}.{part}")

    def check(self, part: str, dtypes: Sequence[str], *shapes: Shape) -> None:
        """Raise unless a tensor is there, in one of the dtypes and shapes."""
        wanted = f"{' or '.join(dtypes)} {' or '.join(str(list(shape)) for shape in shapes)}"
        if part not in self:
            raise CheckpointError(
                f"{self.checkpoint.place}: expected tensor {self.name}.{part}, {wanted}, got none"
            )
        dtype, shape = self.dtype(part), self.shape(part)
        if dtype not in dtypes or shape not in shapes:
            raise self.wrong(part, wanted, f"{dtype} {shown(list(shape))}")

    def groups(self, part: str, count: int) -> Tensor:
        """int64 [num_columns], in 0..count-1: the group of each column, stored in a tensor."""
        groups = self.tensor(part).long()
        low, high = int(groups.min()), int(groups.max())
        if low < 0 or high >= count:
            raise self.wrong(part, f"groups of 0..{count - 1}", f"{low}..{high}")
        return groups

    def groups_in_order(self, count: int) -> Tensor:
        """int64 [num_columns]: the group of each column if groups are in order."""
        return torch.arange(self.num_columns) // (self.num_columns // count)

    def wrong(self, part: str, expected: str, got: str) -> CheckpointError:
        """The error of a wrong tensor."""
        name = f"{self.name}.{part}"
        return CheckpointError(
            f"{self.checkpoint.path_of(name)}: {name}: expected {expected}, got {got}"
        )

    def unsupported(self, expected: str, got: str) -> UnsupportedModelError:
        """The error of a layer that its method cannot store, or that is not supported."""
        return UnsupportedModelError(
            f"{self.checkpoint.place}: {self.name}: supported are {expected}, got {got}"
        )


class Scheme(Protocol):
    """How a method stores linear layers of one kind."""

    def fits(self, module: StoredModule) -> bool:
        """Whether a layer's tensors look like this scheme's."""
        ...

    def check(self, module: StoredModule) -> None:
        """Raise unless the tensors are there and fit together; also checks values of small ones."""
        ...

    def matrix(self, module: StoredModule) -> QuantisedMatrix:
        """The weight of a layer that has been checked."""
        ...


@dataclass(frozen=True)
class Layout:
    """How a directory stores its linear layers."""

    method: str
    """The method's name in config.json."""
    parts: tuple[str, ...]
    """Names of tensors that only a quantised layer has."""
    schemes: Sequence[Scheme]

    def scheme(self, module: StoredModule) -> Scheme:
        """The scheme that a layer's tensors fit, else the first."""
        return next((each for each in self.schemes if each.fits(module)), self.schemes[0])


def group_size(fields: ConfigFields, default: Any = REQUIRED, name: str = "group_size") -> int:
    """The number of columns that share a scale; -1: all columns of a row."""
    size: int = fields.integer(name, -1, MAX_GROUP_SIZE, default)
    if size == 0:
        raise fields.wrong(name, "-1 or 1 and more", size)
    return size


def num_groups(module: StoredModule, group_size: int) -> int:
    """The number of groups of ``group_size`` columns, which must fill a row; 1 for -1."""
    if group_size == -1:
        return 1
    if module.num_columns % group_size:
        raise module.unsupported(
            f"groups that fill {module.num_columns} columns", f"groups of {group_size}"
        )
    return module.num_columns // group_size
