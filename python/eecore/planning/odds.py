"""How often drafts are accepted, by source and score."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered

Key = tuple[str, int]
"""The source of a draft, and the tenth that its score is in; for a layer's draft, the bit length of
its position in the output instead of a score.
"""

HALVE_AFTER = 32.0
"""Number of drafts after which older ones count half."""
PRIOR_DRAFTS = 4.0
"""Number of drafts that an expected rate weighs as much as."""


class Odds:
    """Accepted and tried drafts, counted by key; older ones count less.

    Args:
        expected: the acceptance rate of a key without a counted draft.
    """

    __slots__ = ("counts", "expected")

    def __init__(self, expected: Callable[[Key], float]) -> None:
        self.expected = expected
        self.counts: dict[Key, list[float]] = {}
        """Accepted and tried drafts of each key."""

    def share(self, key: Key) -> float:
        """The acceptance rate of drafts whose preceding drafts were accepted."""
        known = self.counts.get(key)
        return self.expected(key) if known is None else known[0] / known[1]


def count_drafts(rounds: Iterable[tuple[Ordered[Odds], Ordered[Key], int]]) -> None:
    """Count drafts in tables: the accepted ones, and the first rejected one of each round.

    Args:
        rounds: the tables, the key of each draft, and the number of accepted drafts.
    """
    for tables, keys, accepted in rounds:
        for k, key in enumerate(keys[: accepted + 1]):
            for odds in tables:
                known = odds.counts.get(key)
                if known is None:
                    known = odds.counts[key] = [PRIOR_DRAFTS * odds.expected(key), PRIOR_DRAFTS]
                known[0] += k < accepted
                known[1] += 1.0
                if known[1] >= 2.0 * HALVE_AFTER:
                    known[:] = 0.5 * known[0], 0.5 * known[1]
