"""Times of rounds, measured as they run.

A round lasts from the end of the previous round to its own end: scheduling, planning, the pass, and
the host's work on its tokens.
"""

from __future__ import annotations

from operator import mul

NEW = 0.1
"""The weight of a new round in what is known of rounds of its kind; the first ones weigh more."""
NEW_FULL = 0.25
"""The weight of a new round in the mean of rounds of full depth, which all other times refer to."""
FIRST_COST = 0.08
"""The cost, in rounds of full depth, that is assumed until it is measured: for one more row, for
one step of a head, and for the LM head after a step of layers.
"""
MAX_SLOWER = 1.5
"""The largest multiple of the expected time that a round counts; a longer one was disturbed."""
GROUPS = 16
"""Groups of drafts that cost the same: 1, 2, 3 to 4, 5 to 8, ..."""


class Curve:
    """Times of a kind of rounds by their number of drafts, in rounds of full depth.

    Products take several rows at a time, so the drafts of a group cost the same.

    Args:
        slope: the expected cost of a draft.
    """

    def __init__(self, slope: float) -> None:
        self._slopes = [slope] * GROUPS
        self._counts = [0] * GROUPS
        self.step = FIRST_COST
        """The cost of one step of a head."""

    def upto(self, count: int) -> list[float]:
        """The times with 0, 1, ..., ``count`` drafts."""
        times = [1.0]
        for k in range(count):
            times.append(times[-1] + self._slopes[k.bit_length()])
        return times

    def add(self, count: int, steps: int, excess: float) -> None:
        """Learn that a round took longer than expected by ``excess``, which may be negative."""
        sizes, low = list[int](), 0
        while low < count:
            high = max(2 * low, 1)
            sizes.append(min(high, count) - low)
            low = high
        share = excess / max(steps**2 + sum(map(mul, sizes, sizes)), 1)
        for k, size in enumerate(sizes):
            self._counts[k] += 1  # an expected slope weighs as much as one measurement
            new = max(NEW, 1.0 / (1 + self._counts[k]))
            self._slopes[k] = max(self._slopes[k] + new * share * size, 0.0)
        tried = len(sizes)
        if sizes and not self._counts[tried]:  # longer drafts are expected to cost as much
            self._slopes[tried:] = [self._slopes[tried - 1]] * (GROUPS - tried)
        self.step = max(self.step + NEW * share * steps, 0.0)


class Costs:
    """Seconds of rounds of full depth by their requests, and times of other rounds beside them."""

    def __init__(self) -> None:
        self._full: dict[int, float] = {}
        self._curves: dict[tuple[str, int], Curve] = {}

    def full(self, requests: int) -> float | None:
        """Seconds of a round of full depth; None unless rounds of half to twice as many requests
        have been measured.
        """
        known = self._full
        if requests in known:
            return known[requests]
        if not any(n <= 2 * requests <= 4 * n for n in known):
            return None
        low = max([n for n in known if n <= requests], default=min(known))
        high = min([n for n in known if n >= requests], default=low)
        share = (requests - low) / (high - low) if low < high else 0.0
        return known[low] + share * (known[high] - known[low])

    def curve(self, kind: str, requests: int, slope: float = FIRST_COST) -> Curve:
        """Rounds of a kind; numbers of requests of one bit length share a curve."""
        key = kind, requests.bit_length()
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = Curve(slope)
        return curve

    def learn_full(self, requests: int, seconds: float) -> None:
        """Count a round of full depth that followed another one of the same requests."""
        full = self._full.get(requests)
        if full is None:
            self._full[requests] = seconds
        else:
            self._full[requests] += NEW_FULL * (min(seconds, MAX_SLOWER * full) - full)

    def learn(self, curve: Curve, requests: int, count: int, steps: int, seconds: float) -> None:
        """Learn from the seconds of a round with ``count`` drafts and ``steps`` of a head."""
        full = self.full(requests)
        if full is not None:
            expected = curve.upto(count)[-1] + steps * curve.step
            slower = min(seconds / (full * expected), MAX_SLOWER)
            curve.add(count, steps, (slower - 1.0) * expected)
