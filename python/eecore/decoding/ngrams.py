"""Drafts out of the text itself: what followed the last tokens where they occurred before.

(Prompt lookup decoding, Saxena 2023; LLMA, Yang et al. 2023.)
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Ordered

from eecore.decoding.proposal import NOTHING, Proposal
from eecore.scheduling.sequence import Sequence

__all__ = ["NgramIndex", "look_up"]

MOST_CANDIDATES = 64
"""Earlier places that are compared, the latest ones."""


class NgramIndex:
    """Where n-grams occurred in a text that grows.

    Args:
        longest: tokens of the n-gram that ends the text, at most.
        shortest: tokens of it at least.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest, self._shortest = longest, shortest
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], list[int]] = {}
        """Positions behind every n-gram of the shortest kind, in ascending order."""

    @property
    def num_tokens(self) -> int:
        """Of the text so far."""
        return len(self._tokens)

    def extend(self, token_ids: Ordered[int]) -> None:
        """The text goes on."""
        tokens, behind, size = self._tokens, self._behind, self._shortest
        first = max(len(tokens) - size, 0)
        tokens += token_ids
        # What ended the text has a token behind it now.
        for place in range(first + size, len(tokens)):
            behind.setdefault(tuple(tokens[place - size : place]), []).append(place)

    def propose(self, most: int, stops: Collection[int] = ()) -> Proposal:
        """What followed the longest n-gram that ends the text, at its latest place before.

        Args:
            most: tokens of it.
            stops: tokens behind which there is nothing.
        """
        place, match = self._place()
        if not match:
            return NOTHING
        # What follows may reach into the proposal itself, where a text repeats itself.
        size = len(self._tokens)
        drafts: list[int] = []
        for at in range(place, place + most):
            drafts.append(self._tokens[at] if at < size else drafts[at - size])
            if drafts[-1] in stops:
                break
        return Proposal(drafts, match)

    def _place(self) -> tuple[int, int]:
        """Behind the longest n-gram that ends the text as well, and its length; 0, 0 for none."""
        tokens, size = self._tokens, self._shortest
        places = self._behind.get(tuple(tokens[-size:])) if len(tokens) >= size else None
        best, longest = 0, 0
        for place in places[: -MOST_CANDIDATES - 1 : -1] if places else ():
            length = self._match(place)
            if length > longest:
                best, longest = place, length
            if length == self._longest:
                break
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
