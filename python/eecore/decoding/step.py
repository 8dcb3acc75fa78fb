"""The common part of the programs of an iteration: rows, and memory of host and device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eecore import ops
from eecore.decoding.heads import GREEDY, LOGITS, Heads
from eecore.decoding.memory import (
    STATE_COLUMNS,
    Field,
    HostSide,
    TwinMemory,
    cross_batch,
    cross_fields,
    input_pages,
    power_of_two,
)
from eecore.decoding.sampling import (
    HeadSizes,
    follows_text,
    head_sizes,
    needs_logits,
    sampling_fields,
    write_sampling,
)
from eecore.models import AttentionBatch, KVCache, Network
from eecore.planning.row import Row
from eecore.scheduling.sequence import Sequence

# Programs have memory for at least this many pages of a sequence: this limits their number.
MIN_PAGES = 8


@dataclass(frozen=True)
class Sizes:
    """The sizes of a program's memory, and the heads that it calls."""

    num_rows: int
    num_pages: int
    num_input_pages: int
    heads: HeadSizes
    positions: int
    """Maximum number of positions that a run computes of a row."""
    follows: bool
    """Whether rows may continue after the previous run."""
    has_states: bool = False
    """Whether rows have states beside their pages."""

    @property
    def num_columns(self) -> int:
        """Columns of a page table: pages, then states."""
        return self.num_pages + (STATE_COLUMNS if self.has_states else 0)


def sizes_for(rows: list[Row], positions: int, *, page_size: int, ahead: bool) -> Sizes:
    """The sizes for these rows, rounded up.

    Args:
        rows: the rows of the first run.
        positions: maximum number of positions that a run computes of a row.
        page_size: slots of a page.
        ahead: whether a run begins before the host knows the last one.
    """
    sequences = [row.sequence for row in rows]
    # The run after this one fits as well.
    most = max(sequence.num_tokens for sequence in sequences) - 1 + positions * (1 + ahead)
    pages = max(max(len(sequence.pages) for sequence in sequences), -(-most // page_size))
    return Sizes(
        power_of_two(len(rows)),
        power_of_two(max(pages, MIN_PAGES)),
        input_pages(sequences),
        head_sizes(sequences, positions),
        positions,
        ahead,
        sequences[0].state > 0,
    )


def tapped_layers(
    model: Network,
    begin: int,
    end: int,
    taps: tuple[int, ...],
    hidden: Tensor,
    kv: KVCache,
    batch: AttentionBatch,
) -> tuple[Tensor, list[Tensor]]:
    """The residual stream after layers ``begin..end-1``, and after each of the taps among them.

    Without taps this is one call of the model.

    Args:
        begin: the first layer.
        end: the layer after the last one.
        taps: numbers of layers, ``begin`` to ``end``, in any order.
        hidden: [num_tokens, hidden_size], the residual stream before layer ``begin``.
        batch: how the rows attend.

    Returns:
        The state after the last layer, and the states after the taps in their order, each
        [num_tokens, hidden_size].
    """
    states = {begin: hidden}
    for stop in sorted({*taps, end} - {begin}):
        states[stop] = hidden = model.layers(begin, stop, hidden, kv, batch)
        begin = stop
    return hidden, [states[tap] for tap in taps]


class Step(ABC):
    """The runs of up to ``sizes.num_rows`` rows over memory at fixed addresses.

    Args:
        given: fields that the host writes for a run, in addition to those of every program.
        results: the result fields of a run.

    Attributes:
        num_bytes: bytes of the program's own memory, on host and device.
        has_run: whether the program has run at least once.
    """

    has_run = False

    def __init__(
        self,
        model: Network,
        kv: KVCache,
        sizes: Sizes,
        given: dict[str, Field],
        results: dict[str, Field],
    ) -> None:
        self.sizes = sizes
        self._model, self._kv, self._page_size = model, kv, kv.page_size
        self._heads = Heads(model, sizes.heads)
        num_rows, row = sizes.num_rows, (sizes.num_rows,)
        # Whether penalties count tokens of texts, and how many at most that only the device knows.
        self._counts = sizes.heads.seen > 0 or sizes.heads.generated > 0
        self._fresh = sizes.positions if sizes.follows and self._counts else 0
        shared: dict[str, Field] = {
            "sources": (torch.int32, row),
            "kind": (torch.int32, row),
            "num_rows": (torch.int32, (1,)),
            **sampling_fields(num_rows, sizes.heads, self._fresh),
            # Changed by a run as rows become inactive.
            "open_page_table": (torch.int32, (num_rows, sizes.num_columns)),
            **cross_fields(num_rows, sizes.num_input_pages, "open_"),
            "row": (torch.int32, row),
            # Written for each run, together with the fields that each program adds after these.
            "num_active": (torch.int32, (1,)),
            "token_ids": (torch.int64, row),
        }
        self._given = TwinMemory(model.device, shared | given)
        self._results = TwinMemory(model.device, results)
        self._host = self._given.host()
        self._fixed = object()  # identifies the columns that are kept for the same rows
        self._reads_text = False  # whether some row's settings change with its text
        self.num_bytes = self._given.num_bytes + self._results.num_bytes

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Zeros in memory of the program's own."""
        return self.unset(*shape, dtype=dtype).zero_()

    def unset(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory of the program's own that is not read before it is written."""
        memory = torch.empty(shape, dtype=dtype, device=self._model.device)
        self.num_bytes += memory.nbytes
        return memory

    def active_rows(self, **own: Tensor) -> tuple[ops.ActiveRows, AttentionBatch]:
        """The active rows, and how they attend; ``own``: their positions, slots and lengths, and
        each field that replaces one of the program's.
        """
        given = self._given.device
        cross = cross_batch(given, "open_")
        fields: dict[str, Any] = {
            "row": given["row"],
            "page_table": given["open_page_table"],
            "num_active": given["num_active"],
            "cross_page_table": None if cross is None else cross.page_table,
            "cross_seq_lens": None if cross is None else cross.seq_lens,
        }
        active = ops.ActiveRows(**fields | own)
        device = self._model.device
        starts = torch.arange(self.sizes.num_rows + 1, dtype=torch.int32, device=device)
        where = active.positions, active.slot_mapping, active.page_table, active.seq_lens
        states = self.states_in(active.page_table)
        return active, AttentionBatch(*where, starts, cross, states=states)

    def states_in(self, page_table: Tensor) -> Tensor | None:
        """The states of rows, as :class:`AttentionBatch` has them, beside their pages."""
        return page_table[:, -STATE_COLUMNS:] if self.sizes.has_states else None

    def _write_rows(self, rows: list[Row]) -> None:
        """Write the columns that are kept for the same rows."""
        sequences = [row.sequence for row in rows]
        self._reads_text = any(map(follows_text, sequences))
        self._host.write(
            kind=[LOGITS if needs_logits(s) else GREEDY for s in sequences],
            num_rows=[len(rows)],
        )
        if self.sizes.follows:
            self._host.write(sources=[-1 if row.follows is None else row.follows for row in rows])
        if self.sizes.heads.logits:
            write_sampling(self._host, sequences, [row.drafts for row in rows])

    def _followers(self, rows: list[Row]) -> list[Row]:
        """The rows of the last run, each of which now continues after its result there; the same
        list where the rows did so in the last run already.
        """
        if self._counts:
            self._fixed = object()  # the texts are longer now
        if [row.follows for row in rows] == list(range(len(rows))):
            return rows
        self._fixed = object()
        return [
            row._replace(drafts=(), follows=i, pending=row.most_tokens)
            for i, row in enumerate(rows)
        ]

    def _write_inputs(self, sequences: list[Sequence], prefix: str) -> None:
        """Write the places of the encoded inputs, with an encoder."""
        pages = [sequence.input_pages for sequence in sequences]
        self._host.write_pages(f"{prefix}input_page_table", pages)
        lens = [len(sequence.input_ids or ()) for sequence in sequences]
        self._host.write(**{f"{prefix}input_lens": lens})

    def _heads_fit(self, sequences: list[Sequence]) -> bool:
        """Whether the program has the heads that these requests need by now, and memory for all
        tokens that penalties count.
        """
        return head_sizes(sequences, self.sizes.positions) == self.sizes.heads

    def send(self) -> None:
        """Send what was loaded to the device, also again after a run has changed it."""
        self._given.send(self._host)
        if self._fresh:
            self._count_fresh()

    @torch.inference_mode()
    def _count_fresh(self) -> None:
        """Let penalties count the tokens of the run in flight, which only the device knows."""
        given, count = self._given.device, self._fresh
        sources = given["sources"].long().unsqueeze(1)
        tokens = self._made().gather(0, sources.clamp(min=0).expand(-1, count))
        for name in ("seen", "generated"):
            if name in given and given[name].shape[1]:
                given[name][:, -count:] = tokens.masked_fill(sources < 0, -1)

    @abstractmethod
    def _made(self) -> Tensor:
        """The tokens that the last run has made of each row, then -1: int64 [num_rows, count]."""

    def fetch(self) -> HostSide:
        """Send the results of the last run to the host."""
        return self._results.fetch(is_read_first=not self.sizes.follows)
