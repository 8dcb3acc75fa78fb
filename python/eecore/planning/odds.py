"""How often drafts are accepted, by source and score, and what rounds with a draft head give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["NEW", "HeadRounds", "Key", "Odds"]

Key = tuple[str, int]
"""The source of a draft, and a tenth of its score; for a layer's draft the bit length of its
position in the output."""

HALVE_AFTER = 32.0
"""Drafts after which older ones count half."""
PRIOR_DRAFTS = 4.0
"""Drafts that an expectation weighs."""
NEW = 0.1
"""The weight of a new round in a mean, and the share of an unexpected time that is the machine's
pace.
"""


class Odds:
    """Accepted and tried drafts, counted by key; older ones count less.

    Args:
        expected: the acceptance rate of a key of which nothing has been counted.
    """

    __slots__ = ("_expected", "counts")

    def __init__(self, expected: Callable[[Key], float]) -> None:
        self._expected = expected
        self.counts: dict[Key, list[float]] = {}
        """Accepted and tried drafts."""

    def share(self, key: Key) -> float:
        """The acceptance rate of drafts whose predecessors were accepted."""
        known = self.counts.get(key)
        return self._expected(key) if known is None else known[0] / known[1]

    def add(self, key: Key, accepted: bool) -> None:
        """Count a draft whose predecessors were accepted."""
        known = self.counts.get(key)
        if known is None:
            known = self.counts[key] = [PRIOR_DRAFTS * self._expected(key), PRIOR_DRAFTS]
        known[0] += accepted
        known[1] += 1.0
        if known[1] >= 2.0 * HALVE_AFTER:
            known[0] *= 0.5
            known[1] *= 0.5

    def fade(self, source: str) -> None:
        """Let what has been counted of a source weigh no more than an expectation."""
        for key, known in self.counts.items():
            if key[0] == source and known[1] > PRIOR_DRAFTS:
                known[:] = [PRIOR_DRAFTS * known[0] / known[1], PRIOR_DRAFTS]


@dataclass(slots=True)
class HeadRounds:
    """Means of what a round with a draft head's drafts gives one request."""

    accepted: float
    verified: float
    steps: float
    """Drafts that the head makes for the next round."""

    def add(self, accepted: int, verified: int, steps: int) -> None:
        """Count a round."""
        self.accepted += NEW * (accepted - self.accepted)
        self.verified += NEW * (verified - self.verified)
        self.steps += NEW * (steps - self.steps)
