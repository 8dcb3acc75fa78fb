"""Decoding by plans: which iterations can, the plans that were made, and what comes of one."""

from __future__ import annotations

from eecore.decoding.decode_plan import (
    Control,
    Decoded,
    DecodeKind,
    DecodePlan,
    DecodeRow,
    kind_of,
)
from eecore.decoding.outcome import Outcome
from eecore.engine.runner import Runner
from eecore.engine.sampling import needs_logits
from eecore.engine.scheduler import Work
from eecore.engine.sequence import Sequence, TokenRecord
from eecore.exits import ConfidentExit

__all__ = ["PlannedDecoding"]


class PlannedDecoding:
    """Plans by kind and size, made when they are first needed.

    Sizes are rounded up to powers of two, so that requests come and go without a new plan.
    """

    def __init__(self, runner: Runner, control: Control) -> None:
        self._runner = runner
        self._control = control
        self._plans: dict[tuple[DecodeKind, int, int], DecodePlan] = {}

    def run(self, works: list[Work]) -> list[Outcome] | None:
        """One iteration; None where it is none that a plan can do: nothing has happened then."""
        kind = self._common_kind(works)
        if kind is None:
            return None
        plan = self._plan_for(kind, works)
        plan.load([_row(kind, work.sequence) for work in works])
        plan.run(self._control)
        decoded = plan.decoded(len(works))
        return [self._outcome(work, decoded, i) for i, work in enumerate(works)]

    def _common_kind(self, works: list[Work]) -> DecodeKind | None:
        """The kind of all rows: greedy ones, each of which decodes one token."""
        for work in works:
            if work.is_prefill or work.max_drafts or needs_logits(work.sequence.sampling):
                return None
        kinds = {kind_of(work.sequence.exit, self._runner.num_layers) for work in works}
        return kinds.pop() if len(kinds) == 1 else None

    def _plan_for(self, kind: DecodeKind, works: list[Work]) -> DecodePlan:
        rows = _rounded_up(len(works))
        pages = _rounded_up(max(len(work.sequence.pages) for work in works))
        key = kind, rows, pages
        if key not in self._plans:
            self._plans[key] = DecodePlan(self._runner.model, self._runner.kv, kind, rows, pages)
        return self._plans[key]

    def _outcome(self, work: Work, decoded: Decoded, index: int) -> Outcome:
        sequence, num_layers = work.sequence, self._runner.num_layers
        exit_layer = decoded.exit_layer[index]
        asked = sequence.sampling.logprobs is not None
        outcome = Outcome(sequence, sequence.num_computed + work.num_tokens)
        outcome.layers_run = exit_layer
        outcome.kv_exit_layers = [exit_layer]
        if isinstance(sequence.exit, ConfidentExit) and exit_layer < num_layers:
            outcome.layers_filled, outcome.fill_calls = num_layers - exit_layer, 1
        outcome.records = [
            TokenRecord(
                decoded.token[index],
                exit_layer,
                decoded.confidence[index],
                decoded.logprob[index] if asked else None,
                {} if asked else None,
            )
        ]
        return outcome


def _row(kind: DecodeKind, sequence: Sequence) -> DecodeRow:
    policy, thresholds = sequence.exit, tuple[float, ...]()
    if isinstance(policy, ConfidentExit):
        t, most = len(sequence.output_ids), sequence.sampling.max_tokens
        thresholds = tuple(policy.threshold_at(point, t, most) for point in kind.points)
    last = sequence.output_ids[-1]
    return DecodeRow(last, sequence.num_tokens - 1, sequence.pages, thresholds)


def _rounded_up(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
