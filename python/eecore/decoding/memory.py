"""Fixed memory of programs: tensors that host and device exchange, page tables, slots, sizes."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eecore.models import CrossBatch
from eecore.scheduling.sequence import Sequence

ALIGNMENT = 16
STATE_COLUMNS = 2
"""Columns after a page table's pages where texts have states: :attr:`Sequence.state_at`."""
# Formats of the struct module.
FORMS = {torch.int64: "q", torch.int32: "i", torch.bool: "?"}

Array = npt.NDArray[Any]
Field = tuple[torch.dtype, tuple[int, ...]]
Pages = list[int]
Cells = dict[str, Any]
"""Memoryviews by name, to read and write single numbers."""


class _Mapped:
    """Pinned memory as int64 numbers of a GPU, which torch can turn into a tensor."""

    def __init__(self, memory: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.nbytes // 8,),
            "typestr": "<i8",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


class HostSide:
    """The host's copy of a twin memory, pinned where there is a GPU.

    Attributes:
        arrays: arrays by name, for the host to read and write.
        cells: the same memory for single numbers, without numpy, whose code a run has evicted from
            the processor's cache.
    """

    def __init__(self, memory: Tensor, tensors: dict[str, Tensor], device: torch.device) -> None:
        self.memory = memory
        self.bytes: memoryview = memory.numpy().data
        self.words = memory.view(torch.int64)
        if memory.is_pinned():
            self.words = torch.as_tensor(_Mapped(memory), device=device)
        self.arrays: dict[str, Array] = {name: t.numpy() for name, t in tensors.items()}
        self.cells: Cells = {name: array.data for name, array in self.arrays.items()}
        self._tensors = tensors
        self.holds: object = None
        """Identifies the fixed columns that were last written here; None: unknown."""
        self.moved: torch.cuda.Event | None = None
        """The end of the copy from or to this side that was queued last, on a GPU."""
        self._tables: dict[str, _Table] = {}
        self._packs: dict[tuple[str, ...], Callable[..., None]] = {}

    def wait(self) -> HostSide:
        """Wait until the copy that was queued last is done."""
        if self.moved is not None:
            self.moved.synchronize()
        return self

    def write(self, **columns: Ordered[Any]) -> None:
        """Write the first rows of some arrays; the rows after them are kept."""
        for name, values in columns.items():
            self.arrays[name][: len(values)] = values

    def write_whole(self, **columns: Ordered[Any]) -> None:
        """Write all rows of fields that are neighbours in memory, in this order, by one call."""
        names = tuple(columns)
        pack = self._packs.get(names)
        if pack is None:
            pack = self._packs[names] = self._pack(names)
        pack(*chain.from_iterable(columns.values()))

    def _pack(self, names: tuple[str, ...]) -> Callable[..., None]:
        """A function that writes all numbers of some fields."""
        begin = end = self._tensors[names[0]].data_ptr()
        form = "="
        for tensor in map(self._tensors.__getitem__, names):
            gap = tensor.data_ptr() - end
            assert 0 <= gap < ALIGNMENT, "fields: expected neighbours"
            form += f"{gap}x{tensor.numel()}{FORMS[tensor.dtype]}"
            end = tensor.data_ptr() + tensor.nbytes
        write = struct.Struct(form).pack_into
        return partial(write, self.bytes, begin - self.memory.data_ptr())

    def write_pages(
        self, name: str, pages: list[Pages], states: list[tuple[int, int]] | None = None
    ) -> None:
        """Write each row's pages into the table ``name``, which a run may change.

        ``states``: :attr:`Sequence.state_at` of each row, for the last columns of the table.
        """
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = _Table(self.arrays[name])
        table.write(pages, states)


class _Table:
    """A page table that is written whole for each run, from a copy that no run changes."""

    def __init__(self, table: Array) -> None:
        self._clean, self._written = np.zeros_like(table), list[Pages]([] for _ in table)
        self._source, self._target = self._clean.data.cast("B"), table.data.cast("B")

    def write(self, pages: list[Pages], states: list[tuple[int, int]] | None) -> None:
        """Write each row's pages, and its state."""
        written = self._written
        if states is not None:
            self._clean[:, -STATE_COLUMNS:] = 0
            self._clean[: len(states), -STATE_COLUMNS:] = states
        for i, own in enumerate(pages):
            if own != written[i]:
                self._clean[i, : len(own)] = own
                written[i] = list(own)
        self._target[:] = self._source


def numbers_of(cells: Cells, name: str, row: int) -> list[Any]:
    """A row of a field; [] where there is no such field."""
    return cells[name][row : row + 1].tolist()[0] if name in cells else []


class TwinMemory:
    """Named tensors on a device, and twice on the host: one side is copied, the other is free.

    On the CPU the host writes to the device's memory itself.

    Attributes:
        device: the device's tensors by name, zeros at first.
        num_bytes: bytes of the tensors and their two copies.
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
            memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            return HostSide(memory, views(memory), device)

        with torch.inference_mode(False):  # so that a copy needs no context
            self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._words = self._memory.view(torch.int64)
            self.device = views(self._memory)
            is_shared = device.type == "cpu"
            self._own = HostSide(self._memory, self.device, device) if is_shared else None
            self._sides = host_side(), host_side()
        self.num_bytes = 3 * num_bytes
        self._uses = 0

    def host(self) -> HostSide:
        """A side to write, from which no copy is in flight."""
        return self._own or self._next_side()

    def _next_side(self) -> HostSide:
        """The side that was not used last, once its copy is done."""
        self._uses += 1
        return self._sides[self._uses % 2].wait()

    def _move(self, source: Tensor, target: Tensor, side: HostSide) -> None:
        """Queue a copy from or to a side. On a GPU it is a kernel: for a few kilobytes a copy
        engine takes several times as long to start, and so does the kernel after the copy.
        """
        if self._own is None:
            torch.bitwise_or(source, 0, out=target)
            side.moved = side.moved or torch.cuda.Event()  # type: ignore[no-untyped-call]
            side.moved.record()
        else:
            target.copy_(source)

    def send(self, side: HostSide) -> None:
        """Queue a copy to the device, after the work that is queued there; does not wait."""
        if side is not self._own:
            self._move(side.words, self._words, side)

    def fetch(self, *, is_read_first: bool = False) -> HostSide:
        """Queue a copy from the device, after the work that is queued there.

        Args:
            is_read_first: whether the side is read before the next run, so that on the CPU it may
                be the program's memory itself.

        Returns:
            The side that is written; ``wait`` for it before reading.
        """
        if is_read_first and self._own is not None:
            return self._own
        side = self._next_side()
        self._move(self._words, side.words, side)
        return side


def slots_of(pages: Pages, first: int, stop: int, page_size: int) -> list[int]:
    """Cache slots of a sequence's positions ``first..stop-1``."""
    return [pages[p // page_size] * page_size + p % page_size for p in range(first, stop)]


def page_table(pages: list[Pages]) -> Array:
    """Each sequence's pages, followed by zeros: int32 [num_rows, max_pages]."""
    table = np.zeros((len(pages), max(map(len, pages))), dtype=np.int32)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = own
    return table


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below ``count``; programs' sizes are powers of two."""
    return 1 << max(count - 1, 0).bit_length()


# An encoder's keys and values are in pages of the decoder's cache.


def cross_fields(num_rows: int, max_input_pages: int, prefix: str = "") -> dict[str, Field]:
    """Fields for the place of each row's encoded input; none without an encoder."""
    if not max_input_pages:
        return {}
    return {
        f"{prefix}input_page_table": (torch.int32, (num_rows, max_input_pages)),
        f"{prefix}input_lens": (torch.int32, (num_rows,)),
    }


def cross_batch(tensors: dict[str, Tensor], prefix: str = "") -> CrossBatch | None:
    """The encoded inputs by the fields on the device; None without an encoder."""
    if f"{prefix}input_lens" not in tensors:
        return None
    return CrossBatch(tensors[f"{prefix}input_page_table"], tensors[f"{prefix}input_lens"])


def input_pages(sequences: list[Sequence]) -> int:
    """Pages of the longest encoded input, rounded up; 0 without an encoder."""
    most = max(len(sequence.input_pages) for sequence in sequences)
    return power_of_two(most) if most else 0
