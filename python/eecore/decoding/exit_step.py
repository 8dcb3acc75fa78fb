"""An exit step as a program: Full, FixedExit and ConfidentExit, mixed as data of the rows.

Every row goes through the same stretches of layers, one to each exit point of any of them. What a
row is asked there, and where it leaves at the latest, is data. A fixed exit is a row that leaves at
its layer and fills nothing. (Early-exit framework §3, Algorithm 1; CALM §3.)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eecore import ops
from eecore.decoding.control import Control
from eecore.decoding.heads import (
    GREEDY,
    KNOWN,
    LOGITS,
    Heads,
    HeadWork,
    head_fields,
    measure_states,
)
from eecore.decoding.memory import (
    Array,
    Field,
    HostSide,
    TwinMemory,
    cross_batch,
    cross_fields,
    input_pages,
    power_of_two,
)
from eecore.decoding.outcome import Outcome
from eecore.decoding.route import Check, Route
from eecore.decoding.sampling import (
    DRAWS_TOKEN,
    NO_TOKEN,
    HeadSizes,
    head_sizes,
    needs_logits,
    sampling_fields,
    sampling_rows,
    top_logprobs,
    write_sampling,
)
from eecore.models import AttentionBatch, KVCache, Network
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Counters, Sequence, TokenRecord

__all__ = ["ExitKind", "ExitRow", "ExitStep", "exit_kind"]


@dataclass(frozen=True)
class ExitRow:
    """One sequence of a step."""

    work: Work
    route: Route
    follows: int | None = None
    """Its row in the program's last run, with whose token it goes on; None: with its last one."""
    pending: int = 0
    """Tokens that it gets from that run."""

    @property
    def sequence(self) -> Sequence:
        return self.work.sequence

    @property
    def position(self) -> int:
        """Where its next key and value go."""
        return self.sequence.num_tokens - 1 + self.pending


@dataclass(frozen=True)
class ExitKind:
    """What makes a program: which calls it has, and for how much it has memory."""

    points: tuple[tuple[int, tuple[Check, ...]], ...]
    """Exit points, ascending, with what is measured there; at the last one everybody leaves."""
    fills: bool
    heads: HeadSizes
    follows: bool
    """Tokens may come from the run before."""
    num_rows: int
    num_pages: int
    num_input_pages: int


def exit_kind(rows: list[ExitRow], *, page_size: int, ahead: bool) -> ExitKind:
    """The program that these rows need, sizes rounded up."""
    sequences = [row.sequence for row in rows]
    checks: dict[int, set[Check]] = defaultdict(set)
    for route in dict.fromkeys(row.route for row in rows):
        leaves_with = set[Check]()
        if route.check is not None:
            for point in route.points:
                checks[point].add(route.check)
            if route.check.measure != "softmax":  # for the record; the head tells the softmax's
                leaves_with = {route.check}
        checks[route.depth] |= leaves_with
    # The run behind this one fits as well.
    most = max(sequence.num_tokens for sequence in sequences) + ahead
    pages = max(max(len(s.pages) for s in sequences), -(-most // page_size))
    return ExitKind(
        tuple(
            (point, tuple(sorted(checks[point], key=lambda c: (c.measure, id(c.classifier)))))
            for point in sorted(checks)
        ),
        any(row.route.fills and row.route.points for row in rows),
        head_sizes(sequences),
        ahead,
        power_of_two(len(rows)),
        power_of_two(pages),
        input_pages(sequences),
    )


class ExitStep:
    """The steps of up to ``kind.num_rows`` rows; those behind them have left from the start."""

    def __init__(self, model: Network, kv: KVCache, kind: ExitKind) -> None:
        self.kind = kind
        self._model, self._kv = model, kv
        self._checks = [(point, check) for point, checks in kind.points for check in checks]
        self._heads = Heads(model, kind.heads)
        device = model.device
        self._given = TwinMemory(device, self._given_fields())
        self._results = TwinMemory(device, self._result_fields())
        self._host = self._given.host()
        self.rows: list[ExitRow] = []
        self._sequences: list[Sequence] = []
        self._is_steady = False
        self._thresholds_of: list[ExitRow] | None = None  # whose lie there, and stay the same
        self._row_numbers = np.arange(kind.num_rows)
        given, results = self._given.device, self._results.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = kind.num_rows
        self._rows = ops.ExitingRows(
            leave_after=given["leave_after"],
            together=given["together"],
            fills=given["fills"],
            kind=given["kind"],
            accepted=given["accepted"],
            gone=given["gone"],
            exit_layer=results["exit_layer"],
            fill_from=given["fill_from"],
            measured_at=given["measured_at"],
            confidence=results["confidence"],
            token=results["token"],
            logprob=results["logprob"],
            token_at=given["token_at"],
            pending=results["pending"],
            hidden=zeros(rows, model.config.hidden_size, dtype=model.dtype),
            all_gone=zeros(1, dtype=torch.bool),
        )
        cross = cross_batch(given, "open_")
        self._active = ops.ActiveRows(
            row=given["row"],
            positions=given["open_positions"],
            slot_mapping=given["open_slots"],
            seq_lens=given["open_lens"],
            page_table=given["open_page_table"],
            num_active=given["num_active"],
            cross_page_table=None if cross is None else cross.page_table,
            cross_seq_lens=None if cross is None else cross.seq_lens,
        )
        self._batch = AttentionBatch(
            self._active.positions,
            self._active.slot_mapping,
            self._active.page_table,
            self._active.seq_lens,
            torch.arange(rows + 1, dtype=torch.int32, device=device),
            cross,
        )

    def _given_fields(self) -> dict[str, Field]:
        kind = self.kind
        row = (kind.num_rows,)
        return {
            "token_ids": (torch.int64, row),
            "sources": (torch.int32, row),
            "positions": (torch.int64, row),
            "slots": (torch.int64, row),
            "thresholds": (torch.float32, (len(self._checks), kind.num_rows)),
            "leave_after": (torch.int32, row),
            "together": (torch.bool, row),
            "fills": (torch.bool, row),
            "kind": (torch.int32, row),
            "num_rows": (torch.int32, (1,)),
            # What the step changes as rows are accepted and leave.
            "accepted": (torch.bool, row),
            "gone": (torch.bool, row),
            "fill_from": (torch.int32, row),
            "measured_at": (torch.int32, row),
            "token_at": (torch.int32, row),
            "row": (torch.int32, row),
            "open_positions": (torch.int64, row),
            "open_slots": (torch.int64, row),
            "open_lens": (torch.int32, row),
            "open_page_table": (torch.int32, (kind.num_rows, kind.num_pages)),
            "num_active": (torch.int32, (1,)),
            **cross_fields(kind.num_rows, kind.num_input_pages, "open_"),
            **sampling_fields(kind.num_rows, kind.heads),
        }

    def _result_fields(self) -> dict[str, Field]:
        row = (self.kind.num_rows,)
        return {
            "exit_layer": (torch.int32, row),
            "pending": (torch.int32, row),
            "confidence": (torch.float32, row),
            **head_fields(self.kind.num_rows, self.kind.heads),
        }

    # Between runs

    def load(self, rows: list[ExitRow]) -> None:
        """Say who decodes next: at most ``kind.num_rows`` rows."""
        kind = self.kind
        count, padding = len(rows), kind.num_rows - len(rows)
        self.rows, self._sequences = rows, [row.sequence for row in rows]
        self._is_steady = not kind.heads.logits
        host = self._host = self._given.host()
        sequences = self._sequences
        routes = [row.route for row in rows]
        host.write(
            leave_after=[route.depth for route in routes],
            together=[route.together for route in routes],
            fills=[route.fills for route in routes],
            kind=[LOGITS if needs_logits(s.sampling) else GREEDY for s in sequences],
            num_rows=[count],
            slots=[-1] * kind.num_rows,
            open_slots=[-1] * kind.num_rows,
            open_lens=[1] * kind.num_rows,
            gone=[False] * count + [True] * padding,
        )
        host.arrays["fill_from"][:] = self._model.config.num_layers
        if kind.follows:
            host.write(sources=[-1 if row.follows is None else row.follows for row in rows])
        if kind.heads.logits:
            write_sampling(host, sequences)
        self._write_state(sequences, [row.position for row in rows])

    def goes_on(self, works: list[Work]) -> bool:
        """Have the rows of the last run go on, each behind the token that it got there.

        False, and nothing has happened, where these works are not they, or do not fit any more.
        """
        rows = self.rows
        if self.kind.follows or not self._is_steady or len(works) != len(rows):
            return False
        sequences = [work.sequence for work in works]
        if any(work.is_prefill for work in works) or sequences != self._sequences:
            return False
        if max(len(sequence.pages) for sequence in sequences) > self.kind.num_pages:
            return False
        self._write_state(sequences, [sequence.num_computed for sequence in sequences])
        return True

    def _write_state(self, sequences: list[Sequence], positions: list[int]) -> None:
        """Where each row is, and that it has not left yet."""
        count, host = len(sequences), self._host
        arrays = host.arrays
        arrays["token_ids"][:count] = [sequence.output_ids[-1] for sequence in sequences]
        table = host.write_pages("open_page_table", [sequence.pages for sequence in sequences])
        at = np.array(positions)
        pages, offsets = np.divmod(at, self._kv.page_size)
        slots = table[self._row_numbers[:count], pages] * self._kv.page_size + offsets
        for prefix in ("", "open_"):
            arrays[f"{prefix}positions"][:count] = at
            arrays[f"{prefix}slots"][:count] = slots
        arrays["open_lens"][:count] = at + 1
        arrays["gone"][:count] = False
        if self.kind.fills:
            arrays["fill_from"][:count] = self._model.config.num_layers
        if self._checks or len(self.kind.points) > 1:
            for name in ("accepted", "measured_at", "token_at"):
                arrays[name][:count] = 0
        arrays["row"][:] = self._row_numbers
        arrays["num_active"][0] = count
        if self.kind.num_input_pages:
            inputs = [sequence.input_pages for sequence in sequences]
            host.write_pages("open_input_page_table", inputs)
            lens = [len(sequence.input_ids or ()) for sequence in sequences]
            arrays["open_input_lens"][:count] = lens
        if self._checks:
            self._write_thresholds(arrays["thresholds"], self.rows)
        self.send()

    def _write_thresholds(self, thresholds: Array, rows: list[ExitRow]) -> None:
        """Of every check; infinity where a row is not asked, 1 where it is for the record alone."""
        if self._thresholds_of is rows:
            return
        self._thresholds_of = None if any(row.route.decays for row in rows) else rows
        thresholds[:] = np.inf
        for i, row in enumerate(rows):
            route, sequence = row.route, row.sequence
            if route.check is None:
                continue
            t = len(sequence.output_ids) + row.pending
            at = dict(
                zip(route.points, route.thresholds(t, sequence.sampling.max_tokens), strict=True)
            )
            if route.check.measure != "softmax":
                at[route.depth] = 1.0
            for k, (point, check) in enumerate(self._checks):
                if check == route.check and point in at:
                    thresholds[k, i] = at[point]

    def send(self) -> None:
        """Have what was loaded sent to the device, once more where a run has changed it."""
        self._given.send(self._host)

    def fetch(self) -> HostSide:
        """Have what the last run gave sent to the host."""
        return self._results.fetch(is_read_first=not self.kind.follows)

    # The program

    def run(self, control: Control) -> None:
        """One step: everything from the embedding to tokens and filled keys and values."""
        given, results, rows = self._given.device, self._results.device, self._rows
        with control.rows(given["num_rows"]):
            if self.kind.follows:
                last, sources = results["token"], given["sources"]
                hidden = self._model.embed(given["token_ids"], previous=last, sources=sources)
            else:
                hidden = self._model.embed(given["token_ids"])
        self._layers_to(0, 0, hidden, control)
        with control.rows(given["num_rows"]):
            work = None
            if self.kind.heads.logits:
                work = HeadWork(sampling_rows(given), given["positions"], DRAWS_TOKEN)
            self._heads.run(rows.hidden, rows.pending, results, control, work)
            if self.kind.fills:
                self._model.fill_kv(
                    rows.hidden, rows.fill_from, self._kv, given["positions"], given["slots"]
                )

    def _layers_to(self, index: int, begin: int, hidden: Tensor, control: Control) -> None:
        """The stretch to exit point ``index``, the checks there, and what is behind it."""
        rows, active, model = self._rows, self._active, self._model
        end, checks = self.kind.points[index]
        with control.rows(active.num_active):
            previous = hidden
            if begin < end - 1 and any(check.measure == "state" for check in checks):
                previous = model.layers(begin, end - 1, hidden, self._kv, self._batch, few=True)
                begin = end - 1
            hidden = model.layers(begin, end, previous, self._kv, self._batch, few=True)
            if not checks:
                ops.exit_rows(hidden, end, rows, active)
            for check in checks:
                decide = check is checks[-1]
                self._check(end, check, previous, hidden, control, decide=decide)
            if index + 1 == len(self.kind.points):
                return
            if control.compacts:
                ops.compact_rows(rows.gone, active, hidden)
        control.unless(rows.all_gone, lambda: self._layers_to(index + 1, end, hidden, control))

    def _check(
        self,
        end: int,
        check: Check,
        previous: Tensor,
        hidden: Tensor,
        control: Control,
        *,
        decide: bool,
    ) -> None:
        """Measure the rows that ask for it; those that may leave do when ``decide``."""
        rows, active = self._rows, self._active
        thresholds = self._given.device["thresholds"][self._checks.index((end, check))]
        if check.measure != "softmax":
            confidence = measure_states(check.measure, check.classifier, previous, hidden)
            ops.exit_rows(
                hidden,
                end,
                rows,
                active,
                thresholds=thresholds,
                confidence=confidence,
                decide=decide,
            )
            return
        asked = None
        states, count = hidden, active.num_active
        if control.compacts:
            asked, count, states = ops.select_rows(
                hidden, row=active.row, thresholds=thresholds, accepted=rows.accepted
            )
        with control.rows(count):
            head = self._model.confidence(states)
        with control.rows(active.num_active, count):
            ops.exit_rows(
                hidden,
                end,
                rows,
                active,
                thresholds=thresholds,
                head=head,
                asked=asked,
                decide=decide,
            )

    # What came of it

    def outcomes(
        self, rows: list[tuple[int, ExitRow]], arrived: HostSide, count: int
    ) -> list[Outcome]:
        """Of some of the ``count`` rows of a run; waits for what was fetched to come."""
        got = arrived.wait().numbers(count)
        if min(got["token"], default=0) < 0:
            raise RuntimeError(NO_TOKEN)
        return [self._outcome(row, i, got) for i, row in rows]

    def _outcome(self, row: ExitRow, i: int, got: dict[str, list[Any]]) -> Outcome:
        sequence, route, num_layers = row.sequence, row.route, self._model.config.num_layers
        exit_layer = got["exit_layer"][i]
        is_measured = got["pending"][i] == KNOWN
        if route.check is not None and route.check.measure != "softmax":
            is_measured = exit_layer in route.points or exit_layer == route.depth
        confidence = got["confidence" if is_measured else "gap"][i]
        logprob = best = None
        if sequence.sampling.logprobs is not None:
            top = [got[name][i] if name in got else [] for name in ("top_ids", "top_logprobs")]
            logprob, best = top_logprobs(sequence.sampling.logprobs, got["logprob"][i], *top)
        counters = Counters(exit_layer)
        if route.fills and exit_layer < num_layers:
            counters.layers_filled, counters.fill_calls = num_layers - exit_layer, 1
        record = TokenRecord(got["token"][i], exit_layer, confidence, logprob, best)
        return Outcome(sequence, sequence.num_computed + 1, [record], [exit_layer], counters)
