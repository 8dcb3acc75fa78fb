"""A call of an op, for the plans of its launches: arguments by name, sizes, known values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bench.gpu.devices import Device
from bench.gpu.launches import KernelLaunch


@dataclass(frozen=True)
class Known:
    """Values of a call's tensors, which have no memory.

    Args:
        seq_len: keys of each sequence; None: as many as its row of the page table can hold.
        exit_layers: the exit layer of each row; None: all rows fill all layers.
        tokens_known: whether no row is of the kind that has its head placed.
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
        """Bytes of the named tensors; missing ones count 0."""
        return sum(nbytes(self[name]) for name in names if self[name] is not None)


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


Plan = Callable[[Call, Device, Known], list[KernelLaunch]]
"""The kernels of a call on a device."""
