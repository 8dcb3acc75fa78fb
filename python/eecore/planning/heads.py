"""Drafts that the model's draft head made at the end of the last round: a source of drafts."""

from __future__ import annotations

from eecore.models import DraftHead
from eecore.planning.draft_state import DraftState
from eecore.planning.proposal import MAX_AHEAD, Drafts
from eecore.scheduling.sequence import Sequence


class AheadDrafts:
    """The drafts of a draft head: a :class:`~eecore.planning.draft_state.DraftSource`."""

    name = "head"

    def serves(self, draft: DraftState) -> bool:
        """Whether the policy lets a head draft."""
        return draft.route.auto is not None and draft.route.auto.head

    def propose(self, sequence: Sequence, draft: DraftState, most: int) -> Drafts:
        """The head's drafts, if the text still ends where it drafted."""
        ahead, num_tokens = draft.ahead, len(sequence.prompt_ids) + len(sequence.output_ids)
        if (
            ahead is None
            or most <= 0
            or ahead.num_tokens != num_tokens
            or ahead.last != sequence.output_ids[-1]
        ):
            return [], ()
        return ahead.tokens[:most], ahead.probabilities[:most]


def max_ahead(head: DraftHead | None) -> int:
    """Maximum number of drafts that a head makes at the end of a round."""
    return MAX_AHEAD if head is None else head.num_at_once or MAX_AHEAD
