"""Confident exit inside a pass: measure, accept, leave. (Early-exit framework, Algorithm 1.)"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from eecore import ops
from eecore.decoding.batch import Int64Array
from eecore.decoding.runner import Runner
from eecore.exits import ConfidentExit, ExitClassifier, Measure
from eecore.scheduling.sequence import Sequence

__all__ = ["ConfidentController", "accept_states", "measure_states"]

NOBODY: Int64Array = np.empty(0, dtype=np.int64)


@dataclass
class ConfidentRow:
    """One decoding row under ConfidentExit."""

    row: int
    sequence: Sequence
    policy: ConfidentExit
    points: frozenset[int]
    is_accepted: bool = False
    is_gone: bool = False

    def accepts(self, confidence: float, layers_run: int) -> bool:
        """Whether a confidence (float32, as the threshold is then) is enough at an exit point."""
        sampling = self.sequence.sampling
        threshold = self.policy.threshold_at(
            layers_run, len(self.sequence.output_ids), sampling.max_tokens
        )
        return threshold < 1.0 and confidence >= float(np.float32(threshold))


class ConfidentController:
    """Sticky acceptance of the confident rows of one pass.

    Rows with ``batch="each"`` leave when they are accepted. Rows with ``batch="all"`` leave
    together, at the first exit point at which all of them are accepted. The confidences go to the
    host for the record of each token, so they are compared there.
    """

    def __init__(self, runner: Runner, rows: list[tuple[int, Sequence]]) -> None:
        self._runner = runner
        num_layers = runner.num_layers
        self._rows = []
        for row, sequence in rows:
            assert isinstance(sequence.exit, ConfidentExit)
            points = sequence.exit.points(num_layers)
            self._rows.append(ConfidentRow(row, sequence, sequence.exit, points))
        self._together = [row for row in self._rows if row.policy.batch == "all"]
        self._kinds = {_kind(row.policy) for row in self._rows}
        measures = {measure for measure, _ in self._kinds}
        self.needs_previous = "state" in measures
        self.looks_after: frozenset[int] = frozenset().union(*(row.points for row in self._rows))
        if measures != {"softmax"}:  # for the record of rows that go through all layers
            self.looks_after |= {num_layers}
        self.measured: dict[int, float] = {}
        """Confidence by row, as last measured."""
        self.measured_at: dict[int, int] = {}
        """Exit layer of that measurement, by row."""
        self.tokens: dict[int, tuple[int, float, float]] = {}
        """(token, gap, log-probability) by row, when its last measurement ran the head."""

    def leaving(
        self, layers_run: int, active: Int64Array, previous: Tensor, hidden: Tensor
    ) -> Int64Array:
        """See :class:`eecore.decoding.runner.ExitController`."""
        if layers_run == self._runner.num_layers:
            through = [row for row in self._rows if not row.is_gone]
            self._observe(layers_run, through, active, previous, hidden)
            return NOBODY
        asked = [row for row in self._rows if not row.is_accepted and layers_run in row.points]
        if not asked:
            return NOBODY
        self._measure(layers_run, asked, active, previous, hidden)
        for row in asked:
            row.is_accepted = row.accepts(self.measured[row.row], layers_run)

        go_together = all(row.is_accepted for row in self._together)
        goes = [
            row
            for row in self._rows
            if row.is_accepted and not row.is_gone and (go_together or row.policy.batch == "each")
        ]
        for row in goes:
            row.is_gone = True
        self._observe(layers_run, goes, active, previous, hidden)
        return _numbers(goes) if goes else NOBODY

    def _observe(
        self,
        layers_run: int,
        who: list[ConfidentRow],
        active: Int64Array,
        previous: Tensor,
        hidden: Tensor,
    ) -> None:
        """Measure rows that emit from here but were not measured here, for the record.

        The softmax gap needs no extra pass: the head that gives the token tells it.
        """
        asked = [
            row
            for row in who
            if row.policy.measure != "softmax" and self.measured_at.get(row.row) != layers_run
        ]
        if asked:
            self._measure(layers_run, asked, active, previous, hidden)

    def _measure(
        self,
        layers_run: int,
        asked: list[ConfidentRow],
        active: Int64Array,
        previous: Tensor,
        hidden: Tensor,
    ) -> None:
        """Measure rows behind ``hidden``, each by its own measure."""
        if len(asked) == len(active) and len(self._kinds) == 1:
            self._measure_group(asked, previous, hidden, layers_run)
            return
        groups: dict[tuple[str, int], list[ConfidentRow]] = {}
        for row in asked:
            groups.setdefault(_kind(row.policy), []).append(row)
        for group in groups.values():
            at = self._runner.tensor(np.searchsorted(active, _numbers(group)))
            earlier = previous[at] if self.needs_previous else previous
            self._measure_group(group, earlier, hidden[at], layers_run)

    def _measure_group(
        self, group: list[ConfidentRow], previous: Tensor, hidden: Tensor, layers_run: int
    ) -> None:
        """Rows with one measure; ``hidden`` holds these rows alone."""
        policy = group[0].policy
        if policy.measure != "softmax":
            confidences = measure_states(
                policy.measure, policy.classifier, previous, hidden
            ).tolist()
        else:
            got = self._runner.model.confidence(hidden)
            confidences = got.confidence.tolist()
            logprobs = (got.top_logit - got.logsumexp).tolist()
            told = zip(got.token.tolist(), confidences, logprobs, strict=True)
            self.tokens.update(zip([row.row for row in group], told, strict=True))
        for row, confidence in zip(group, confidences, strict=True):
            self.measured[row.row], self.measured_at[row.row] = confidence, layers_run


def _numbers(rows: list[ConfidentRow]) -> Int64Array:
    """int64 [num_rows], where the rows are in the pass."""
    return np.array([row.row for row in rows], dtype=np.int64)


def _kind(policy: ConfidentExit) -> tuple[str, int]:
    """What policies share whose rows can be measured by one call."""
    return policy.measure, id(policy.classifier)


def measure_states(
    measure: Measure, classifier: ExitClassifier | None, previous: Tensor, hidden: Tensor
) -> Tensor:
    """The ``state`` or ``classifier`` measure of [num_rows, hidden_size]: float32 [num_rows]."""
    if measure == "state":
        return ops.exit_confidence_cosine(previous, hidden)
    return ops.exit_confidence_mlp(hidden, *_weights(classifier, hidden))


def accept_states(
    measure: Measure,
    classifier: ExitClassifier | None,
    previous: Tensor,
    hidden: Tensor,
    accept: ops.AcceptRows,
) -> tuple[Tensor, ops.AcceptMask]:
    """The same, and who is accepted by it: one launch on CUDA for a few rows."""
    if measure == "state":
        return ops.exit_confidence_cosine(previous, hidden, accept=accept)
    return ops.exit_confidence_mlp(hidden, *_weights(classifier, hidden), accept=accept)


def _weights(
    classifier: ExitClassifier | None, hidden: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    assert classifier is not None
    m = classifier.on(hidden.device)
    return m.weight1, m.bias1, m.weight2, m.bias2
