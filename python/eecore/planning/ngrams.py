"""Drafts out of the text itself: the tokens that followed its last ones at an earlier place.

(Prompt lookup decoding, Saxena 2023; LLMA, Yang et al. 2023.)
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from collections.abc import Set
from functools import lru_cache

MAX_CANDIDATES = 64
"""Maximum number of earlier places that are compared, the latest first."""
TOKEN_BITS = 32
"""Bits of one token in the number that stands for an n-gram."""
MATCH_SCORES = (0.05, 0.25, 0.35, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85)
"""Scores of drafts by the number of tokens that match: the n-gram's and the preceding drafts."""


class NgramIndex:
    """Where n-grams occurred in a text that grows.

    Args:
        longest: maximum length of the n-gram that ends the text.
        shortest: its minimum length.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest, self._shortest = longest, shortest
        self.tokens: list[int] = []
        """The text so far."""
        # The shortest n-gram that ends the text, as one number: there are as many as tokens, and
        # the garbage collector does not visit numbers.
        self._end, self._mask = 0, (1 << shortest * TOKEN_BITS) - 1
        self._latest: dict[int, int] = {}
        """For each such n-gram the position after its latest occurrence."""
        self._before: list[int] = []
        """For each position the previous position after the same n-gram; 0 for none."""

    def extend(self, token_ids: Ordered[int]) -> None:
        """Append tokens to the text."""
        self.propose(0, more=token_ids)

    def propose(
        self,
        most: int,
        stops: Set[int] = frozenset(),
        more: Ordered[int] = (),
    ) -> tuple[list[int], int]:
        """The tokens that followed the longest n-gram that ends the text at its latest earlier
        place, and the length of that n-gram; [] and 0 where there is none.

        All of it is one call, since it is made for each row of a round.

        Args:
            most: maximum number of drafts.
            stops: tokens that end a text: no draft follows one.
            more: tokens that are appended to the text first.
        """
        tokens, latest, before = self.tokens, self._latest, self._before
        shortest, mask, end = self._shortest, self._mask, self._end
        for place, token in enumerate(more, len(tokens)):
            if place >= shortest:  # now a token follows the n-gram that ended the text
                before.append(latest.get(end, 0))
                latest[end] = place
            else:
                before.append(0)
            end = (end << TOKEN_BITS | token) & mask
        tokens += more
        self._end = end
        best, match, place = 0, 0, latest.get(end, 0)
        for _ in range(MAX_CANDIDATES):
            if not place:
                break
            length, longest = shortest, min(self._longest, place)
            while length < longest and tokens[place - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > match:
                best, match = place, length
            if length == self._longest:
                break
            place = before[place]
        if not match:
            return [], 0
        drafts = tokens[best : best + most]
        for at in range(most - len(drafts)):  # the end of the text was reached: drafts repeat
            drafts.append(drafts[at])
        return drafts if stops.isdisjoint(drafts) else until(drafts, stops), match


def until(drafts: list[int], stops: Set[int]) -> list[int]:
    """The drafts up to the first one in ``stops``, which is included."""
    if not stops.isdisjoint(drafts):
        first = next(k for k, draft in enumerate(drafts) if draft in stops)
        del drafts[first + 1 :]
    return drafts


@lru_cache(maxsize=4096)
def match_scores(match: int, count: int) -> tuple[float, ...]:
    """The scores of ``count`` drafts after an n-gram of ``match`` tokens."""
    scores = MATCH_SCORES[match : match + count]
    return scores + MATCH_SCORES[-1:] * (count - len(scores))
