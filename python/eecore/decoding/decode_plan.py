"""One decoding iteration as a program over fixed memory, which a CUDA graph can capture.

Who decodes, where, and how sure it has to be is data in fixed tensors; the calls on them are the
same every time. Nothing is read back before the end: whether the next stretch of layers runs at all
is asked of a flag on the device, through a :class:`Control`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from eecore import ops
from eecore.decoding.batch import fill_page_table
from eecore.decoding.confident import accept_states, measure_states
from eecore.decoding.cross_memory import cross_batch, cross_fields, load_cross
from eecore.decoding.twin_memory import HostSide, TwinMemory
from eecore.exits import ConfidentExit, Exit, ExitClassifier, FixedExit, Full, Measure
from eecore.models import AttentionBatch, KVCache, Network

__all__ = [
    "Control",
    "DecodeKind",
    "DecodePlan",
    "DecodeRow",
    "OnHost",
    "kind_of",
    "take_over",
    "write_sources",
]


class Control(Protocol):
    """Decides on what only the device knows."""

    def unless(self, flag: Tensor, body: Callable[[], None]) -> None:
        """Run ``body`` if ``flag`` (bool [1]) is false by then; where it is true, it may run too:
        it has no effect then.
        """
        ...


class OnHost:
    """Waits for the device and looks: the plain way, and the oracle of the others."""

    def unless(self, flag: Tensor, body: Callable[[], None]) -> None:
        """See :class:`Control`."""
        if not flag.item():
            body()


@dataclass(frozen=True)
class DecodeKind:
    """What the rows of a plan have in common."""

    depth: int
    """Layers of a row that does not leave early."""
    points: tuple[int, ...] = ()
    """Exit points, ascending."""
    measure: Measure = "softmax"
    together: bool = False
    """Rows leave when all of them are accepted, none before."""
    classifier: ExitClassifier | None = None


@dataclass(frozen=True)
class DecodeRow:
    """One row of an iteration."""

    token_id: int
    position: int
    pages: list[int]
    thresholds: tuple[float, ...] = ()
    """At each exit point."""
    follows: int | None = None
    """The row of the plan's last iteration whose token it goes on with, instead of ``token_id``."""
    input_pages: list[int] = field(default_factory=list)
    input_len: int = 0
    """Tokens of the encoder's input."""


@dataclass(frozen=True)
class Decoded:
    """What an iteration gave, by row."""

    token: list[int]
    exit_layer: list[int]
    confidence: list[float]
    """As measured where the row left; of rows that nobody measures, the gap of the head."""
    logprob: list[float]


def kind_of(policy: Exit, num_layers: int) -> DecodeKind | None:
    """The kind of plan that a policy decodes with; None where a plan cannot."""
    if isinstance(policy, Full):
        return DecodeKind(num_layers)
    if isinstance(policy, FixedExit):
        return DecodeKind(policy.exit_layer)
    if isinstance(policy, ConfidentExit):
        points = tuple(sorted(policy.points(num_layers)))
        together = policy.batch == "all"
        return DecodeKind(num_layers, points, policy.measure, together, policy.classifier)
    return None


def write_sources(sources: Tensor, follows: list[int | None]) -> None:
    """Where :func:`take_over` finds each row's value, on the host; the rest is fresh."""
    num_rows = len(sources)
    given = [num_rows + i if j is None else j for i, j in enumerate(follows)]
    sources.numpy()[:] = [*given, *range(num_rows + len(given), 2 * num_rows)]


def take_over(last: Tensor, fresh: Tensor, sources: Tensor) -> Tensor:
    """Each row's value, of the last iteration or fresh from the host: [num_rows]."""
    return torch.cat((last, fresh)).index_select(0, sources)


class DecodePlan:
    """The iterations of up to ``num_rows`` rows of one kind.

    Fewer rows are padded by rows that have left from the start and write no keys or values.
    """

    def __init__(
        self,
        model: Network,
        kv: KVCache,
        kind: DecodeKind,
        num_rows: int,
        max_pages: int,
        max_input_pages: int = 0,
    ) -> None:
        self.kind = kind
        self.num_rows = num_rows
        self._model = model
        self._kv = kv
        device, row = model.device, (num_rows,)
        self._given = TwinMemory(
            device,
            {
                "token_ids": (torch.int64, row),
                "sources": (torch.int64, row),
                "positions": (torch.int64, row),
                "slots": (torch.int64, row),
                "page_table": (torch.int32, (num_rows, max_pages)),
                "thresholds": (torch.float32, (len(kind.points), num_rows)),
                # What the iteration changes as rows are accepted and leave.
                "status": (torch.bool, row),
                "gone": (torch.bool, row),
                "open_slots": (torch.int64, row),
                "open_lens": (torch.int32, row),
                **cross_fields(num_rows, max_input_pages),
            },
        )
        self._loaded = self._given.host()
        self._results = TwinMemory(
            device,
            {
                "token": (torch.int64, row),
                "exit_layer": (torch.int32, row),
                "confidence": (torch.float32, row),
                "logprob": (torch.float32, row),
            },
        )
        given, results = self._given.device, self._results.device
        with_head = kind.measure == "softmax"
        shape = num_rows, model.config.hidden_size
        self._rows = ops.ExitingRows(
            given["gone"],
            given["open_slots"],
            given["open_lens"],
            torch.zeros(shape, dtype=model.dtype, device=device),
            results["confidence"],
            results["exit_layer"],
            results["token"] if with_head else None,
            results["logprob"] if with_head else None,
        )
        self._accepted_at = torch.zeros(num_rows, dtype=torch.int32, device=device)
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._batch = AttentionBatch(
            given["positions"],
            self._rows.slot_mapping,
            given["page_table"],
            self._rows.seq_lens,
            starts,
            cross_batch(given),
        )

    def load(self, rows: list[DecodeRow]) -> None:
        """Say who decodes next: at most ``num_rows`` rows."""
        self._loaded = self._given.host()
        size, given = self._kv.page_size, self._loaded.tensors
        padding = self.num_rows - len(rows)
        positions = [row.position for row in rows]
        slots = [
            row.pages[p // size] * size + p % size for row, p in zip(rows, positions, strict=True)
        ]
        for name, values, filler in (
            ("token_ids", [row.token_id for row in rows], 0),
            ("positions", positions, 0),
            ("slots", slots, -1),
            ("open_slots", slots, -1),
            ("open_lens", [p + 1 for p in positions], 1),
            ("status", [False] * len(rows), True),
            ("gone", [False] * len(rows), True),
        ):
            given[name].numpy()[:] = values + [filler] * padding
        write_sources(given["sources"], [row.follows for row in rows])
        fill_page_table(given["page_table"].numpy(), [row.pages for row in rows])
        load_cross(given, [row.input_pages for row in rows], [row.input_len for row in rows])
        thresholds = given["thresholds"].numpy()
        thresholds[:] = np.inf
        for i, row in enumerate(rows):
            thresholds[:, i] = row.thresholds
        self.send()

    def send(self) -> None:
        """Have what was loaded sent to the device, once more where an iteration has changed it."""
        self._given.send(self._loaded)

    def run(self, control: Control) -> None:
        """One iteration: everything from the embedding to tokens and filled keys and values."""
        given, results = self._given.device, self._results.device
        token_ids = take_over(results["token"], given["token_ids"], given["sources"])
        self._layers_from(0, 0, self._model.embed(token_ids), control)
        rows = self._rows
        if rows.token is None:
            head = self._model.confidence(rows.hidden)
            results["token"].copy_(head.token)
            torch.sub(head.top_logit, head.logsumexp, out=results["logprob"])
        if self.kind.points:
            self._model.fill_kv(
                rows.hidden, rows.exit_layer, self._kv, given["positions"], given["slots"]
            )

    def fetch(self) -> HostSide:
        """Have what the last iteration gave sent to the host."""
        return self._results.fetch()

    def decoded(self, side: HostSide, count: int) -> Decoded:
        """Of the first ``count`` rows; waits for what was fetched to come."""
        return Decoded(**{name: t[:count].tolist() for name, t in side.wait().tensors.items()})

    def _layers_from(self, begin: int, index: int, hidden: Tensor, control: Control) -> None:
        """The stretch to exit point ``index``, the check there, and what is behind it."""
        kind = self.kind
        is_last = index == len(kind.points)
        end = kind.depth if is_last else kind.points[index]
        previous = hidden
        if kind.measure == "state":
            previous = self._model.layers(begin, end - 1, hidden, self._kv, self._batch)
            begin = end - 1
        hidden = self._model.layers(begin, end, previous, self._kv, self._batch)
        if is_last:
            confidence, head = self._measure(previous, hidden)
            ops.exit_rows(hidden, confidence, end, self._rows, head=head)
            return
        confidence, head, mask = self._accept(index, previous, hidden)
        accepted = mask.all_accepted if kind.together else self._given.device["status"]
        ops.exit_rows(hidden, confidence, end, self._rows, accepted=accepted, head=head)
        control.unless(
            mask.all_accepted, lambda: self._layers_from(end, index + 1, hidden, control)
        )

    def _measure(
        self, previous: Tensor, hidden: Tensor
    ) -> tuple[Tensor, ops.SoftmaxConfidence | None]:
        """The confidence of every row, and what the head gives where that is what measures."""
        kind = self.kind
        if kind.measure == "softmax":
            head = self._model.confidence(hidden)
            return head.confidence, head
        return measure_states(kind.measure, kind.classifier, previous, hidden), None

    def _accept(
        self, index: int, previous: Tensor, hidden: Tensor
    ) -> tuple[Tensor, ops.SoftmaxConfidence | None, ops.AcceptMask]:
        """The same at an exit point, and who is accepted there."""
        kind, given = self.kind, self._given.device
        accept = ops.AcceptRows(
            given["thresholds"][index], kind.points[index], given["status"], self._accepted_at
        )
        if kind.measure == "softmax":
            head = self._model.confidence(hidden)
            return head.confidence, head, ops.accept_mask(head.confidence, *accept)
        confidence, mask = accept_states(kind.measure, kind.classifier, previous, hidden, accept)
        return confidence, None, mask
