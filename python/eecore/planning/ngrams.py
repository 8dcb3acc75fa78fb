"""Drafts out of the text itself: the tokens that followed its last ones at an earlier place.

(Prompt lookup decoding, Saxena 2023; LLMA, Yang et al. 2023.)
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from collections.abc import Set
from typing import TYPE_CHECKING

from eecore.planning.proposal import NOTHING, Proposal
from eecore.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from eecore.planning.draft_state import DraftState

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
        self._tokens: list[int] = []
        # The shortest n-gram that ends the text, as one number: there are as many as tokens, and
        # the garbage collector does not visit numbers.
        self._end, self._mask = 0, (1 << shortest * TOKEN_BITS) - 1
        self._latest: dict[int, int] = {}
        """For each such n-gram the position after its latest occurrence."""
        self._before: list[int] = []
        """For each position the previous position after the same n-gram; 0 for none."""

    @property
    def num_tokens(self) -> int:
        """The length of the text so far."""
        return len(self._tokens)

    def extend(self, token_ids: Ordered[int]) -> None:
        """Append tokens to the text."""
        latest, before, size = self._latest, self._before, self._shortest
        end, mask = self._end, self._mask
        for place, token in enumerate(token_ids, len(self._tokens)):
            if place >= size:  # now a token follows the n-gram that ended the text
                before.append(latest.get(end, 0))
                latest[end] = place
            else:
                before.append(0)
            end = (end << TOKEN_BITS | token) & mask
        self._end = end
        self._tokens += token_ids

    def propose(self, most: int, stops: Set[int] = frozenset()) -> tuple[list[int], int]:
        """The tokens that followed the longest n-gram that ends the text at its latest earlier
        place, and the length of that n-gram; [] and 0 where there is none.

        Args:
            stops: tokens that end a text: no draft follows one.
        """
        if len(self._tokens) < self._shortest:
            return [], 0
        place, match = self._place(self._end, self._tokens)
        if not match:
            return [], 0
        drafts = self._tokens[place : place + most]
        size = len(drafts)
        for at in range(most - size):  # the end of the text was reached: the drafts repeat
            drafts.append(drafts[at])
        return until(drafts, stops), match

    def following(self, ending: Ordered[int], most: int) -> tuple[list[int], int]:
        """The tokens that followed, in this text, the longest n-gram that ends another text, at its
        latest place, and the length of that n-gram; [] and 0 where there is none.

        Args:
            ending: the last tokens of the other text.
        """
        if len(ending) < self._shortest:
            return [], 0
        end = 0
        for token in ending[-self._shortest :]:
            end = end << TOKEN_BITS | token
        place, match = self._place(end, ending)
        return (self._tokens[place : place + most] if match else []), match

    def _place(self, end: int, ending: Ordered[int]) -> tuple[int, int]:
        """The place after the longest n-gram that also ends ``ending``, and its length; or 0, 0."""
        best, longest = 0, 0
        place = self._latest.get(end, 0)
        for _ in range(MAX_CANDIDATES):
            if not place:
                break
            length = self._match(place, ending)
            if length > longest:
                best, longest = place, length
            if length == self._longest:
                break
            place = self._before[place]
        return best, longest

    def _match(self, place: int, ending: Ordered[int]) -> int:
        """How many tokens before ``place`` equal the last tokens of ``ending``."""
        tokens, length = self._tokens, self._shortest
        most = min(self._longest, place, len(ending))
        while length < most and tokens[place - 1 - length] == ending[-1 - length]:
            length += 1
        return length


class TextDrafts:
    """Drafts that are looked up in the request's own text: a :class:`DraftSource`."""

    name = "text"

    def serves(self, draft: DraftState) -> bool:
        """Whether the policy looks drafts up."""
        return draft.route.ngrams is not None

    def propose(self, sequence: Sequence, draft: DraftState, most: int) -> Proposal:
        """The tokens after the longest n-gram that ends the text, at its latest earlier place."""
        index = draft.index
        if index is None:
            assert draft.route.ngrams is not None
            index = draft.index = NgramIndex(*draft.route.ngrams)
        index.extend(sequence.tokens(index.num_tokens, sequence.num_tokens))
        if most <= 0:
            return NOTHING
        tokens, match = index.propose(most, sequence.stop_set)
        return Proposal(tokens, self.name, match_scores(match, len(tokens)))


def until(drafts: list[int], stops: Set[int]) -> list[int]:
    """The drafts up to the first one in ``stops``, which is included."""
    if not stops.isdisjoint(drafts):
        first = next(k for k, draft in enumerate(drafts) if draft in stops)
        del drafts[first + 1 :]
    return drafts


def match_scores(match: int, count: int) -> tuple[float, ...]:
    """The scores of ``count`` drafts after an n-gram of ``match`` tokens."""
    scores = MATCH_SCORES[match : match + count]
    return scores + MATCH_SCORES[-1:] * (count - len(scores))
