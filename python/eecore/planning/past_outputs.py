"""Drafts out of an engine's past outputs: for repeated requests, agents and evaluations.

(SuffixDecoding, Oliaro et al. 2024.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eecore.planning.ngrams import TOKEN_BITS, NgramIndex, match_scores, until
from eecore.planning.proposal import Drafts
from eecore.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from eecore.planning.draft_state import DraftState

LONGEST = 16
"""Maximum length of the n-grams that are looked up."""
SHORTEST = 3
"""Minimum length: longer than in a request's own text, as outputs share short n-grams by chance.
"""
END = (1 << TOKEN_BITS) - 1
"""Separates two outputs; no vocabulary has this token."""


class PastOutputs:
    """The last outputs of an engine's requests, each after the end of its prompt.

    They are kept in two halves, of which the older one is dropped once the newer one is full. An
    output that recurs is added again, so that it stays.
    """

    def __init__(self, max_tokens: int) -> None:
        self._half = max_tokens // 2
        self._newer, self._older = NgramIndex(LONGEST, SHORTEST), NgramIndex(LONGEST, SHORTEST)

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept."""
        return len(self._newer.tokens) + len(self._older.tokens)

    def add(self, sequence: Sequence) -> None:
        """Keep the output of a request that has ended; only the beginning of a long one."""
        first = max(sequence.num_prompt_tokens - LONGEST, 0)
        end = min(sequence.num_tokens, first + self._half - 1)
        if end <= sequence.num_prompt_tokens:
            return
        tokens = [*sequence.tokens(first, end), END]
        if len(self._newer.tokens) + len(tokens) > self._half:
            self._newer, self._older = NgramIndex(LONGEST, SHORTEST), self._newer
        self._newer.extend(tokens)

    def following(self, ending: list[int], most: int) -> tuple[list[int], int]:
        """The tokens after the longest n-gram that ends a text, and its length; see NgramIndex."""
        newer = self._newer.propose(most, ending=ending)
        older = self._older.propose(most, ending=ending)
        return newer if newer[1] >= older[1] else older


class PastDrafts:
    """Drafts that are looked up in past outputs: a :class:`DraftSource` of ``Auto``."""

    name = "past"

    def serves(self, draft: DraftState) -> bool:
        """Whether the engine keeps past outputs for a request that chooses its drafts."""
        return draft.past is not None and draft.route.ngrams is not None

    def propose(self, sequence: Sequence, draft: DraftState, most: int) -> Drafts:
        """The tokens that followed the longest n-gram that ends the text, in a past output."""
        if most <= 0:
            return [], ()
        assert draft.past is not None
        num_tokens = sequence.num_tokens
        ending = sequence.tokens(max(num_tokens - LONGEST, 0), num_tokens)
        tokens, match = draft.past.following(ending, most)
        tokens = until(tokens, sequence.stop_set | {END})
        if tokens and tokens[-1] == END:
            del tokens[-1]
        return tokens, match_scores(match, len(tokens))
