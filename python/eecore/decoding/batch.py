"""The rows of one pass: which token of which sequence, from which layer to which.

A row is one position of one sequence. Rows are sorted by sequence, then by position. A row enters
at layer ``enter`` (0: from the embedding; more: from a kept hidden state) and leaves after
``leave`` layers have run. Any subset of rows can be turned into an attention batch, which is how
rows drop out of the deeper layers and how a verification joins in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from eecore.models import AttentionBatch, CrossBatch

__all__ = [
    "BoolArray",
    "CrossRows",
    "Int64Array",
    "RowBuilder",
    "Rows",
    "cross_rows",
    "fill_page_table",
]

BoolArray = npt.NDArray[np.bool_]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
ToTensor = Callable[[npt.NDArray[Any]], Tensor]


@dataclass(frozen=True)
class CrossRows:
    """Where the encoder's keys and values of each sequence are."""

    page_tables: Int32Array  # [num_sequences, max_pages]
    seq_lens: Int32Array  # [num_sequences], tokens of each input

    def batch(self, to_tensor: ToTensor, index: Int64Array | slice = slice(None)) -> CrossBatch:
        """Of the sequences ``index``, each as often as it is named."""
        return CrossBatch(to_tensor(self.page_tables[index]), to_tensor(self.seq_lens[index]))


@dataclass(frozen=True)
class Rows:
    """Everything a pass needs to know of its rows, as arrays on the host."""

    token_ids: Int64Array  # [num_rows]
    positions: Int64Array  # [num_rows]
    slots: Int64Array  # [num_rows]
    sequence: Int64Array  # [num_rows], row of page_tables
    enter: Int64Array  # [num_rows]
    leave: Int64Array  # [num_rows]
    page_tables: Int32Array  # [num_sequences, max_pages]
    seq_lens: Int32Array  # [num_sequences], positions up to each sequence's last row
    starts: Int32Array  # [num_sequences + 1], each sequence's first row, then num_rows
    leave_alike: int  # how many layers are behind every row when it leaves; 0 when they differ
    kept_at: int  # where all rows enter but some sequences' last ones, which enter at 0; or -1
    cross: CrossRows | None = None  # of a model with an encoder

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def depth(self) -> int:
        """How many layers every row runs from the embedding on; 0 when they differ."""
        return 0 if self.kept_at else self.leave_alike

    def last_batch(self, last: Int64Array, to_tensor: ToTensor) -> AttentionBatch:
        """The rows ``last``, each the last one of its sequence."""
        sequence = self.sequence[last]
        return AttentionBatch(
            positions=to_tensor(self.positions[last]),
            slot_mapping=to_tensor(self.slots[last]),
            page_table=to_tensor(self.page_tables[sequence]),
            seq_lens=to_tensor(self.seq_lens[sequence]),
            query_start_loc=to_tensor(np.arange(len(last) + 1, dtype=np.int32)),
            cross=self._cross(to_tensor, sequence),
        )

    def whole_batch(self, to_tensor: ToTensor) -> AttentionBatch:
        """All rows, one ragged entry per sequence."""
        return AttentionBatch(
            positions=to_tensor(self.positions),
            slot_mapping=to_tensor(self.slots),
            page_table=to_tensor(self.page_tables),
            seq_lens=to_tensor(self.seq_lens),
            query_start_loc=to_tensor(self.starts),
            cross=self._cross(to_tensor),
        )

    def attention_batch(self, index: Int64Array, to_tensor: ToTensor) -> AttentionBatch:
        """The rows ``index`` (ascending), one ragged entry per run of consecutive positions."""
        positions, sequence = self.positions[index], self.sequence[index]
        breaks = np.flatnonzero(
            (sequence[1:] != sequence[:-1]) | (positions[1:] != positions[:-1] + 1)
        )
        starts = np.concatenate(([0], breaks + 1))
        ends = np.concatenate((breaks + 1, [len(index)]))
        query_start_loc = np.concatenate((starts, [len(index)])).astype(np.int32)
        return AttentionBatch(
            positions=to_tensor(positions),
            slot_mapping=to_tensor(self.slots[index]),
            page_table=to_tensor(self.page_tables[sequence[starts]]),
            seq_lens=to_tensor((positions[ends - 1] + 1).astype(np.int32)),
            query_start_loc=to_tensor(query_start_loc),
            cross=self._cross(to_tensor, sequence[starts]),
        )

    def _cross(
        self, to_tensor: ToTensor, index: Int64Array | slice = slice(None)
    ) -> CrossBatch | None:
        return None if self.cross is None else self.cross.batch(to_tensor, index)


def fill_page_table(table: Int32Array, pages: list[list[int]]) -> Int32Array:
    """Write each sequence's pages into ``table`` [num_rows, max_pages], then zeros; returns it."""
    table[:] = 0
    for i, own in enumerate(pages):
        table[i, : len(own)] = own
    return table


def cross_rows(pages: list[list[int]], lengths: list[int]) -> CrossRows:
    """Of sequences whose inputs have these pages and so many tokens."""
    table = np.empty((len(pages), max(map(len, pages))), dtype=np.int32)
    return CrossRows(fill_page_table(table, pages), np.array(lengths, dtype=np.int32))


@dataclass
class RowBuilder:
    """Collects rows sequence by sequence."""

    page_size: int
    _token_ids: list[int] = field(default_factory=list)
    _positions: list[int] = field(default_factory=list)
    _slots: list[int] = field(default_factory=list)
    _sequence: list[int] = field(default_factory=list)
    _enter: list[int] = field(default_factory=list)
    _leave: list[int] = field(default_factory=list)
    _pages: list[list[int]] = field(default_factory=list)
    _seq_lens: list[int] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)
    _cross_pages: list[list[int]] = field(default_factory=list)
    _cross_lens: list[int] = field(default_factory=list)

    def add(
        self,
        token_ids: list[int],
        first_position: int,
        pages: list[int],
        *,
        enter: list[int],
        leave: list[int],
        cross_pages: list[int] | None = None,
        cross_len: int = 0,
    ) -> slice:
        """Adds consecutive positions of one sequence; returns where its rows are.

        With an encoder ``cross_pages`` hold what it made of the ``cross_len`` tokens of the input.
        """
        start, count, size = len(self._positions), len(token_ids), self.page_size
        positions = range(first_position, first_position + count)
        self._token_ids += token_ids
        self._positions += positions
        self._slots += [pages[p // size] * size + p % size for p in positions]
        self._sequence += [len(self._pages)] * count
        self._enter += enter
        self._leave += leave
        self._pages.append(pages)
        self._seq_lens.append(first_position + count)
        self._starts.append(start)
        if cross_pages is not None:
            self._cross_pages.append(cross_pages)
            self._cross_lens.append(cross_len)
        return slice(start, start + count)

    def build(self) -> Rows:
        width = max(map(len, self._pages), default=0)
        page_tables = np.empty((len(self._pages), width), dtype=np.int32)

        def array(values: list[int]) -> Int64Array:
            return np.array(values, dtype=np.int64)

        return Rows(
            token_ids=array(self._token_ids),
            positions=array(self._positions),
            slots=array(self._slots),
            sequence=array(self._sequence),
            enter=array(self._enter),
            leave=array(self._leave),
            page_tables=fill_page_table(page_tables, self._pages),
            seq_lens=np.array(self._seq_lens, dtype=np.int32),
            starts=np.array([*self._starts, len(self._positions)], dtype=np.int32),
            leave_alike=self._leave[0] if len(set(self._leave)) == 1 else 0,
            kept_at=self._kept_at(),
            cross=cross_rows(self._cross_pages, self._cross_lens) if self._cross_pages else None,
        )

    def _kept_at(self) -> int:
        enters = set(self._enter)
        if enters == {0}:
            return 0
        last = {start - 1 for start in [*self._starts[1:], len(self._enter)]}
        fresh = {row for row, enter in enumerate(self._enter) if not enter}
        enters.discard(0)
        return enters.pop() if len(enters) == 1 and fresh <= last else -1
