"""Drafts that a round may verify."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import NamedTuple

MAX_AHEAD = 8
"""Maximum number of drafts that a draft head makes at the end of a round: one of so many is wrong.
"""


Drafts = tuple[list[int], Ordered[float]]
"""Tokens, and for each the source's estimate of the chance that it is accepted."""


class Proposal(NamedTuple):
    """Drafts for a request."""

    tokens: list[int]
    source: str = ""
    """The name of the source."""
    scores: Ordered[float] = ()
    """For each draft the source's own estimate, 0 to 1, of the chance that it is accepted if the
    previous drafts are. Acceptance rates are counted by source and tenth of the score.
    """
    before: Drafts | None = None
    """The tokens that the round in flight has to give, no more and no fewer, for these drafts to
    fit the text, and their scores; None: the text is known.
    """

    def first(self, count: int) -> Proposal:
        """The first ``count`` of these drafts."""
        return Proposal(self.tokens[:count], self.source, self.scores[:count], self.before)


NOTHING = Proposal([])


class Ahead(NamedTuple):
    """Drafts that a draft head made after ``num_tokens`` tokens, the last of which is ``last``."""

    num_tokens: int
    last: int
    tokens: list[int]
    probabilities: list[float]
    """The probability that the head gives each draft, among the tokens that it knows."""
