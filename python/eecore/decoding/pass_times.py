"""How long passes over a model take, by their number of rows, as they are measured on the way."""

from __future__ import annotations

import bisect

__all__ = [
    "COST_AMONG_ROWS",
    "FIRST_STEPS",
    "LEAST_ROW_COST",
    "MOST_SLOWER",
    "ROW_COST",
    "Anchor",
    "PassTimes",
    "StepCost",
]

Anchor = tuple[int, float]
"""Rows of a pass of full depth, and its seconds."""

# What a measurement weighs beside those before, and one that is faster, which nothing disturbed;
# how much slower than they it can be: what is beyond was disturbed. How many passes it takes to
# forget one.
NEW_TIME, FASTER_TIME, MOST_SLOWER = 0.25, 0.5, 1.5
FORGET_TIME = 1024
# What a pass takes of those before it, for them to have been disturbed.
DISTURBED = 0.8
# Passes of full depth that are measured before anything is held against them.
FIRST_PASSES = 2
# Before anything is measured: what one more row costs of a pass of one row, and of more.
ROW_COST, COST_AMONG_ROWS = 0.1, 0.08
# How many times as many rows tell what one more takes.
FAR = 4
# What one more row costs at least, in tokens of full depth.
LEAST_ROW_COST = 0.02
# Of one step of a draft head, before it is measured; the steps of a round that this is worth, and
# how they scatter; what a round weighs beside those before; a step costs no less.
HEAD_STEP, FIRST_STEPS, SCATTER = 0.08, 2, 1.0
NEW_STEPS = 0.05
LEAST_STEP = 0.01


class PassTimes:
    """Seconds of a pass, by its rows: measured ones, and between and beyond them estimates."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._seconds: dict[int, float] = {}
        self._last: dict[int, int] = {}
        self._passes: dict[int, int] = {}
        self._count = 0

    def __contains__(self, rows: int) -> bool:
        """Whether a pass of so many rows was measured."""
        return rows in self._seconds

    def add(self, rows: int, seconds: float) -> float:
        """A pass that has been measured; the first of so many rows is taken as it is.

        Where it took far less than those before it, they were disturbed, and so may have been
        passes of other numbers of rows, which are measured again only if they look worth it.

        Returns:
            By how much all others are taken to be faster: 1 where they are not.
        """
        self._count += 1
        known = self._seconds.get(rows)
        share = 1.0
        if known is None:
            bisect.insort(self._rows, rows)
            self._seconds[rows] = seconds
        else:
            new = _blended(known, seconds)
            if seconds < DISTURBED * known:
                share = new / known
                self.scale(share)
            self._seconds[rows] = new
        self._last[rows] = self._count
        self._passes[rows] = self._passes.get(rows, 0) + 1
        if self._count % FORGET_TIME == 0:
            self._forget()
        return share

    def scale(self, share: float) -> None:
        """All take this share of what they were measured to take."""
        for rows in self._rows:
            self._seconds[rows] *= share

    def near(self, rows: int) -> float | None:
        """A pass of so many rows, or between two that were measured; None where it was neither."""
        known = self._seconds.get(rows)
        if known is None and self._rows and self._rows[0] < rows < self._rows[-1]:
            low = self._rows[bisect.bisect(self._rows, rows) - 1]
            return self.of(rows, (low, self._seconds[low]))
        return known if self._passes.get(rows, 0) >= FIRST_PASSES else None

    def of(self, rows: int, anchor: Anchor, row_seconds: float | None = None) -> float:
        """A pass of so many rows.

        Args:
            rows: that are asked for.
            anchor: another pass, of as many rows or fewer, and its seconds.
            row_seconds: what one more row takes beyond those that were measured, if it is known.
        """
        known = self._seconds.get(rows)
        if known is not None:
            return known
        at = bisect.bisect(self._rows, rows)
        low, low_seconds = anchor
        if at and self._rows[at - 1] >= low:
            low, low_seconds = self._rows[at - 1], self._seconds[self._rows[at - 1]]
        if at < len(self._rows):
            high = self._rows[at]
            high_seconds = max(self._seconds[high], low_seconds)
            share = (rows - low) / max(high - low, 1)
            return low_seconds + share * (high_seconds - low_seconds)
        if row_seconds is None:
            row_seconds = anchor[1] * (ROW_COST if anchor[0] == 1 else COST_AMONG_ROWS)
        return low_seconds + row_seconds * (rows - low)

    @property
    def row_seconds(self) -> float | None:
        """What one more row takes, from the fewest to the most that were measured; None where
        those are too near.
        """
        if not self._rows or self._rows[-1] < FAR * self._rows[0]:
            return None
        low, high = self._rows[0], self._rows[-1]
        return max(self._seconds[high] - self._seconds[low], 0.0) / (high - low)

    def _forget(self) -> None:
        old = self._count - FORGET_TIME
        self._rows = [rows for rows in self._rows if self._last[rows] > old]
        for held in (self._seconds, self._last, self._passes):
            for rows in held.keys() - set(self._rows):
                held.pop(rows)


class StepCost:
    """What a drafting step costs, in passes of full depth: the slope of rounds over their steps.

    What rounds with any step cost more than those without is not the steps'.

    Args:
        step: what one is taken to cost, before any is measured.
        passes: what a round of :data:`FIRST_STEPS` steps is taken to cost.
    """

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
        return self._passes + self.step * (steps - self._steps)

    def add(self, steps: int, passes: float) -> None:
        """A round of so many steps that took as long as so many passes."""
        passes = min(passes, MOST_SLOWER * self.round(steps))
        off, over = steps - self._steps, passes - self._passes
        self._rounds += 1
        weight = max(NEW_STEPS, 1.0 / self._rounds)
        self._steps += weight * off
        self._passes += weight * over
        old = 1.0 - NEW_STEPS
        self._scatter = old * (self._scatter + NEW_STEPS * off * off)
        self._both = old * (self._both + NEW_STEPS * off * over)


def _blended(known: float, new: float) -> float:
    """A time that was measured once more."""
    weight = FASTER_TIME if new < known else NEW_TIME
    return known + weight * (min(new, MOST_SLOWER * known) - known)
