"""The rows of one pass: which token of which sequence, from which layer to which.

A row is one position of one sequence. Rows are sorted by sequence, then by position. A row enters
at layer ``enter`` (0: from the embedding; more: from a kept hidden state) and leaves after
``leave`` layers have run. Any subset of rows can be turned into an attention batch, which is how
rows drop out of the deeper layers and how a verification joins in the middle.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from eecore.models import AttentionBatch

__all__ = ["BoolArray", "Int64Array", "RowBuilder", "Rows"]

BoolArray = npt.NDArray[np.bool_]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


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

    def __len__(self) -> int:
        return len(self.positions)

    def attention_batch(self, index: Int64Array, device: torch.device) -> AttentionBatch:
        """The rows ``index`` (ascending), one ragged entry per run of consecutive positions."""
        positions, sequence = self.positions[index], self.sequence[index]
        breaks = np.flatnonzero(
            (sequence[1:] != sequence[:-1]) | (positions[1:] != positions[:-1] + 1)
        )
        starts = np.concatenate(([0], breaks + 1))
        ends = np.concatenate((breaks + 1, [len(index)]))
        query_start_loc = np.concatenate((starts, [len(index)])).astype(np.int32)
        seq_lens = (positions[ends - 1] + 1).astype(np.int32)

        def tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        return AttentionBatch(
            positions=tensor(positions),
            slot_mapping=tensor(self.slots[index]),
            page_table=tensor(self.page_tables[sequence[starts]]),
            seq_lens=tensor(seq_lens),
            query_start_loc=tensor(query_start_loc),
        )


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

    def add(
        self,
        token_ids: list[int],
        first_position: int,
        pages: list[int],
        *,
        enter: list[int],
        leave: list[int],
    ) -> slice:
        """Adds consecutive positions of one sequence; returns where its rows are."""
        start = len(self._positions)
        size = self.page_size
        positions = range(first_position, first_position + len(token_ids))
        self._token_ids += token_ids
        self._positions += positions
        self._slots += [pages[p // size] * size + p % size for p in positions]
        self._sequence += [len(self._pages)] * len(token_ids)
        self._enter += enter
        self._leave += leave
        self._pages.append(pages)
        return slice(start, len(self._positions))

    def build(self) -> Rows:
        width = max((len(pages) for pages in self._pages), default=0)
        page_tables = np.zeros((len(self._pages), width), dtype=np.int32)
        for row, pages in zip(page_tables, self._pages, strict=True):
            row[: len(pages)] = pages

        def array(values: list[int]) -> Int64Array:
            return np.asarray(values, dtype=np.int64)

        return Rows(
            token_ids=array(self._token_ids),
            positions=array(self._positions),
            slots=array(self._slots),
            sequence=array(self._sequence),
            enter=array(self._enter),
            leave=array(self._leave),
            page_tables=page_tables,
        )
