"""Tensors that the host and the device exchange, side by side in memory: one copy moves all."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["TwinMemory"]

ALIGNMENT = 16

Field = tuple[torch.dtype, tuple[int, ...]]


class TwinMemory:
    """Named tensors on a device and on the host; on the CPU they are the same.

    Attributes:
        device: the device's tensors by name, zeros at first.
        host: the host's, in pinned memory.
    """

    def __init__(self, device: torch.device, fields: dict[str, Field]) -> None:
        num_bytes = 0
        places = {}
        for name, (dtype, shape) in fields.items():
            size = math.prod(shape) * dtype.itemsize
            places[name] = slice(num_bytes, num_bytes + size), dtype, shape
            num_bytes += -(-size // ALIGNMENT) * ALIGNMENT
        self._on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._on_host = self._on_device
        if device.type != "cpu":
            self._on_host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

        def views(memory: Tensor) -> dict[str, Tensor]:
            return {
                name: memory[at].view(dtype).view(shape)
                for name, (at, dtype, shape) in places.items()
            }

        self.device = views(self._on_device)
        self.host = views(self._on_host)

    def send(self) -> None:
        """From the host to the device, behind the work that is queued there; waits for nothing."""
        if self._on_host is not self._on_device:
            self._on_device.copy_(self._on_host, non_blocking=True)

    def fetch(self) -> None:
        """From the device to the host, once the work that is queued there is done."""
        if self._on_host is not self._on_device:
            self._on_host.copy_(self._on_device, non_blocking=True)
            torch.cuda.current_stream(self._on_device.device).synchronize()
