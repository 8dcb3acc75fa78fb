"""Drafts that a round may verify, and the protocol of what proposes them."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from itertools import takewhile
from operator import eq
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from eecore.planning.draft_state import DraftState
    from eecore.scheduling.sequence import Sequence

MAX_AHEAD = 8
"""Maximum number of drafts that a draft head makes at the end of a round: one of so many is wrong.
"""


class Proposal(NamedTuple):
    """Drafts for a request."""

    tokens: list[int]
    source: str = ""
    """The name of the source."""
    scores: Ordered[float] = ()
    """For each draft the source's own estimate, 0 to 1, of the chance that it is accepted if the
    previous drafts are. Acceptance rates are counted by source and tenth of the score.
    """
    before: Proposal | None = None
    """The tokens that the round in flight has to give, no more and no fewer, for these drafts to
    fit the text; None: the text is known.
    """

    def first(self, count: int) -> Proposal:
        """The first ``count`` of these drafts."""
        return Proposal(self.tokens[:count], self.source, self.scores[:count], self.before)

    def after(self, verified: Ordered[int], most: int) -> Proposal:
        """The drafts that are left if the text goes on as proposed: the round in flight then gives
        those of its own drafts that agree with the proposed ones, and one token more.

        Args:
            verified: the drafts that the round in flight verifies.
            most: maximum number of drafts.
        """
        if not self.tokens:
            return self
        given = 1 + sum(takewhile(bool, map(eq, verified, self.tokens)))
        before = Proposal(self.tokens[:given], self.source, self.scores[:given])
        end = given + most
        return Proposal(self.tokens[given:end], self.source, self.scores[given:end], before)

    def fits(self, text: list[int]) -> bool:
        """Whether a text ends as it has to for these drafts."""
        before = self.before
        return before is None or text[-len(before.tokens) :] == before.tokens


NOTHING = Proposal([])


class Ahead(NamedTuple):
    """Drafts that a draft head made after ``num_tokens`` tokens, the last of which is ``last``."""

    num_tokens: int
    last: int
    tokens: list[int]
    probabilities: list[float]
    """The probability that the head gives each draft, among the tokens that it knows."""


class DraftSource(Protocol):
    """Proposes drafts without running the model."""

    @property
    def name(self) -> str:
        """The name under which the acceptance rates of this source are counted."""

    def serves(self, draft: DraftState) -> bool:
        """Whether a request's policy lets this source draft for it, now and later."""

    def propose(self, sequence: Sequence, draft: DraftState, most: int) -> Proposal:
        """Propose at most ``most`` drafts after a request's last token."""
