"""Decoding by plans: which iterations can, the plans that were made, and what comes of one."""

from __future__ import annotations

from collections.abc import Callable
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
from eecore.decoding.speculative_plan import (
    Round,
    SpeculativeKind,
    SpeculativePlan,
    SpeculativeRow,
    speculative_kind_of,
)
from eecore.engine.runner import Runner
from eecore.engine.sampling import needs_logits
from eecore.engine.scheduler import Work
from eecore.engine.sequence import Sequence, TokenRecord
from eecore.exits import ConfidentExit, Exit, SelfSpeculative

__all__ = ["PlannedDecoding", "on_host"]


class Plan(Protocol):
    """What decodes one iteration, once its rows are loaded."""

    def run(self, control: Control) -> None:
        """Everything from the first embedding to the last token."""
        ...


RunPlan = Callable[[Plan], None]


def on_host(plan: Plan) -> None:
    """Runs a plan call by call; the host looks at its flags."""
    plan.run(OnHost())


class PlannedDecoding:
    """Plans by kind and size, made when they are first needed.

    Sizes are rounded up to powers of two, so that requests come and go without a new plan.
    """

    def __init__(self, runner: Runner, run: RunPlan) -> None:
        self._runner = runner
        self.run_plan = run
        self._plans: dict[tuple[DecodeKind, int, int], DecodePlan] = {}
        self._speculative: dict[tuple[SpeculativeKind, int, int, int], SpeculativePlan] = {}

    def run(self, works: list[Work]) -> list[Outcome] | None:
        """One iteration; None where it is none that a plan can do: nothing has happened then."""
        if any(work.is_prefill or needs_logits(work.sequence.sampling) for work in works):
            return None
        kinds = {_kind(work.sequence.exit, self._runner.num_layers) for work in works}
        kind = kinds.pop() if len(kinds) == 1 else None
        if isinstance(kind, DecodeKind):
            return self._decode(kind, works)
        return None if kind is None else self._speculate(kind, works)

    def _decode(self, kind: DecodeKind, works: list[Work]) -> list[Outcome]:
        rows, pages = self._size(works, 1)
        plan = self._plans.get((kind, rows, pages))
        if plan is None:
            plan = DecodePlan(self._runner.model, self._runner.kv, kind, rows, pages)
            self._plans[kind, rows, pages] = plan
        plan.load([_row(kind, work.sequence) for work in works])
        self.run_plan(plan)
        decoded = plan.decoded(len(works))
        return [self._outcome(work, decoded, i) for i, work in enumerate(works)]

    def _speculate(self, kind: SpeculativeKind, works: list[Work]) -> list[Outcome]:
        given = [_speculative_row(work) for work in works]
        rows, pages = self._size(works, kind.num_drafts + 1)
        stops = _rounded_up(max(1, *(len(row.stop_ids) for row in given)))
        plan = self._speculative.get((kind, rows, pages, stops))
        if plan is None:
            runner = self._runner
            plan = SpeculativePlan(runner.model, runner.kv, kind, rows, pages, stops)
            self._speculative[kind, rows, pages, stops] = plan
        plan.load(given)
        self.run_plan(plan)
        rounds = plan.rounds(len(works))
        return [self._round(*each) for each in zip(works, rounds, strict=True)]

    def _size(self, works: list[Work], positions: int) -> tuple[int, int]:
        """Rows, and pages for so many positions of each, both rounded up."""
        page_size = self._runner.kv.page_size
        most = max(work.sequence.num_tokens - 1 + positions for work in works)
        held = max(len(work.sequence.pages) for work in works)
        return _rounded_up(len(works)), _rounded_up(max(held, -(-most // page_size)))

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


def _row(kind: DecodeKind, sequence: Sequence) -> DecodeRow:
    policy, thresholds = sequence.exit, tuple[float, ...]()
    if isinstance(policy, ConfidentExit):
        t, most = len(sequence.output_ids), sequence.sampling.max_tokens
        thresholds = tuple(policy.threshold_at(point, t, most) for point in kind.points)
    last = sequence.output_ids[-1]
    return DecodeRow(last, sequence.num_tokens - 1, sequence.pages, thresholds)


def _speculative_row(work: Work) -> SpeculativeRow:
    sequence = work.sequence
    assert isinstance(sequence.exit, SelfSpeculative)
    threshold = sequence.exit.draft_threshold
    stops = set(sequence.sampling.stop_token_ids)
    if not sequence.sampling.ignore_eos:
        stops |= sequence.eos_token_ids
    return SpeculativeRow(
        sequence.output_ids[-1],
        sequence.num_tokens - 1,
        sequence.pages,
        work.max_drafts,
        -1.0 if threshold is None else threshold,
        sorted(stops),
    )


def _rounded_up(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
