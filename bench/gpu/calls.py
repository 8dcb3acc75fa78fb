"""A call of an op as the plans of its launches see it: arguments by name, sizes, what is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bench.gpu.devices import Device
from bench.gpu.launches import KernelLaunch


@dataclass(frozen=True)
class Known:
    """What the tensors of a call would say.

    Args:
        seq_len: keys of each sequence; None: as many as its row of the page table has room for.
        exit_layers: each row's; None: all rows fill all layers.
        tokens_known: of rows that are placed by their kind none is of the kind that is.
    """

    seq_len: int | None = None
    exit_layers: tuple[int, ...] | None = None
    tokens_known: bool = False


@dataclass(frozen=True)
class Call:
    """One call of an op: its arguments by the names of its schema."""

    op: str
    arguments: Mapping[str, Any]
    written: frozenset[str]
    """The arguments that it writes to."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def bytes_of(self, *names: str) -> int:
        """Of those that are there."""
        return sum(nbytes(self[name]) for name in names if self[name] is not None)


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


Plan = Callable[[Call, Device, Known], list[KernelLaunch]]
"""Of a call, on a device."""
