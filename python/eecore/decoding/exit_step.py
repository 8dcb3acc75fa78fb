"""An exit step as a program: Full, FixedExit and ConfidentExit, mixed as data of the rows.

Every row goes through the same stretches of layers, one up to each exit point of any row. Data says
what is measured of a row there, and after which layer it exits at the latest. A row with a fixed
exit exits at its layer and fills nothing. (Early-exit framework §3, Algorithm 1; CALM §3.)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from math import isnan

import numpy as np
import torch
from torch import Tensor

from eecore import ops
from eecore.decoding.control import Control
from eecore.decoding.head_drafts import HeadKeys
from eecore.decoding.heads import KNOWN, HeadWork, head_fields, state_measure
from eecore.decoding.memory import STATE_COLUMNS, Array, Field, HostSide
from eecore.decoding.sampling import (
    DRAWS_TOKEN,
    NO_TOKEN,
    add_logprobs,
    sampling_rows,
)
from eecore.decoding.step import Sizes, Step, sizes_for, tapped_layers
from eecore.errors import NotFiniteError
from eecore.models import DraftHead, KVCache, LlamaModel, Network
from eecore.planning.draft_state import exit_thresholds
from eecore.planning.route import Check
from eecore.planning.row import Outcome, Row
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Counters, Sequence


@dataclass(frozen=True)
class ExitKind:
    """The key of a program: its calls, and the sizes of its memory."""

    points: tuple[tuple[int, tuple[Check, ...]], ...]
    """Exit points, ascending, with what is measured there; at the last one all rows exit."""
    fills: bool
    taps: tuple[int, ...]
    """Layers after which a draft head with layers of its own takes the states of all rows, which
    then all run to the last layer; () where none does.
    """
    sizes: Sizes


def exit_kind(
    rows: list[Row], *, page_size: int, ahead: bool, head: DraftHead | None = None
) -> ExitKind:
    """The program that these rows need, sizes rounded up; it writes keys for ``head`` where no row
    exits early.
    """
    checks: dict[int, set[Check]] = defaultdict(set)
    for route in dict.fromkeys(row.route for row in rows):
        checks[route.depth] |= set[Check]()
        if route.check is not None:
            for layer in (*route.points, *route.records):
                checks[layer].add(route.check)
    return ExitKind(
        tuple(
            (point, tuple(sorted(checks[point], key=lambda c: (c.measure, id(c.classifier)))))
            for point in sorted(checks)
        ),
        any(row.route.fills and row.route.points for row in rows),
        () if head is None or not all(row.route.fills_head for row in rows) else head.taps,
        sizes_for(rows, 1, page_size=page_size, ahead=ahead),
    )


class ExitStep(Step):
    """The steps of up to ``sizes.num_rows`` rows; the rows after them count as exited."""

    def __init__(self, model: Network, kv: KVCache, kind: ExitKind) -> None:
        self.kind = kind
        self._checks = [(point, check) for point, checks in kind.points for check in checks]
        for _, check in self._checks:
            if check.classifier is not None:
                check.classifier.on(model.device)  # a program cannot move it while it is recorded
            if check.measure == "cut":
                assert model.draft_head is not None
                model.draft_head.prepare_gap()  # copies rows, which a recorded program cannot
        num_rows = kind.sizes.num_rows
        super().__init__(model, kv, kind.sizes, self._given_fields(), self._result_fields())
        self.rows: list[Row] = []
        self._sequences: list[Sequence] = []
        self._thresholds_of: list[Row] | None = None  # whose constant thresholds are written
        self._changes = False  # whether some row's thresholds change
        self._counters: dict[tuple[int, int], Counters] = {}  # by exit layer and layers filled
        self._zeros = [0] * num_rows
        given = self._given.device
        self._keys = HeadKeys(model, kv, num_rows) if kind.taps else None
        memory = given | self._results.device
        memory["hidden"] = self.zeros(num_rows, model.config.hidden_size, dtype=model.dtype)
        memory["all_exited"] = self.zeros(1, dtype=torch.bool)
        names = ops.ExitingRows._fields
        self._rows = ops.ExitingRows(**{name: memory[name] for name in names})
        self._active, self._batch = self.active_rows(
            positions=given["open_positions"],
            slot_mapping=given["open_slots"],
            seq_lens=given["open_lens"],
        )

    def _given_fields(self) -> dict[str, Field]:
        num_rows = self.kind.sizes.num_rows
        row, states = (num_rows,), self.kind.sizes.has_states
        return {
            "positions": (torch.int64, row),
            "slots": (torch.int64, row),
            # Changed by a run as rows are accepted and exit.
            "open_positions": (torch.int64, row),
            "open_slots": (torch.int64, row),
            "open_lens": (torch.int32, row),
            "exited": (torch.bool, row),
            "accepted": (torch.bool, row),
            "measured_at": (torch.int32, row),
            "token_at": (torch.int32, row),
            "fill_from": (torch.int32, row),
            "thresholds": (torch.float32, (len(self._checks), num_rows)),
            "exit_after": (torch.int32, row),
            "together": (torch.bool, row),
            "fills": (torch.bool, row),
            **({"lens": (torch.int32, row)} if self.kind.taps or states else {}),
            **({"states": (torch.int32, (num_rows, STATE_COLUMNS))} if states else {}),
        }

    def _result_fields(self) -> dict[str, Field]:
        row = (self.kind.sizes.num_rows,)
        return {
            "exit_layer": (torch.int32, row),
            "pending": (torch.int32, row),
            "confidence": (torch.float32, row),
            **head_fields(self.kind.sizes.num_rows, self.kind.sizes.heads),
        }

    # Between runs

    def load(self, rows: list[Row]) -> None:
        """Load the rows that decode next: at most ``sizes.num_rows``."""
        self.rows, self._sequences = [], []  # until all is written
        self._host, self._fixed = self._given.host(), object()
        self._write_fixed(rows)
        sequences = [row.sequence for row in rows]
        self._write_state(rows, sequences, [row.position for row in rows])
        self.rows, self._sequences = rows, sequences

    def _write_fixed(self, rows: list[Row]) -> None:
        """Write the columns that are kept for the same rows."""
        self._thresholds_of = self._host.holds = None
        self._changes = any(row.route.changes for row in rows)
        self._write_rows(rows)
        routes = [row.route for row in rows]
        self._host.write(
            exit_after=[route.depth for route in routes],
            together=[route.together for route in routes],
            fills=[route.fills for route in routes],
        )
        self._host.holds = self._fixed

    def goes_on(self, rows: list[Row]) -> bool:
        """Load the rows of the last run again, each to continue after its token there.

        Returns:
            False, without any effect, where the rows are not the same, or no longer fit.
        """
        if self.sizes.follows or self._reads_text:
            return False
        sequences = [row.work.sequence for row in rows]
        if sequences != self._sequences:
            return False
        positions = []
        for sequence in sequences:
            if len(sequence.pages) > self.sizes.num_pages or sequence.is_masked:
                return False
            positions.append(sequence.num_computed)
        self._write_state(self.rows, sequences, positions)
        return True

    def follow(self, works: list[Work]) -> bool:
        """Load the rows of the run in flight again, each to continue after its one token there.

        Returns:
            False, without any effect, where the requests are not the same, no longer fit, or have
            thresholds that change.
        """
        sequences = [work.sequence for work in works]
        if not self.sizes.follows or sequences != self._sequences or self._changes:
            return False
        positions = []
        for sequence in sequences:
            if len(sequence.pages) > self.sizes.num_pages:
                return False
            positions.append(len(sequence.prompt_ids) + len(sequence.output_ids))
        if self._counts and not self._heads_fit(sequences):
            return False
        rows = self.rows
        self.rows, self._sequences = [], []  # until all is written
        rows = self._followers(rows)
        self._host = self._given.host()
        if self._host.holds is not self._fixed:
            self._write_fixed(rows)
        else:
            self._thresholds_of = rows
        self._write_state(rows, sequences, positions)
        self.rows, self._sequences = rows, sequences
        return True

    def _write_state(
        self, rows: list[Row], sequences: list[Sequence], positions: list[int]
    ) -> None:
        """Write the position of each row, and that it has not exited yet."""
        host, size = self._host, self._page_size
        tokens, pages, slots, lens = [], [], [], []
        for sequence, at in zip(sequences, positions, strict=True):
            own = sequence.pages
            tokens.append(sequence.output_ids[-1])
            pages.append(own)
            slots.append(own[at // size] * size + at % size)
            lens.append(at + 1)
        self._write_places(tokens, positions, slots, lens, self._zeros)
        states = [s.state_at for s in sequences] if self.sizes.has_states else None
        if self._keys is not None or states is not None:
            host.write(lens=lens)
        if states is not None:
            padding = [(0, 0)] * (self.sizes.num_rows - len(states))
            host.write(states=[*states, *padding])
        host.write_pages("open_page_table", pages, states)
        if self.sizes.num_input_pages:
            self._write_inputs(sequences, "open_")
        if self._checks:
            self._write_thresholds(host.arrays["thresholds"], rows)
        self.send()

    def _write_places(
        self,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        lens: list[int],
        measured_at: list[int],
    ) -> None:
        """Write the columns of rows that have not exited, to which padding is added."""
        zeros, num_rows, count = self._zeros, self.sizes.num_rows, len(tokens)
        exited = zeros
        if count < num_rows:  # the rest is padding: exited rows without slots
            num_padding = num_rows - count
            exited = [*zeros[:count], *[1] * num_padding]
            for column, padding in (tokens, 0), (positions, 0), (slots, -1), (lens, 1):
                column += [padding] * num_padding
        self._host.write_whole(
            row=range(num_rows),
            num_active=[count],
            token_ids=tokens,
            positions=positions,
            slots=slots,
            open_positions=positions,
            open_slots=slots,
            open_lens=lens,
            exited=exited,
            accepted=zeros,
            measured_at=measured_at,
            token_at=zeros,
            fill_from=[self._model.config.num_layers] * num_rows,
        )

    def _write_thresholds(self, thresholds: Array, rows: list[Row]) -> None:
        """Write the thresholds of every check: infinity where a row is not measured, 1 where it is
        measured only for the record.
        """
        if self._thresholds_of is rows:
            return
        self._thresholds_of = None
        thresholds[:] = np.inf
        for i, row in enumerate(rows):
            route, sequence = row.route, row.sequence
            if route.check is None:
                continue
            t = len(sequence.output_ids) + row.pending
            own = exit_thresholds(route, sequence, t)
            at = dict.fromkeys(route.records, 1.0) | dict(zip(route.points, own, strict=True))
            for k, (point, check) in enumerate(self._checks):
                if check == route.check and point in at:
                    thresholds[k, i] = at[point]
        if not self._changes:
            self._thresholds_of = rows

    # The program

    def run(self, control: Control) -> None:
        """Run one step, from the embeddings to the tokens and the filled keys and values."""
        given, results, rows = self._given.device, self._results.device, self._rows
        with control.rows(given["num_rows"]):
            if self.sizes.follows:
                last, sources = results["token"], given["sources"]
                hidden = self._model.embed(given["token_ids"], previous=last, sources=sources)
            else:
                hidden = self._model.embed(given["token_ids"])
        self._layers_to(0, 0, hidden, control)
        with control.rows(given["num_rows"]):
            work = None
            if self.sizes.heads.logits:
                work = HeadWork(sampling_rows(given), given["positions"], DRAWS_TOKEN)
            self._heads.run(rows.hidden, rows.pending, results, control, work)
            if self.kind.fills:
                texts = None
                if self.sizes.has_states:
                    texts = given["states"], given["lens"], self._batch.query_start_loc
                self._model.fill_kv(
                    rows.hidden, rows.fill_from, self._kv, given["positions"], given["slots"], texts
                )
            if self._keys is not None:
                batch = replace(  # as it was before the rows exited
                    self._batch,
                    positions=given["positions"],
                    slot_mapping=given["slots"],
                    seq_lens=given["lens"],
                )
                self._keys.fill(self._tapped, results["token"], batch)

    def _layers_to(self, index: int, begin: int, hidden: Tensor, control: Control) -> None:
        """Run the stretch up to exit point ``index``, its checks, and then the next stretch."""
        rows, active, model = self._rows, self._active, self._model
        end, checks = self.kind.points[index]
        with control.rows(active.num_active):
            previous, before = hidden, end - model.config.exit_layers.step
            if begin < before and any(check.measure == "state" for check in checks):
                previous = model.layers(begin, before, hidden, self._kv, self._batch)
                begin = before
            hidden, self._tapped = tapped_layers(
                model, begin, end, self.kind.taps, previous, self._kv, self._batch
            )
            is_last = index + 1 == len(self.kind.points)
            condition = None if is_last else control.condition(rows.all_exited)
            if not checks:
                ops.exit_rows(hidden, end, rows, active, condition=condition)
            for check in checks:
                decides = check is checks[-1]
                self._check(end, check, previous, hidden, control, condition, decide=decides)
            if is_last:
                return
            if control.compacts:
                ops.compact_rows(rows.exited, active, hidden)
        control.unless(
            rows.all_exited, lambda: self._layers_to(index + 1, end, hidden, control), condition
        )

    def _check(
        self,
        end: int,
        check: Check,
        previous: Tensor,
        hidden: Tensor,
        control: Control,
        condition: int | None,
        *,
        decide: bool,
    ) -> None:
        """Measure the rows with this check; with ``decide``, rows that may exit do so."""
        rows, active, model = self._rows, self._active, self._model
        thresholds = self._given.device["thresholds"][self._checks.index((end, check))]
        measure: ops.SoftmaxMeasure | ops.CosineMeasure | ops.MlpMeasure | None = None
        asked = head = confidence = None
        count = active.num_active
        if control.compacts and check.measure == "softmax":
            asked, count, states = ops.select_rows(
                hidden, row=active.row, thresholds=thresholds, accepted=rows.accepted
            )
            with control.rows(count):
                head = model.confidence(states)
        elif check.measure == "softmax":
            measure = model.measure
        elif check.measure == "cut":
            assert model.draft_head is not None
            confidence = model.draft_head.gap(hidden)
        elif check.measure == "gate":
            assert isinstance(model, LlamaModel)
            measure = model.gate
        else:
            measure = state_measure(check.classifier, previous)
        with control.rows(active.num_active, count):
            ops.exit_rows(
                hidden,
                end,
                rows,
                active,
                thresholds=thresholds,
                confidence=confidence,
                head=head,
                asked=asked,
                decide=decide,
                measure=measure,
                condition=condition if decide else None,
                cumulative=check.measure == "gate",
            )

    def _made(self) -> Tensor:
        return self._results.device["token"].unsqueeze(1)

    # Outcomes

    def outcomes(self, rows: list[tuple[int, Row]], arrived: HostSide) -> list[Outcome]:
        """Outcomes of some of the rows of a run; waits until the results have arrived."""
        got = arrived.wait().cells
        found = []
        for i, row in rows:
            sequence, route = row.work.sequence, row.route
            exit_layer, token = got["exit_layer"][i], got["token"][i]
            is_measured = got["pending"][i] == KNOWN
            if route.check is not None and route.check.measure != "softmax":
                is_measured = exit_layer in route.points or exit_layer in route.records
            confidence = got["confidence" if is_measured else "gap"][i]
            if route.check is not None and route.check.measure == "gate" and not is_measured:
                confidence = 1.0  # the last loop gets the remaining probability
            if token < 0 or isnan(got["logprob"][i]) or isnan(confidence):
                error = NotFiniteError(NO_TOKEN)
                found.append(Outcome(sequence, sequence.num_computed, error=error))
                continue
            filled = max(len(self._kv.layers) - exit_layer, 0) if route.fills else 0
            counters = self._counters.get((exit_layer, filled))
            if counters is None:
                counters = Counters(exit_layer, layers_filled=filled, fill_calls=int(filled > 0))
                self._counters[exit_layer, filled] = counters
            outcome = Outcome(
                sequence,
                sequence.num_computed + 1,
                [token],
                [exit_layer],
                [confidence],
                [exit_layer],
                counters,
            )
            if sequence.sampling.logprobs is not None:
                add_logprobs(outcome, got, i)
            found.append(outcome)
        return found
