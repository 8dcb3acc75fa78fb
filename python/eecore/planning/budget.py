"""What choosing may cost: a hundredth of full depth or less, and what it has gained.

To look for drafts takes time, and what is tried may be slower than full depth. Both are paid for
out of a budget, which grows with every round and with all that drafts gain. Where it is spent, or
looks have found nothing for a while, rounds are of full depth without a look.
"""

from __future__ import annotations

import math

__all__ = ["Budget"]

# In rounds of full depth: what a round adds, of one request alone and of several, of which others
# may fall behind besides; at the beginning and at most; a new request.
ROUND_ALONE, ROUND_OF_SEVERAL = 0.01, 0.005
ALONE, SEVERAL = (1.0, 4.0), (0.5, 2.0)
REQUEST_ALONE, REQUEST_OF_SEVERAL = 0.25, 0.15
# No debt is larger.
MOST_DEBT = 4.0
# It is spent at so much, of one request and of several. Once it is, so much is saved up before
# anybody looks again. A head's drafts cost one round and are worth something in the next: of one
# request there is room between the two for some rounds of both, or nothing would ever come of them.
SPENT_ALONE, SPENT_OF_SEVERAL = -1.0, 0.0
ENOUGH = 0.1
# What all requests together have earned, at most and at least: new ones get no more than that.
MOST_EARNED, LEAST_EARNED = 8.0, -2.0
# Looks in a row that may find nothing; behind each one more of them, so many times as many rounds
# have none, up to so many; of one request and of several.
IDLE_ALONE, IDLE_SEVERAL = (8, 2, 8), (2, 3, 32)
# Of rounds, what looks may take that find nothing, of one request and of several: a small model's
# are hardly longer than a look.
VAIN_ALONE, VAIN_SEVERAL = 0.05, 0.025


class Budget:
    """Of the rounds of one request, or of those of several.

    Args:
        is_alone: it is a single one.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self._left, self._most = ALONE if is_alone else SEVERAL
        self._round = ROUND_ALONE if is_alone else ROUND_OF_SEVERAL
        self._spent = SPENT_ALONE if is_alone else SPENT_OF_SEVERAL
        self._request = REQUEST_ALONE if is_alone else REQUEST_OF_SEVERAL
        self._looks, self._rarer, self._most_rests = IDLE_ALONE if is_alone else IDLE_SEVERAL
        self._vain = VAIN_ALONE if is_alone else VAIN_SEVERAL
        self._earned = self._left
        self._saves = False
        # Looks that found nothing; rounds until the next one; those of the last time.
        self._idle = self._rests = self._last_rests = 0

    @property
    def is_spent(self) -> bool:
        """Whether nobody is to look."""
        return self._saves or self._rests > 0

    def welcome(self, share: float) -> None:
        """New requests have come, this share of all: their text is another one.

        They begin without the debts of others, and with something to try, as long as trying has
        been worth it: where many short texts come, each would lose as much again.
        """
        given = share * (self._request + max(-self._left, 0.0))
        self._add(min(given, max(self._earned, 0.0)))
        self._idle = self._rests = self._last_rests = 0

    @property
    def rests(self) -> int:
        """Rounds that are left in which nobody is to look."""
        saving = math.ceil((ENOUGH - self._left) / self._round) if self._saves else 0
        return max(self._rests, saving)

    def rested(self, rounds: int = 1) -> None:
        """Rounds nobody looked in."""
        self._rests = max(self._rests - rounds, 0)
        self._earn(rounds * self._round)

    def looked(self, gained: float, *, found: bool = True) -> None:
        """A round somebody looked in.

        Args:
            gained: by what came of it, everything counted, in rounds of full depth; what disturbed
                it is left out.
            found: whether anything but full depth was chosen, or nothing else was asked for: a look
                that was not in vain.
        """
        if found:
            self._idle = self._last_rests = 0
        else:
            self._idle += 1
        if self._idle <= self._looks:
            self._rests = 0
        else:
            rests = self._rarer * self._last_rests or 1
            self._rests = self._last_rests = min(rests, self._most_rests)
        if not found:
            self._rests = max(self._rests, min(int(-gained / self._vain), self._most_rests))
        self._earn(self._round + gained)

    def _earn(self, rounds: float) -> None:
        self._earned = max(min(self._earned + rounds, MOST_EARNED), LEAST_EARNED)
        self._add(rounds)

    def _add(self, rounds: float) -> None:
        self._left = max(min(self._left + rounds, self._most), -MOST_DEBT)
        if self._left < self._spent:
            self._saves = True
        elif self._left >= ENOUGH:
            self._saves = False
