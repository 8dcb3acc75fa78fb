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


def proposals(work: Work, draft: DraftState, verified: list[int] | None = None) -> list[Proposal]:
    """The proposal of each source for an ``Auto`` request, as far as its guide allows.

    Args:
        work: the request's work.
        draft: its state.
        verified: the drafts that a round in flight verifies, after which the proposed ones come;
            None: the text is known.
    """
    found = []
    for source in SOURCES:
        if source.serves(draft):
            proposal = _proposed(source, work, draft, verified)
            if draft.guided is not None:
                proposal = guided_proposal(work, draft, proposal)
            if proposal.tokens:
                found.append(proposal)
    return found


def given_by_policy(work: Work, draft: DraftState, verified: list[int] | None = None) -> Proposal:
    """The drafts of a request whose policy names the source; see :func:`proposals`."""
    threshold = draft.route.draft_threshold or 0.0
    proposal = NOTHING
    for source in SOURCES:
        if source.serves(draft):
            proposal = _proposed(source, work, draft, verified)
            if threshold > 0.0:
                sure = list(takewhile(lambda score: score >= threshold, proposal.scores))
                proposal = proposal.first(len(sure))
            break
    return proposal if draft.guided is None else guided_proposal(work, draft, proposal)


def _proposed(
    source: DraftSource, work: Work, draft: DraftState, verified: list[int] | None
) -> Proposal:
    """The proposal of one source."""
    if verified is None:
        return source.propose(work.sequence, draft, work.max_drafts)
    most = work.max_drafts
    proposal = source.propose(work.sequence, draft, len(verified) + 1 + most)
    return proposal.after(verified, most)


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
