"""Drafts out of the text itself: what followed the last tokens where they occurred before.

(Prompt lookup decoding, Saxena 2023; LLMA, Yang et al. 2023.)
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from collections.abc import Set

from eecore.planning.proposal import NOTHING, Proposal
from eecore.scheduling.sequence import Sequence

__all__ = ["NgramIndex", "look_up"]

MOST_CANDIDATES = 64
"""Earlier places that are compared, the latest ones."""
TOKEN_BITS = 32
"""Of a token's number in that of an n-gram."""


class NgramIndex:
    """Where n-grams occurred in a text that grows.

    Args:
        longest: tokens of the n-gram that ends the text, at most.
        shortest: tokens of it at least.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest, self._shortest = longest, shortest
        self._tokens: list[int] = []
        # The n-gram of the shortest kind that ends the text, as one number: no collector of
        # garbage has to look at those, of which there are as many as tokens.
        self._end, self._mask = 0, (1 << shortest * TOKEN_BITS) - 1
        self._latest: dict[int, int] = {}
        """The position behind each such n-gram, where it occurred last."""
        self._before: list[int] = []
        """By position: the one before it behind the same n-gram; 0 for none."""

    @property
    def num_tokens(self) -> int:
        """Of the text so far."""
        return len(self._tokens)

    def extend(self, token_ids: Ordered[int]) -> None:
        """The text goes on."""
        latest, before, size = self._latest, self._before, self._shortest
        end, mask = self._end, self._mask
        for place, token in enumerate(token_ids, len(self._tokens)):
            if place >= size:  # what ended the text has a token behind it now
                before.append(latest.get(end, 0))
                latest[end] = place
            else:
                before.append(0)
            end = (end << TOKEN_BITS | token) & mask
        self._end = end
        self._tokens += token_ids

    def propose(self, most: int, stops: Set[int] = frozenset()) -> Proposal:
        """What followed the longest n-gram that ends the text, at its latest place before.

        Args:
            most: tokens of it.
            stops: tokens behind which there is nothing.
        """
        place, match = self._place()
        if not match:
            return NOTHING
        drafts = self._tokens[place : place + most]
        size = len(drafts)
        for at in range(most - size):  # a text that repeats itself goes on with what it drafts
            drafts.append(drafts[at])
        if not stops.isdisjoint(drafts):
            first = next(k for k, draft in enumerate(drafts) if draft in stops)
            del drafts[first + 1 :]
        return Proposal(drafts, match)

    def _place(self) -> tuple[int, int]:
        """Behind the longest n-gram that ends the text as well, and its length; 0, 0 for none."""
        best, longest = 0, 0
        if len(self._tokens) < self._shortest:
            return best, longest
        place = self._latest.get(self._end, 0)
        for _ in range(MOST_CANDIDATES):
            if not place:
                break
            length = self._match(place)
            if length > longest:
                best, longest = place, length
            if length == self._longest:
                break
            place = self._before[place]
        return best, longest

    def _match(self, place: int) -> int:
        """How many tokens before ``place`` are those that end the text."""
        tokens, length = self._tokens, self._shortest
        most = min(self._longest, place)
        while length < most and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        return length


def look_up(sequence: Sequence, sizes: tuple[int, int], most: int) -> Proposal:
    """At most so many drafts for a request.

    Args:
        sequence: the request, which keeps the index of its text.
        sizes: of the longest n-gram and the shortest.
        most: drafts.
    """
    index: NgramIndex | None = sequence.ngrams
    if index is None:
        index = sequence.ngrams = NgramIndex(*sizes)
    index.extend(sequence.tokens(index.num_tokens, sequence.num_tokens))
    return index.propose(most, sequence.stop_set) if most > 0 else NOTHING
