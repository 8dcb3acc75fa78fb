"""Confident exit inside a pass: measure, accept, leave. (Early-exit framework, Algorithm 1.)"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eecore import ops
from eecore.engine.batch import BoolArray, Int64Array
from eecore.engine.runner import Runner
from eecore.engine.sequence import Sequence
from eecore.exits import ConfidentExit

__all__ = ["ConfidentController", "measure_states"]

NEVER = float("inf")


@dataclass(frozen=True)
class ConfidentRow:
    """One decoding row under ConfidentExit."""

    row: int
    sequence: Sequence
    policy: ConfidentExit
    points: frozenset[int]


class ConfidentController:
    """Sticky acceptance of the confident rows of one pass.

    Rows with ``batch="each"`` leave when they are accepted. Rows with ``batch="all"`` leave
    together, at the first exit point at which all of them are accepted.
    """

    def __init__(self, runner: Runner, rows: list[tuple[int, Sequence]]) -> None:
        self._runner = runner
        num_layers = runner.num_layers
        self._rows = []
        for row, sequence in rows:
            assert isinstance(sequence.exit, ConfidentExit)
            points = sequence.exit.points(num_layers)
            self._rows.append(ConfidentRow(row, sequence, sequence.exit, points))
        count = len(rows)
        self._kinds = {_kind(row.policy) for row in self._rows}
        measures = {measure for measure, _ in self._kinds}
        self.needs_previous = "state" in measures
        self.looks_after: frozenset[int] = frozenset().union(*(row.points for row in self._rows))
        if measures != {"softmax"}:  # for the record of rows that go through all layers
            self.looks_after |= {num_layers}
        self._status = torch.zeros(count, dtype=torch.bool, device=runner.device)
        self._exit_layer = torch.full((count,), num_layers, dtype=torch.int32, device=runner.device)
        self._accepted: BoolArray = np.zeros(count, dtype=np.bool_)
        self._together: BoolArray = np.array(
            [row.policy.batch == "all" for row in self._rows], dtype=np.bool_
        )
        self._gone: BoolArray = np.zeros(count, dtype=np.bool_)
        self.measured: dict[int, float] = {}
        """Confidence by row, as last measured."""
        self.measured_at: dict[int, int] = {}
        """Exit layer of that measurement, by row."""
        self.tokens: dict[int, tuple[int, float, float]] = {}
        """(token, gap, log-probability) by row, when its last measurement ran the head."""

    def leaving(
        self, layers_run: int, active: Int64Array, previous: Tensor, hidden: Tensor
    ) -> Int64Array:
        """See :class:`eecore.engine.runner.ExitController`."""
        none = np.empty(0, dtype=np.int64)
        if layers_run == self._runner.num_layers:
            self._observe(layers_run, ~self._gone, active, previous, hidden)
            return none
        asked = [
            i
            for i, row in enumerate(self._rows)
            if layers_run in row.points and not self._accepted[i]
        ]
        if not asked:
            return none
        confidence = self._measure(layers_run, asked, active, previous, hidden)
        thresholds = [NEVER] * len(self._rows)
        for i in asked:
            row = self._rows[i]
            thresholds[i] = row.policy.threshold_at(
                layers_run, len(row.sequence.output_ids), row.sequence.sampling.max_tokens
            )
        ops.accept_mask(
            confidence,
            torch.tensor(thresholds, dtype=torch.float32, device=confidence.device),
            layers_run,
            self._status,
            self._exit_layer,
        )
        self._accepted = self._status.cpu().numpy().copy()

        goes = self._accepted & ~self._together & ~self._gone
        if self._together.any() and self._accepted[self._together].all():
            goes |= self._together & ~self._gone
        self._gone |= goes
        self._observe(layers_run, goes, active, previous, hidden)
        return np.array([self._rows[i].row for i in np.flatnonzero(goes)], dtype=np.int64)

    def _observe(
        self,
        layers_run: int,
        who: BoolArray,
        active: Int64Array,
        previous: Tensor,
        hidden: Tensor,
    ) -> None:
        """Measure rows that emit from here but were not measured here, for the record.

        The softmax gap needs no extra pass: the head that gives the token tells it.
        """
        asked = [
            i
            for i in np.flatnonzero(who).tolist()
            if self._rows[i].policy.measure != "softmax"
            and self.measured_at.get(self._rows[i].row) != layers_run
        ]
        if asked:
            self._measure(layers_run, asked, active, previous, hidden)

    def _measure(
        self,
        layers_run: int,
        asked: list[int],
        active: Int64Array,
        previous: Tensor,
        hidden: Tensor,
    ) -> Tensor:
        """float32 [num_rows of the controller]: NaN where not asked."""
        policy = self._rows[asked[0]].policy
        if len(asked) == len(self._rows) == len(active) and len(self._kinds) == 1:
            return self._measure_group(policy, active, previous, hidden, layers_run)
        confidence = torch.full(
            (len(self._rows),), torch.nan, dtype=torch.float32, device=self._runner.device
        )
        by_policy: dict[tuple[str, int], list[int]] = {}
        for i in asked:
            policy = self._rows[i].policy
            by_policy.setdefault(_kind(policy), []).append(i)
        for group in by_policy.values():
            rows = np.array([self._rows[i].row for i in group], dtype=np.int64)
            at = self._runner.tensor(np.searchsorted(active, rows))
            policy = self._rows[group[0]].policy
            earlier = previous[at] if self.needs_previous else previous
            values = self._measure_group(policy, rows, earlier, hidden[at], layers_run)
            confidence[self._runner.tensor(np.asarray(group, dtype=np.int64))] = values
        return confidence

    def _measure_group(
        self,
        policy: ConfidentExit,
        rows: Int64Array,
        previous: Tensor,
        hidden: Tensor,
        layers_run: int,
    ) -> Tensor:
        """float32 [num_rows] of rows with one measure; ``hidden`` holds these rows alone."""
        if policy.measure != "softmax":
            confidence = measure_states(policy, previous, hidden)
            gaps = confidence.tolist()
        else:
            got = self._runner.model.confidence(hidden)
            confidence, gaps = got.confidence, got.confidence.tolist()
            told = (got.token.tolist(), gaps, got.top_logit.tolist(), got.logsumexp.tolist())
            for row, token, gap, logit, logsumexp in zip(rows.tolist(), *told, strict=True):
                self.tokens[row] = (token, gap, logit - logsumexp)
        for row, value in zip(rows.tolist(), gaps, strict=True):
            self.measured[row], self.measured_at[row] = value, layers_run
        return confidence


def _kind(policy: ConfidentExit) -> tuple[str, int]:
    """What policies share whose rows can be measured by one call."""
    return policy.measure, id(policy.classifier)


def measure_states(policy: ConfidentExit, previous: Tensor, hidden: Tensor) -> Tensor:
    """The ``state`` or ``classifier`` measure of [num_rows, hidden_size]: float32 [num_rows]."""
    if policy.measure == "state":
        return ops.exit_confidence_cosine(previous, hidden)
    assert policy.classifier is not None
    m = policy.classifier.on(hidden.device)
    return ops.exit_confidence_mlp(hidden, m.weight1, m.bias1, m.weight2, m.bias2)
