"""Drafts that a round may be given, and what speaks for them."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import NamedTuple

__all__ = ["MOST_AHEAD", "NOTHING", "Ahead", "Proposal"]

MOST_AHEAD = 8
"""Drafts that a draft head makes at the end of a round: by then one of them is wrong."""


class Proposal(NamedTuple):
    """Drafts for a request, that were looked up or that a draft head made."""

    tokens: list[int]
    match: int = 0
    """Tokens that end the text and came before them where they were looked up; the longest that is
    looked for at most."""
    probabilities: Ordered[float] = ()
    """Of each draft, as a draft head gave them; none where they were looked up."""

    @property
    def is_headed(self) -> bool:
        """Whether a draft head made them."""
        return bool(self.probabilities)

    def first(self, count: int) -> Proposal:
        """The first drafts of it."""
        return Proposal(self.tokens[:count], self.match, self.probabilities[:count])


class Ahead(NamedTuple):
    """What a head drafted behind a text of so many tokens, the last of which is ``after``."""

    num_tokens: int
    after: int
    tokens: list[int]
    probabilities: list[float]
    """That the head gives to them, among the tokens that it knows."""


NOTHING = Proposal([])
