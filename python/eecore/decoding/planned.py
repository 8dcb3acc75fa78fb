"""Decoding by plans: which iterations can, the plans that were made, and what comes of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from eecore.decoding.decode_plan import (
    Control,
    Decoded,
    DecodeKind,
    DecodePlan,
    DecodeRow,
    OnHost,
    kind_of,
)
from eecore.decoding.outcome import Outcome
from eecore.decoding.runner import Runner
from eecore.decoding.sampling import needs_logits
from eecore.decoding.speculative_plan import (
    Round,
    SpeculativeKind,
    SpeculativePlan,
    SpeculativeRow,
    speculative_kind_of,
)
from eecore.decoding.twin_memory import HostSide
from eecore.exits import ConfidentExit, Exit, SelfSpeculative
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Sequence, SequenceStatus, TokenRecord

__all__ = ["Flight", "Plan", "PlannedDecoding", "on_host"]


class Plan(Protocol):
    """What decodes one iteration, once its rows are loaded."""

    def send(self) -> None:
        """Have its rows sent to the device, where a run may change what it was given."""
        ...

    def run(self, control: Control) -> None:
        """Everything from the first embedding to the last token."""
        ...

    def fetch(self) -> HostSide:
        """Have what it gave sent to the host."""
        ...


RunPlan = Callable[[Plan], None]


def on_host(plan: Plan) -> None:
    """Runs a plan call by call; the host looks at its flags."""
    plan.run(OnHost())


@dataclass(frozen=True)
class Flight:
    """An iteration that was launched; the device may still be at it."""

    works: list[Work]
    plan: Plan
    arrived: HostSide

    @property
    def is_over(self) -> bool:
        """Whether none of its sequences needs it any more."""
        return not any(work.sequence.status is SequenceStatus.RUNNING for work in self.works)

    @cached_property
    def rows(self) -> dict[Sequence, int]:
        """The plan's row for each sequence on board."""
        return {work.sequence: i for i, work in enumerate(self.works)}


class PlannedDecoding:
    """Plans by kind and size, made when they are first needed.

    Sizes are rounded up to powers of two, so that requests come and go without a new plan.

    Args:
        runner: the model and its KV cache.
        run: runs a plan.
        ahead: whether it is worth launching an iteration before the outcome of the last is known.
    """

    def __init__(self, runner: Runner, run: RunPlan, *, ahead: bool = False) -> None:
        self._runner = runner
        self.run_plan = run
        self.ahead = ahead
        self._plans: dict[tuple[DecodeKind, int, int, int], DecodePlan] = {}
        self._speculative: dict[tuple[SpeculativeKind, int, int, int, int], SpeculativePlan] = {}

    def launch(self, works: list[Work], after: Flight | None = None) -> Flight | None:
        """Start one iteration; None where it is none that a plan can do: nothing has happened then.

        Args:
            works: decoding sequences, each with pages for whatever the iteration computes.
            after: the flight that is still out, if any. Its sequences go on where it leaves them;
                that takes a plan of the same kind and size.
        """
        if any(work.is_prefill or needs_logits(work.sequence.sampling) for work in works):
            return None
        kinds = {_kind(work.sequence.exit, self._runner.num_layers) for work in works}
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is None:
            return None
        rows = [_Row(work, *_place(after, work.sequence)) for work in works]
        plan: DecodePlan | SpeculativePlan
        if isinstance(kind, DecodeKind):
            plan = self._decode_plan(kind, rows)
        else:
            plan = self._speculative_plan(kind, rows)
        if after is not None and after.plan is not plan:
            return None
        if isinstance(plan, DecodePlan):
            plan.load([row.decoding(plan.kind) for row in rows])
        else:
            plan.load([row.speculating() for row in rows])
        self.run_plan(plan)
        return Flight(works, plan, plan.fetch())

    def land(self, flight: Flight) -> list[Outcome]:
        """What a flight did for its sequences; those that have ended meanwhile are left out."""
        plan, works = flight.plan, flight.works
        landed = [
            (i, work)
            for i, work in enumerate(works)
            if work.sequence.status is SequenceStatus.RUNNING
        ]
        if isinstance(plan, SpeculativePlan):
            rounds = plan.rounds(flight.arrived, len(works))
            return [self._round(work, rounds[i]) for i, work in landed]
        assert isinstance(plan, DecodePlan)
        decoded = plan.decoded(flight.arrived, len(works))
        return [self._outcome(work, decoded, i) for i, work in landed]

    def _decode_plan(self, kind: DecodeKind, rows: list[_Row]) -> DecodePlan:
        key = kind, *self._size(rows, 1), _input_pages(rows)
        if key not in self._plans:
            self._plans[key] = DecodePlan(self._runner.model, self._runner.kv, *key)
        return self._plans[key]

    def _speculative_plan(self, kind: SpeculativeKind, rows: list[_Row]) -> SpeculativePlan:
        stops = _rounded_up(max(1, *(len(_stop_ids(row.sequence)) for row in rows)))
        key = kind, *self._size(rows, kind.num_drafts + 1), stops, _input_pages(rows)
        if key not in self._speculative:
            self._speculative[key] = SpeculativePlan(self._runner.model, self._runner.kv, *key)
        return self._speculative[key]

    def _size(self, rows: list[_Row], positions: int) -> tuple[int, int]:
        """Rows, and pages for an iteration's positions of each, both rounded up."""
        page_size = self._runner.kv.page_size
        if self.ahead:  # so that the iteration behind this one fits in the same plan
            positions *= 2
        most = max(row.sequence.num_tokens - 1 for row in rows) + positions
        held = max(len(row.sequence.pages) for row in rows)
        return _rounded_up(len(rows)), _rounded_up(max(held, -(-most // page_size)))

    def _round(self, work: Work, made: Round) -> Outcome:
        """As much of a round as stands; nothing is behind an accepted end of the text."""
        sequence, num_layers = work.sequence, self._runner.num_layers
        assert isinstance(sequence.exit, SelfSpeculative)
        depth, drafted, accepted = sequence.exit.exit_layer, len(made.drafts), made.num_accepted
        needs_next = not drafted or not sequence.stops_at(made.drafts[-1])
        has_next = accepted < drafted or needs_next
        computed = accepted + has_next
        outcome = Outcome(sequence, sequence.num_computed + computed)
        outcome.layers_run = (drafted + needs_next) * num_layers
        outcome.drafted, outcome.accepted = drafted, accepted
        outcome.kv_exit_layers = [num_layers] * computed
        for i, token in enumerate(made.target[:computed]):
            is_draft = i < accepted
            outcome.records.append(
                _record(
                    sequence,
                    token,
                    depth if is_draft else num_layers,
                    made.draft_confidences[i] if is_draft else made.confidences[i],
                    made.logprobs[i],
                )
            )
        return outcome

    def _outcome(self, work: Work, decoded: Decoded, index: int) -> Outcome:
        sequence, num_layers = work.sequence, self._runner.num_layers
        exit_layer = decoded.exit_layer[index]
        outcome = Outcome(sequence, sequence.num_computed + work.num_tokens)
        outcome.layers_run = exit_layer
        outcome.kv_exit_layers = [exit_layer]
        if isinstance(sequence.exit, ConfidentExit) and exit_layer < num_layers:
            outcome.layers_filled, outcome.fill_calls = num_layers - exit_layer, 1
        outcome.records = [
            _record(
                sequence,
                decoded.token[index],
                exit_layer,
                decoded.confidence[index],
                decoded.logprob[index],
            )
        ]
        return outcome


def _kind(policy: Exit, num_layers: int) -> DecodeKind | SpeculativeKind | None:
    if isinstance(policy, SelfSpeculative):
        return speculative_kind_of(policy)
    return kind_of(policy, num_layers)


def _record(
    sequence: Sequence, token: int, exit_layer: int, confidence: float, logprob: float
) -> TokenRecord:
    if sequence.sampling.logprobs is None:
        return TokenRecord(token, exit_layer, confidence)
    return TokenRecord(token, exit_layer, confidence, logprob, {})


@dataclass(frozen=True)
class _Row:
    """A sequence's place in the next iteration."""

    work: Work
    follows: int | None
    """Its row in the flight that is still out."""
    pending: int
    """Tokens that it gets from that flight at most."""

    @property
    def sequence(self) -> Sequence:
        return self.work.sequence

    def decoding(self, kind: DecodeKind) -> DecodeRow:
        """For a plan of this kind."""
        sequence = self.sequence
        policy, thresholds = sequence.exit, tuple[float, ...]()
        if isinstance(policy, ConfidentExit):
            t = len(sequence.output_ids) + self.pending
            most = sequence.sampling.max_tokens
            thresholds = tuple(policy.threshold_at(point, t, most) for point in kind.points)
        return DecodeRow(
            sequence.output_ids[-1],
            sequence.num_tokens - 1 + self.pending,
            sequence.pages,
            thresholds,
            self.follows,
            sequence.input_pages,
            len(sequence.input_ids or ()),
        )

    def speculating(self) -> SpeculativeRow:
        """For a speculative plan."""
        sequence = self.sequence
        assert isinstance(sequence.exit, SelfSpeculative)
        threshold = sequence.exit.draft_threshold
        return SpeculativeRow(
            sequence.output_ids[-1],
            sequence.num_tokens - 1,
            sequence.pages,
            self.work.max_drafts,
            sequence.tokens_left,
            -1.0 if threshold is None else threshold,
            _stop_ids(sequence),
            self.follows,
            sequence.input_pages,
            len(sequence.input_ids or ()),
        )


def _place(flight: Flight | None, sequence: Sequence) -> tuple[int | None, int]:
    """A sequence's row in a flight, and the tokens that it gets from it at most."""
    if flight is None or sequence not in flight.rows:
        return None, 0
    row = flight.rows[sequence]
    return row, flight.works[row].most_tokens


def _stop_ids(sequence: Sequence) -> list[int]:
    """Tokens that end a sequence's text."""
    stops = set(sequence.sampling.stop_token_ids)
    if not sequence.sampling.ignore_eos:
        stops |= sequence.eos_token_ids
    return sorted(stops)


def _input_pages(rows: list[_Row]) -> int:
    """Pages of the longest input, rounded up; 0 without an encoder."""
    most = max(len(row.sequence.input_pages) for row in rows)
    return _rounded_up(most) if most else 0


def _rounded_up(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
