"""The sources of drafts, and the drafts that a request gets from them."""

from __future__ import annotations

from itertools import takewhile

from eecore.planning.draft_state import DraftState
from eecore.planning.heads import AheadDrafts
from eecore.planning.ngrams import TextDrafts
from eecore.planning.past_outputs import PastDrafts
from eecore.planning.proposal import NOTHING, DraftSource, Proposal
from eecore.scheduling.scheduler import Work

SOURCES: tuple[DraftSource, ...] = (AheadDrafts(), TextDrafts(), PastDrafts())
"""All sources; a request gets proposals from the sources that serve it."""


def proposals(work: Work, draft: DraftState) -> list[Proposal]:
    """The proposal of each source for an ``Auto`` request, as far as its guide allows."""
    found, sequence, most = [], work.sequence, work.max_drafts
    for source in SOURCES:
        if source.serves(draft):
            proposal = source.propose(sequence, draft, most)
            if draft.guided is not None:
                proposal = guided_proposal(work, draft, proposal)
            if proposal.tokens:
                found.append(proposal)
    return found


def given_by_policy(work: Work, draft: DraftState) -> Proposal:
    """The drafts of a request whose policy names the source."""
    threshold = draft.route.draft_threshold or 0.0
    proposal = NOTHING
    for source in SOURCES:
        if source.serves(draft):
            proposal = source.propose(work.sequence, draft, work.max_drafts)
            if threshold > 0.0:
                sure = list(takewhile(lambda score: score >= threshold, proposal.scores))
                proposal = proposal.first(len(sure))
            break
    return guided_proposal(work, draft, proposal)


def guided_proposal(work: Work, draft: DraftState, proposal: Proposal) -> Proposal:
    """The proposed tokens that the grammar allows, followed by the tokens that it forces."""
    guided, sequence, most = draft.guided, work.sequence, work.max_drafts
    if guided is None or most <= 0:
        return proposal
    tokens = guided.drafts(sequence.output_ids, proposal.tokens, most, sequence.stop_set)
    pairs = zip(tokens, proposal.tokens, proposal.scores, strict=False)
    kept = [score for _, _, score in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    source = proposal.source or "guide"
    return Proposal(tokens, source, kept + [1.0] * (len(tokens) - len(kept)))
