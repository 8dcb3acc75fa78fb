"""A pass over a looped model's layers in which each row is in a loop of its own.

A row whose token is made starts its next token in the next pass, while others go on with their next
loop. A row's loop is in its places: its slot and its pages are those of the loop, so its text is
the one that it gets alone. (The schedule is that of Schwethelm, Rueckert and Kaissis, arXiv
2608.09444, §3, who mix loops only where all of them share one cache.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from eecore import ops
from eecore.decoding.control import Control
from eecore.decoding.exit_step import ExitKind, ExitStep
from eecore.decoding.heads import HeadWork
from eecore.decoding.memory import HostSide
from eecore.decoding.sampling import DRAWS_TOKEN, sampling_rows
from eecore.decoding.step import sizes_for
from eecore.models import KVCache, LlamaModel, Network
from eecore.planning.draft_state import exit_thresholds
from eecore.planning.route import Check
from eecore.planning.row import Outcome, Row
from eecore.scheduling.sequence import Counters, Sequence

TRIAL_TOKENS = 8
"""Tokens of each row in a trial of a way."""
TURN_OF_THE_FASTER = 16
"""Trials that the faster way runs for until the other one is tried again."""


@dataclass(frozen=True)
class LoopKind(ExitKind):
    """The key of a program of one loop: its only exit point is the loop's end."""


class UnderWay(NamedTuple):
    """A row that goes on with its next loop."""

    place: int
    """The number of its row in the pass before."""
    loops: int
    """Loops that it has run."""
    confidence: float
    """The measure so far, which a gate's adds to."""
    position: int
    """The position of the token's keys."""
    pages: list[int]
    """The sequence's own list of pages. A sequence that has lost its pages, or got the token
    otherwise, does not go on here."""


class Race:
    """Which way is faster for the rows of a looped model, all in the same loop or each in its own:
    learnt as they run, since both give the same text.

    Rows in loops of their own read the weights less often, but the LM head, and the keys and values
    of skipped loops, in every pass: on a CPU that pays for large models and a few rows.

    Attributes:
        by_loops: the way to run next.
    """

    def __init__(self, num_rows: int) -> None:
        self.by_loops, self._is_trial = True, True
        self._trial = self._left = TRIAL_TOKENS * num_rows
        self._tokens, self._seconds = 0, 0.0
        self._rates: dict[bool, float] = {}

    def learn(self, tokens: int, seconds: float) -> None:
        """Count the tokens and the time of a run; at the end of a turn choose the way again."""
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        if self._tokens < self._left:
            return
        self._rates[self.by_loops] = self._tokens / self._seconds
        self._tokens, self._seconds = 0, 0.0
        if self._is_trial and len(self._rates) == 2:
            self.by_loops = self._rates[True] > self._rates[False]
            self._is_trial, self._left = False, TURN_OF_THE_FASTER * self._trial
        else:
            self.by_loops, self._is_trial, self._left = not self.by_loops, True, self._trial


def goes_by_loops(row: Row) -> bool:
    """Whether a row of a looped model may be in another loop than other rows."""
    return row.route.path is None and not row.route.together


def loop_kind(rows: list[Row], *, stack_size: int, page_size: int) -> LoopKind:
    """The program that these rows need, sizes rounded up."""
    checks: set[Check] = {row.route.check for row in rows if row.route.check is not None}
    in_order = tuple(sorted(checks, key=lambda c: (c.measure, id(c.classifier))))
    fills = any(row.route.fills and row.route.points for row in rows)
    sizes = sizes_for(rows, 1, page_size=page_size, ahead=False)
    return LoopKind(((stack_size, in_order),), fills, (), sizes)


class LoopStep(ExitStep):
    """One more loop of up to ``sizes.num_rows`` rows.

    Attributes:
        under_way: the rows of the last pass that have not made their token, by sequence.
    """

    def __init__(self, model: Network, kv: KVCache, kind: ExitKind) -> None:
        assert isinstance(model, LlamaModel)
        super().__init__(model, kv, kind)
        self._looped, self._stack = model, model.config.stack_size
        num_rows, size = kind.sizes.num_rows, model.config.hidden_size
        self._before = self.zeros(num_rows, size, dtype=model.dtype)
        self._after = self.zeros(num_rows, size, dtype=model.dtype)
        self._source = self._after
        """The states after the pass before."""
        self.under_way: dict[Sequence, UnderWay] = {}
        self._loops = [0] * num_rows

    # Between runs

    def take(self, last: LoopStep | None) -> None:
        """Take over the rows of another program's last pass, for the next load."""
        if last is not self:
            self.under_way = {} if last is None else last.under_way
            self._source = self._after if last is None else last._after

    def _write_state(
        self, rows: list[Row], sequences: list[Sequence], positions: list[int]
    ) -> None:
        """Write the place of each row in its loop, and that it has not exited yet."""
        last, self.under_way = self.under_way, {}
        source, self._source = self._source, self._after
        of_loop, stack, size = self._kv.loop_slots, self._stack, self._page_size
        loops, num_layers, confidences, kept = self._loops, len(self._kv.layers), [], []
        tokens, slots, lens, exit_after = [], [], [], []
        for i, (row, sequence, at) in enumerate(zip(rows, sequences, positions, strict=True)):
            before, own = last.get(sequence), sequence.pages
            if before is None or before.position != at or before.pages is not own:
                before = UnderWay(0, 0, 0.0, at, own)
            loops[i] = loop = before.loops
            kept.append(before.place)
            confidences.append(before.confidence)
            tokens.append(-1 if loop else sequence.output_ids[-1])
            slots.append(own[at // size] * size + at % size + loop * of_loop)
            lens.append(at + 1)
            exit_after.append(stack if row.route.depth <= (loop + 1) * stack else num_layers)
        count = len(rows)
        if any(loops[:count]):
            index = torch.tensor(kept, device=self._looped.device)
            with torch.inference_mode():
                torch.index_select(source, 0, index, out=self._before[:count])
        measured_at = [stack * (loop > 0) for loop in loops]
        self._write_places(tokens, positions, slots, lens, measured_at)
        host = self._host
        host.write(exit_after=exit_after)
        host.write_pages("open_page_table", [sequence.pages for sequence in sequences])
        offsets = np.array(loops[:count], dtype=np.int32) * self._kv.num_pages
        host.arrays["open_page_table"][:count] += offsets[:, None]
        if self._checks:
            self._write_checks(rows)
        self.send()
        results = self._results.host()
        results.write(exit_layer=self._zeros, pending=self._zeros, confidence=confidences)
        self._results.send(results)

    def _write_checks(self, rows: list[Row]) -> None:
        """Write the thresholds at the end of each row's loop."""
        thresholds = self._host.arrays["thresholds"]
        thresholds[:] = np.inf
        for i, row in enumerate(rows):
            route, end = row.route, (self._loops[i] + 1) * self._stack
            if route.check is None or end not in (*route.points, *route.records):
                continue
            threshold = 1.0  # for the record
            if end in route.points:
                sequence = row.sequence
                own = exit_thresholds(route, sequence, len(sequence.output_ids))
                threshold = own[route.points.index(end)]
            thresholds[self._checks.index((self._stack, route.check)), i] = threshold

    # The program

    def run(self, control: Control) -> None:
        """Run one pass, with the tokens, and the filled keys and values, of the rows that exit."""
        given, results, rows, model = (
            self._given.device,
            self._results.device,
            self._rows,
            self._looped,
        )
        [(end, checks)] = self.kind.points
        with control.rows(given["num_rows"]):
            before = model.embed(given["token_ids"], out=self._before)
            hidden = model.next_loop(before, self._kv, self._batch, out=self._after)
            if not checks:
                ops.exit_rows(hidden, end, rows, self._active)
            for check in checks:
                last = check is checks[-1]
                self._check(end, check, before, hidden, control, None, decide=last)
            work = None
            if self.sizes.heads.logits:
                work = HeadWork(sampling_rows(given), given["positions"], DRAWS_TOKEN)
            self._heads.run(rows.hidden, rows.pending, results, control, work)
            if self.kind.fills:
                model.fill_kv(
                    rows.hidden, rows.fill_from, self._kv, given["positions"], given["slots"]
                )

    # Outcomes

    def outcomes(self, rows: list[tuple[int, Row]], arrived: HostSide) -> list[Outcome]:
        """Outcomes of some of the rows of a pass, without tokens where a row has not exited; waits
        until the results have arrived.
        """
        got, loops = arrived.wait().cells, self._loops
        ended = [(i, row) for i, row in rows if got["exit_layer"][i]]
        for i, _ in ended:
            got["exit_layer"][i] = (loops[i] + 1) * self._stack
        outcomes = {outcome.sequence: outcome for outcome in super().outcomes(ended, arrived)}
        count = len(self.rows)
        counters = Counters(passes=1, rows_in_passes=count)
        for outcome in outcomes.values():
            outcome.counters = replace(outcome.counters, passes=1, rows_in_passes=count)
        for i, row in rows:
            sequence = row.work.sequence
            if sequence not in outcomes:
                outcomes[sequence] = Outcome(sequence, sequence.num_computed, counters=counters)
                self.under_way[sequence] = UnderWay(
                    i, loops[i] + 1, got["confidence"][i], sequence.num_computed, sequence.pages
                )
        return [outcomes[row.work.sequence] for _, row in rows]
