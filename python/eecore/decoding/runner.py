"""Runs rows through the layers: the one loop over stretches of layers that every mode shares.

Rows may enter and leave at any layer. A controller may make rows leave early; rows that leave early
can have the KV of their skipped layers filled, at once (a replay, whose later positions attend to
it) or in one call at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eecore.decoding.batch import BoolArray, Int64Array, Rows
from eecore.models import AttentionBatch, KVCache, Network, T5Model
from eecore.scheduling.sequence import Sequence

__all__ = ["ExitController", "Runner", "Sweep"]

NO_ROWS: Int64Array = np.empty(0, dtype=np.int64)


class ExitController(Protocol):
    """Decides, after some of the layers, who leaves; after the last one everybody does anyway."""

    @property
    def looks_after(self) -> Collection[int]:
        """The numbers of layers run at which :meth:`leaving` is asked."""
        ...

    @property
    def needs_previous(self) -> bool:
        """Whether it looks at the states of one layer earlier as well."""
        ...

    def leaving(
        self, layers_run: int, active: Int64Array, previous: Tensor, hidden: Tensor
    ) -> Int64Array:
        """The rows (a subset of ``active``) that leave now.

        Args:
            layers_run: how many layers have run.
            active: the rows behind ``hidden``, ascending.
            previous: [num_active, hidden_size], the states one layer earlier, when they are needed;
                states of an earlier layer when not.
            hidden: [num_active, hidden_size].
        """
        ...


@dataclass(frozen=True)
class Sweep:
    """What a pass gave."""

    hidden: Tensor
    """[num_rows, hidden_size]: each row's state when it left, before the final norm."""
    exit_layer: list[int]
    """[num_rows]: how many layers each row had behind it when it left."""
    layers_run: list[int]
    """[num_rows]: how many of them it ran in this pass."""
    captured: Tensor | None
    """[num_rows, hidden_size]: states after ``capture_after`` layers."""


class Runner:
    """A model and its KV cache."""

    def __init__(self, model: Network, kv: KVCache) -> None:
        self.model = model
        self.kv = kv
        self._on_cpu = model.device.type == "cpu"

    @property
    def num_layers(self) -> int:
        return self.model.config.num_layers

    @property
    def device(self) -> torch.device:
        return self.model.device

    def tensor(self, array: npt.NDArray[Any]) -> Tensor:
        """A host array on the model's device; on the CPU they share memory."""
        tensor = torch.from_numpy(array)
        return tensor if self._on_cpu else tensor.to(self.device)

    def encode(self, sequences: list[Sequence]) -> None:
        """Run the encoder on the inputs of sequences; what the decoder needs goes to their pages.

        Args:
            sequences: one or more, each with an input and pages for it.
        """
        assert isinstance(self.model, T5Model)
        inputs = [np.array(sequence.given_ids, dtype=np.int64) for sequence in sequences]
        size = self.kv.page_size
        slots = [
            np.array(sequence.input_pages)[at // size] * size + at % size
            for sequence, at in zip(sequences, map(np.arange, map(len, inputs)), strict=True)
        ]
        self.model.encode(
            self.tensor(np.concatenate(inputs)),
            list(map(len, inputs)),
            self.kv,
            self.tensor(np.concatenate(slots)),
        )

    def sweep(
        self,
        rows: Rows,
        *,
        entering: Tensor | None = None,
        controller: ExitController | None = None,
        fill_at_once: BoolArray | None = None,
        fill_at_end: BoolArray | None = None,
        skip_attention: frozenset[int] = frozenset(),
        skip_mlp: frozenset[int] = frozenset(),
        capture_after: int = 0,
    ) -> Sweep:
        """Run every row from its layer ``enter`` to its layer ``leave``.

        Args:
            rows: at least one.
            entering: [num_kept, hidden_size], states of the rows with ``enter > 0``, in row order.
            controller: may make rows leave before ``leave``.
            fill_at_once: [num_rows], rows whose skipped layers are filled when they leave.
            fill_at_end: [num_rows], rows whose skipped layers are filled by one call at the end.
            skip_attention: layers whose attention is left out.
            skip_mlp: layers whose MLP is left out.
            capture_after: keep the states after this many layers; 0 keeps none.
        """
        watched = controller is not None or fill_at_once is not None or fill_at_end is not None
        if rows.depth and not watched and capture_after in (0, rows.depth):
            return self._sweep_alike(rows, skip_attention, skip_mlp, capture_after)
        if rows.kept_at > 0 and rows.leave_alike and not (watched or capture_after):
            assert entering is not None
            return self._sweep_kept(rows, entering, skip_attention, skip_mlp)
        num_rows = len(rows)
        exit_layer = rows.leave.copy()
        final: Tensor | None = None
        captured: Tensor | None = None
        stops = self._stops(rows, controller, capture_after)
        if rows.depth:
            kept_rows, active = NO_ROWS, np.arange(num_rows)
        else:
            kept_rows = np.flatnonzero(rows.enter > 0)
            active = np.flatnonzero(rows.enter == stops[0])
        hidden = self._states(rows, active, entering, kept_rows)
        batch: AttentionBatch | None = (
            rows.whole_batch(self.tensor)
            if rows.depth
            else rows.attention_batch(active, self.tensor)
        )

        for begin, end in itertools.pairwise(stops):
            # Rows that come in here.
            coming = NO_ROWS
            if begin > stops[0] and not rows.depth:
                coming = np.flatnonzero(rows.enter == begin)
            if len(coming):
                states = self._states(rows, coming, entering, kept_rows)
                active, hidden = self._merge(active, hidden, coming, states)
                batch = rows.attention_batch(active, self.tensor)
            if batch is None:
                continue

            previous = hidden
            hidden = self.model.layers(
                begin,
                end,
                previous,
                self.kv,
                batch,
                skip_attention=skip_attention,
                skip_mlp=skip_mlp,
            )
            if end == capture_after:
                captured = hidden

            # Rows that leave behind this stretch, by plan or by the controller's word.
            if rows.leave_alike:
                leaving = active if end == rows.leave_alike else active[:0]
            else:
                leaving = active[rows.leave[active] == end]
            if controller is not None and end in controller.looks_after:
                early = controller.leaving(end, active, previous, hidden)
                if len(early):
                    exit_layer[early] = end
                    leaving = np.union1d(leaving, early) if len(leaving) else early
            if not len(leaving):
                continue
            if len(leaving) == num_rows:
                final = hidden
                active = active[:0]
            else:
                if final is None:
                    final = hidden.new_empty(num_rows, hidden.shape[1])
                is_leaving = np.zeros(num_rows, dtype=np.bool_)
                is_leaving[leaving] = True
                goes = is_leaving[active]
                stays = ~goes
                final[self.tensor(active[goes])] = hidden[self.tensor(np.flatnonzero(goes))]
                hidden = hidden[self.tensor(np.flatnonzero(stays))]
                active = active[stays]
            if fill_at_once is not None and end < self.num_layers:
                self._fill(rows, final, exit_layer, leaving[fill_at_once[leaving]])
            if len(active):
                batch = rows.attention_batch(active, self.tensor)
            elif rows.depth or not (rows.enter >= end).any():
                break
            else:
                batch = None

        assert final is not None
        if fill_at_end is not None:
            early = np.flatnonzero(fill_at_end & (exit_layer < self.num_layers))
            self._fill(rows, final, exit_layer, early)
        return Sweep(final, exit_layer.tolist(), (exit_layer - rows.enter).tolist(), captured)

    def _sweep_alike(
        self,
        rows: Rows,
        skip_attention: frozenset[int],
        skip_mlp: frozenset[int],
        capture_after: int,
    ) -> Sweep:
        """All rows from the embedding through the same layers, which nobody watches."""
        hidden = self.model.layers(
            0,
            rows.depth,
            self.model.embed(self.tensor(rows.token_ids)),
            self.kv,
            rows.whole_batch(self.tensor),
            skip_attention=skip_attention,
            skip_mlp=skip_mlp,
        )
        depths = [rows.depth] * len(rows)
        return Sweep(hidden, depths, depths, hidden if capture_after else None)

    def _sweep_kept(
        self,
        rows: Rows,
        entering: Tensor,
        skip_attention: frozenset[int],
        skip_mlp: frozenset[int],
    ) -> Sweep:
        """Kept states come in together, and with them the last rows that ran the layers before."""
        skips = {"skip_attention": skip_attention, "skip_mlp": skip_mlp}
        kept_at, leave, hidden = rows.kept_at, rows.leave_alike, entering
        last = np.flatnonzero(rows.enter == 0)
        if len(last):
            embedded = self.model.embed(self.tensor(rows.token_ids[last]))
            batch = rows.last_batch(last, self.tensor)
            fresh = self.model.layers(0, kept_at, embedded, self.kv, batch, **skips)
            if len(rows.seq_lens) == 1:
                hidden = torch.cat((entering, fresh))
            else:
                hidden = entering.new_empty(len(rows), entering.shape[1])
                hidden[self.tensor(np.flatnonzero(rows.enter))] = entering
                hidden[self.tensor(last)] = fresh
        batch = rows.whole_batch(self.tensor)
        hidden = self.model.layers(kept_at, leave, hidden, self.kv, batch, **skips)
        return Sweep(hidden, [leave] * len(rows), (leave - rows.enter).tolist(), None)

    def _stops(
        self, rows: Rows, controller: ExitController | None, capture_after: int
    ) -> list[int]:
        """The layers between which nothing happens to any row, from the first to the last."""
        stops = {0, rows.depth} if rows.depth else {*rows.enter.tolist(), *rows.leave.tolist()}
        first, last = min(stops), max(stops)
        stops.add(capture_after)
        if controller is not None:
            stops.update(controller.looks_after)
            if controller.needs_previous:
                stops.update(layers_run - 1 for layers_run in controller.looks_after)
        return sorted(stop for stop in stops if first <= stop <= last)

    def _states(
        self, rows: Rows, index: Int64Array, entering: Tensor | None, kept_rows: Int64Array
    ) -> Tensor:
        """The states with which rows come in: embeddings, or the kept ones."""
        if rows.enter[index[0]] == 0:
            token_ids = rows.token_ids if len(index) == len(rows) else rows.token_ids[index]
            return self.model.embed(self.tensor(token_ids))
        assert entering is not None
        return entering[self.tensor(np.searchsorted(kept_rows, index))]

    def _merge(
        self, active: Int64Array, hidden: Tensor, coming: Int64Array, states: Tensor
    ) -> tuple[Int64Array, Tensor]:
        """Rows and states of both groups, in row order."""
        if not len(active):
            return coming, states
        merged = np.concatenate((active, coming))
        order = np.argsort(merged)
        return merged[order], torch.cat((hidden, states))[self.tensor(order)]

    def _fill(self, rows: Rows, final: Tensor, exit_layer: Int64Array, index: Int64Array) -> None:
        """One kv_fill for rows ``index``, none when there are none."""
        if not len(index):
            return
        positions, slots = rows.positions, rows.slots
        if len(index) < len(rows):
            final, exit_layer = final[self.tensor(index)], exit_layer[index]
            positions, slots = positions[index], slots[index]
        self.model.fill_kv(
            final,
            self.tensor(exit_layer.astype(np.int32)),
            self.kv,
            self.tensor(positions),
            self.tensor(slots),
        )
