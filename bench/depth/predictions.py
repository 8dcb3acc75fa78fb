"""The predicted time of a step, from a model cut at some depths and from ops timed alone.

Only arithmetic; all times are milliseconds. An exit is a number of layers, and a step has one exit
for each row.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Exits = Sequence[int]


@dataclass(frozen=True)
class Line:
    """The time of a step as a line over depth, at one number of rows."""

    intercept: float
    slope: float
    """Milliseconds of a layer."""

    @staticmethod
    def through(times: Mapping[int, float]) -> Line:
        """The least-squares line through times by depth, two or more."""
        slope, intercept = statistics.linear_regression(list(times), list(times.values()))
        return Line(intercept, slope)

    def at(self, depth: float) -> float:
        return self.intercept + self.slope * depth


@dataclass(frozen=True)
class Curve:
    """Time by number of rows, linear between the measured numbers of rows; 0 for no rows."""

    times: Mapping[int, float]

    def at(self, rows: float) -> float:
        known = sorted(self.times)
        if rows <= 0:
            return 0.0
        if rows <= known[0] or len(known) == 1:
            return self.times[known[0]]
        low, high = next(((a, b) for a, b in pairwise(known) if rows <= b), (known[-2], known[-1]))
        share = (rows - low) / (high - low)
        return self.times[low] + share * (self.times[high] - self.times[low])


@dataclass(frozen=True)
class Costs:
    """The times of one model's parts on one number of threads."""

    num_layers: int
    lines: Mapping[int, Line]
    """A step's line by number of rows."""
    kernels: Mapping[str, Curve]
    """Curves of head, state, classifier, and fill (of one layer)."""

    def layer(self, rows: float) -> float:
        return Curve({count: line.slope for count, line in self.lines.items()}).at(rows)

    def cut(self, steps: Sequence[Exits], extra: Callable[[Exits], float]) -> float:
        """The time of a model cut at the mean depth, plus the extra time of exits."""
        depth = statistics.fmean(layer for step in steps for layer in step)
        return self.lines[len(steps[0])].at(depth) + statistics.fmean(map(extra, steps))

    def present(self, steps: Sequence[Exits], extra: Callable[[Exits], float]) -> float:
        """The time of each layer for the rows still in flight, plus the extra time of exits."""

        def step_time(step: Exits) -> float:
            there = (sum(layer > index for layer in step) for index in range(self.num_layers))
            return self.lines[len(step)].intercept + sum(map(self.layer, there)) + extra(step)

        return statistics.fmean(map(step_time, steps))

    def exits(self, points: Sequence[int], measure: str) -> Callable[[Exits], float]:
        """A step's extra time over its layers and one head: checks, and filling skipped layers.

        A softmax check is also the head of the rows that exit at it, so that the last head runs
        only for the rows that reach the last layer.
        """
        head, fill = self.kernels["head"], self.kernels["fill"]
        check = self.kernels["head" if measure == "softmax" else measure]

        def extra(step: Exits) -> float:
            total = sum(check.at(sum(layer >= point for layer in step)) for point in points)
            if measure == "softmax":
                total += head.at(step.count(self.num_layers)) - head.at(len(step))
            skipped = (sum(layer <= index for layer in step) for index in range(self.num_layers))
            return total + sum(map(fill.at, skipped))

        return extra

    def round_of_speculation(self, rows: int, exit_layer: int, num_drafts: int) -> float:
        """The time of a round: drafts one after the other, then verification of all of them.

        Verification runs the drafts through the remaining layers and the head; the last draft
        also runs through the first layers then.
        """
        line, head = self.lines[rows], self.kernels["head"]
        verified = rows * (num_drafts + 1)
        verification = (
            line.at(exit_layer)
            + (self.num_layers - exit_layer) * self.layer(verified)
            + head.at(verified)
            - head.at(rows)
        )
        return num_drafts * line.at(exit_layer) + verification
