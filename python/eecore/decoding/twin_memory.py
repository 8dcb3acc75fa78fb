"""Tensors that the host and the device exchange, side by side in memory: one copy moves all."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["HostSide", "TwinMemory"]

ALIGNMENT = 16

Field = tuple[torch.dtype, tuple[int, ...]]


class HostSide:
    """The host's copy of a twin memory, pinned where there is a GPU.

    Attributes:
        tensors: by name.
    """

    def __init__(self, memory: Tensor, tensors: dict[str, Tensor]) -> None:
        self.memory = memory
        self.tensors = tensors
        self._moved: torch.cuda.Event | None = None

    def moves(self) -> None:
        """A copy from or to here has just been queued on the current stream."""
        if self.memory.is_pinned():
            self._moved = self._moved or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._moved.record()

    def wait(self) -> HostSide:
        """Until the copy that was queued last is done."""
        if self._moved is not None:
            self._moved.synchronize()
        return self


class TwinMemory:
    """Named tensors on a device, and twice on the host: one side moves, the other is at hand.

    Attributes:
        device: the device's tensors by name, zeros at first.
    """

    def __init__(self, device: torch.device, fields: dict[str, Field]) -> None:
        num_bytes = 0
        places = {}
        for name, (dtype, shape) in fields.items():
            size = math.prod(shape) * dtype.itemsize
            places[name] = slice(num_bytes, num_bytes + size), dtype, shape
            num_bytes += -(-size // ALIGNMENT) * ALIGNMENT

        def views(memory: Tensor) -> dict[str, Tensor]:
            return {
                name: memory[at].view(dtype).view(shape)
                for name, (at, dtype, shape) in places.items()
            }

        def host_side() -> HostSide:
            pinned = device.type == "cuda"
            memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
            return HostSide(memory, views(memory))

        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.device = views(self._memory)
        self._sides = host_side(), host_side()
        self._uses = 0

    def host(self) -> HostSide:
        """The side that was not at hand the last time, when nothing moves from or to it."""
        self._uses += 1
        return self._sides[self._uses % 2].wait()

    def send(self, side: HostSide) -> None:
        """To the device, behind the work that is queued there; waits for nothing."""
        self._memory.copy_(side.memory, non_blocking=True)
        side.moves()

    def fetch(self) -> HostSide:
        """From the device, behind the work that is queued there: ``wait`` for it before reading."""
        side = self.host()
        side.memory.copy_(self._memory, non_blocking=True)
        side.moves()
        return side
