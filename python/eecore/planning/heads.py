"""Drafts that the model's draft head made at the end of the round before: a source of drafts."""

from __future__ import annotations

from eecore.planning.draft_state import DraftState
from eecore.planning.proposal import NOTHING, Proposal
from eecore.scheduling.sequence import Sequence

__all__ = ["HeadDrafts"]


class HeadDrafts:
    """The drafts of a draft head: a :class:`~eecore.planning.proposal.DraftSource`."""

    name = "head"

    def serves(self, draft: DraftState) -> bool:
        """Whether a head has drafted for the request."""
        return draft.ahead is not None

    def propose(self, sequence: Sequence, draft: DraftState, most: int) -> Proposal:
        """What the head drafted, if the text is still the one that it drafted after."""
        ahead = draft.ahead
        if (
            ahead is None
            or most <= 0
            or ahead.num_tokens != sequence.num_tokens
            or ahead.last != sequence.output_ids[-1]
        ):
            return NOTHING
        return Proposal(ahead.tokens[:most], self.name, ahead.probabilities[:most])
