"""How long passes over a model take, by their number of rows, as they are measured on the way.

Others use the machine too, and texts grow: the same pass takes half as long again a minute later.
So what is kept of each number of rows is its time beside the others, and how slow the machine is
just now is one number, which every pass tells of.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from math import exp, log

__all__ = [
    "COST_AMONG_ROWS",
    "FIRST_STEPS",
    "LEAST_ROW_COST",
    "MOST_SLOWER",
    "ROW_COST",
    "Anchor",
    "Pace",
    "PassTimes",
    "StepCost",
]

Anchor = tuple[int, float]
"""Rows of a pass of full depth, and its seconds."""

# Variances of logarithms of times: of a pass that nothing disturbed; of the machine's pace, at any
# time; of a number of rows when it has been measured once, what that gains with each pass of
# others, and when it has been measured often.
NOISE, PACE, FIRST, LATER, OFTEN = 0.006, 0.0015, 0.02, 1e-5, 2e-4
# How much slower than expected a pass can be: what is beyond was disturbed. How many passes it
# takes to forget one.
MOST_SLOWER = 1.5
LOG_MOST_SLOWER = log(MOST_SLOWER)
FORGET_TIME = 1024
# Passes of full depth that are measured before anything is held against them.
FIRST_PASSES = 2
# Before anything is measured: what one more row costs of a pass of one row; and of more, where it
# is taken to be cheap, or nobody would ever see whether it is.
ROW_COST, COST_AMONG_ROWS = 0.1, 0.03
# How many times as many rows tell what one more takes.
FAR = 4
# What one more row costs at least, in tokens of full depth.
LEAST_ROW_COST = 0.02
# Of one step of a draft head, before it is measured; the steps of a round that this is worth, and
# how they scatter; what a round weighs beside those before; a step costs no less.
HEAD_STEP, FIRST_STEPS, SCATTER = 0.08, 2, 1.0
NEW_STEPS = 0.05
LEAST_STEP = 0.01
# No round is shorter, in passes of full depth, whatever follows for few steps from many.
LEAST_ROUND = 0.5


class Pace:
    """How slow the machine is just now, of which each pass tells; 1 at first."""

    __slots__ = ("now", "passes")

    def __init__(self) -> None:
        self.now = 1.0
        self.passes = 0  # that told of it, and first ones

    def learn(self, off: float, variance: float) -> float:
        """A pass that took another time than was expected.

        Args:
            off: the logarithm of its time over the expected one.
            variance: of the logarithm of what it is known to take at the same pace.

        Returns:
            The part of it that tells of the pass (a Kalman filter's gain; the pace has taken its
            own).
        """
        every = PACE + variance + NOISE
        self.now *= exp(off * PACE / every)
        return variance / every


@dataclass(slots=True)
class _Measured:
    """Passes of one number of rows."""

    seconds: float
    """Of one at a pace of 1."""
    variance: float = FIRST
    """Of its logarithm."""
    passes: int = 0
    last: int = 0
    """Which of all passes was the last one of these."""
    told: int = 0
    """And which of all that told of the machine's pace."""


class PassTimes:
    """Seconds of a pass, by its rows: measured ones, and between and beyond them estimates.

    Args:
        pace: the machine's, that others learn of too.
    """

    def __init__(self, pace: Pace | None = None) -> None:
        self._pace = Pace() if pace is None else pace
        self._rows: list[int] = []
        self._measured: dict[int, _Measured] = {}
        self._count = 0

    def known(self, rows: int) -> float | None:
        """A pass of so many rows that was measured; None where none was."""
        known = self._measured.get(rows)
        return None if known is None else known.seconds * self._pace.now

    def add(self, rows: int, seconds: float) -> float:
        """A pass that has been measured; the first of so many rows is taken as it is.

        Returns:
            How much longer it is taken to be beside others than before, as a logarithm.
        """
        self._count += 1
        self._pace.passes += 1
        known = self._measured.get(rows)
        moved = 0.0
        if known is None:
            bisect.insort(self._rows, rows)
            known = self._measured[rows] = _Measured(seconds / self._pace.now)
        else:
            moved = self._learn(known, log(seconds / (known.seconds * self._pace.now)))
        known.last, known.told = self._count, self._pace.passes
        known.passes += 1
        if self._count % FORGET_TIME == 0:
            self._forget()
        return moved

    def _learn(self, known: _Measured, off: float) -> float:
        """By how much it moves."""
        most = LOG_MOST_SLOWER
        if off < -most and known.passes == 1:
            known.seconds *= exp(off)  # the first one was disturbed
            return off
        off = max(min(off, most), -most)
        variance = min(known.variance + LATER * (self._pace.passes - known.told), FIRST)
        part = self._pace.learn(off, variance)
        known.variance = max((1.0 - part) * variance, OFTEN)
        known.seconds *= exp(part * off)
        return part * off

    def _now(self, rows: int) -> float:
        """Of a number of rows that was measured."""
        return self._measured[rows].seconds * self._pace.now

    def near(self, rows: int) -> float | None:
        """A pass of so many rows, or between two that were measured; None where it was neither."""
        known = self._measured.get(rows)
        if known is not None:
            return known.seconds * self._pace.now if known.passes >= FIRST_PASSES else None
        if self._rows and self._rows[0] < rows < self._rows[-1]:
            low = self._rows[bisect.bisect(self._rows, rows) - 1]
            return self.of(rows, (low, self._now(low)))
        return None

    def of(self, rows: int, anchor: Anchor, others: PassTimes | None = None) -> float:
        """A pass of so many rows.

        Args:
            rows: that are asked for.
            anchor: another pass, of as many rows or fewer, and its seconds.
            others: that tell of as many rows as were not measured here, and what one more takes.
        """
        known = self._measured.get(rows)
        if known is not None:
            return known.seconds * self._pace.now
        at = bisect.bisect(self._rows, rows)
        low, low_seconds = anchor
        if at and self._rows[at - 1] >= low:
            low, low_seconds = self._rows[at - 1], self._now(self._rows[at - 1])
        if at < len(self._rows):
            high = self._rows[at]
            high_seconds = max(self._now(high), low_seconds)
            share = (rows - low) / max(high - low, 1)
            return low_seconds + share * (high_seconds - low_seconds)
        row_seconds = None
        if others is not None:
            seconds = others.near(rows)
            if seconds is not None:
                return max(seconds, low_seconds)
            most = others.most_rows
            seconds = others.near(most) if low < most < rows else None
            if seconds is not None:
                low, low_seconds = most, max(seconds, low_seconds)
            row_seconds = others.row_seconds
        if low > anchor[0]:  # of many rows the next ones are as dear as these, or dearer
            own = max(low_seconds - anchor[1], 0.0) / (low - anchor[0])
            row_seconds = max(own, row_seconds or 0.0)
        if row_seconds is None:
            row_seconds = anchor[1] * (ROW_COST if anchor[0] == 1 else COST_AMONG_ROWS)
        return low_seconds + row_seconds * (rows - low)

    @property
    def most_rows(self) -> int:
        """Of the passes that were measured; 0 where none was."""
        return self._rows[-1] if self._rows else 0

    @property
    def row_seconds(self) -> float | None:
        """What one more row takes, from the fewest to the most that were measured; None where
        those are too near.
        """
        if not self._rows or self._rows[-1] < FAR * self._rows[0]:
            return None
        low, high = self._rows[0], self._rows[-1]
        return max(self._now(high) - self._now(low), 0.0) / (high - low)

    def _forget(self) -> None:
        old = self._count - FORGET_TIME
        self._measured = {r: known for r, known in self._measured.items() if known.last > old}
        self._rows = sorted(self._measured)


class StepCost:
    """What a drafting step costs, in passes of full depth: the slope of rounds over their steps.

    What rounds with any step cost more than those without is not the steps'.

    Args:
        step: what one is taken to cost, before any is measured.
        passes: what a round of :data:`FIRST_STEPS` steps is taken to cost.
    """

    __slots__ = ("_both", "_passes", "_rounds", "_scatter", "_steps")

    def __init__(
        self, step: float = HEAD_STEP, passes: float = 1.0 + HEAD_STEP * FIRST_STEPS
    ) -> None:
        self._steps, self._passes = float(FIRST_STEPS), passes
        self._scatter, self._both = SCATTER, step * SCATTER
        self._rounds = 1  # what is taken weighs as much as one

    @property
    def step(self) -> float:
        """One step's."""
        return max(self._both / self._scatter, LEAST_STEP)

    def round(self, steps: int) -> float:
        """Of a round of so many steps, in passes of full depth."""
        return max(self._passes + self.step * (steps - self._steps), LEAST_ROUND)

    def add(self, steps: int, passes: float) -> None:
        """A round of so many steps that took as long as so many passes.

        Args:
            steps: its.
            passes: its time.
        """
        passes = min(passes, MOST_SLOWER * self.round(steps))
        off, over = steps - self._steps, passes - self._passes
        self._rounds += 1
        weight = max(NEW_STEPS, 1.0 / self._rounds)
        self._steps += weight * off
        self._passes += weight * over
        old = 1.0 - NEW_STEPS
        self._scatter = old * (self._scatter + NEW_STEPS * off * off)
        self._both = old * (self._both + NEW_STEPS * off * over)
