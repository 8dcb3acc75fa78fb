"""Seconds of rounds, measured as they run: exponential means by a whole number, lines between.

A round lasts from the end of the previous round to its own end: scheduling, planning, the pass, and
the host's work on its tokens.
"""

from __future__ import annotations

import bisect
from math import exp, log

from eecore.planning.odds import NEW

MAX_SLOWER = 1.5
"""The largest multiple of the expected time that a round counts; a longer one was disturbed."""


class Times:
    """Means of measurements by a whole number.

    Args:
        base: the expected value at 0; None: unknown.
        slope: the expected increase from one number to the next, until it is measured.
    """

    def __init__(self, base: float | None, slope: float) -> None:
        self.slope = slope
        self._places: list[int] = [] if base is None else [0]
        self._means: dict[int, float] = {} if base is None else {0: base}
        self._counts: dict[int, int] = {}

    def measured(self, place: int) -> float | None:
        """The mean at a place; None unless it lies between half the smallest measured place and
        twice the largest.
        """
        places = self._places
        if not places or places[0] > 2 * place or place > 2 * places[-1]:
            return None
        return self._means.get(place) or self.at(place)

    def at(self, place: int) -> float:
        """The mean at a place, as in :meth:`between`."""
        known = self._means.get(place)
        return self.between(place, place)[0] if known is None else known

    def between(self, first: int, last: int) -> list[float]:
        """The means at ``first``, ..., ``last``: measured, or on the line between two neighbours.
        Before the first and after the last measured place the slope is that from the first to the
        last; before the first, the mean is at least proportional to the place.
        """
        places, means, found = self._places, self._means, list[float]()
        for place in range(first, last + 1):
            mean = means.get(place)
            at = 0 if mean is not None else bisect.bisect(places, place)
            if 0 < at < len(places):
                low, high = places[at - 1], places[at]
                share = (place - low) / (high - low)
                mean = means[low] + share * (means[high] - means[low])
            elif mean is None:
                least, most, slope = places[0], places[-1], self.slope
                if len(places) > 1:
                    slope = max((means[most] - means[least]) / (most - least), 0.0)
                near = most if at else least
                proportional = means[near] * min(place / max(near, 1), 1.0)
                mean = max(means[near] + slope * (place - near), proportional)
            found.append(mean)
        return found

    def add(self, place: int, value: float) -> None:
        """Count a measurement; the first at a place is taken as it is."""
        count = self._counts[place] = self._counts.get(place, 0) + 1
        known = self._means.get(place)
        if known is None:
            bisect.insort(self._places, place)
        if known is None or count == 1:
            self._means[place] = value
        elif count == 2:
            self._means[place] = min(value, known)  # the larger one may have been disturbed
        else:
            self._means[place] = known + NEW * (value - known)


class Costs:
    """Seconds of rounds by their requests, drafts and steps."""

    def __init__(self) -> None:
        self._full = Times(None, 0.0)
        self._slowdown = 1.0
        """The machine's current slowdown, a factor of all times."""
        self._rounds: dict[tuple[str, int], Times] = {}

    def full(self, requests: int) -> float | None:
        """Seconds of a round of full depth; None where they have not been measured."""
        known = self._full.measured(requests)
        return None if known is None else known * self._slowdown

    def rounds(self, kind: str, requests: int, slope: float) -> Times:
        """Rounds of a kind, in rounds of full depth, by their drafts or steps.

        Args:
            requests: of the round; numbers of one bit length share a table.
            slope: the expected cost of one more draft or step.
        """
        key = kind, requests.bit_length()
        times = self._rounds.get(key)
        if times is None:
            times = self._rounds[key] = Times(1.0, slope)
        return times

    def learn_full(self, requests: int, seconds: float) -> None:
        """Count a round of full depth that followed another one of the same requests."""
        full = self.full(requests)
        if full is not None:
            seconds = min(seconds, MAX_SLOWER * full)
            self._slowdown *= exp(NEW * log(seconds / full))
        self._full.add(requests, seconds / self._slowdown)

    def ratio(self, requests: int, seconds: float, expected: float) -> float | None:
        """The time of a round in rounds of full depth; the slowdown is updated by it.

        Args:
            requests: of the round.
            seconds: the time that the round took.
            expected: the expected time, in rounds of full depth.
        """
        full = self.full(requests)
        if full is None:
            return None
        slower = min(seconds / (full * expected), MAX_SLOWER)
        self._slowdown *= exp(NEW * log(slower))
        return float(slower ** (1.0 - NEW) * expected)
