"""The sources of drafts, and the drafts that a request gets from them."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from itertools import takewhile
from operator import eq

from eecore.planning.draft_state import DraftState
from eecore.planning.heads import AheadDrafts
from eecore.planning.ngrams import TextDrafts, text_index
from eecore.planning.past_outputs import PastDrafts
from eecore.planning.proposal import DraftSource, Proposal
from eecore.scheduling.scheduler import Work

HEAD = AheadDrafts()
SOURCES: tuple[DraftSource, ...] = (HEAD, TextDrafts(), PastDrafts())
"""All sources; a request gets proposals from the sources that serve it."""


def proposals(works: Ordered[Work], verified: Ordered[Ordered[int] | None]) -> list[list[Proposal]]:
    """The proposals of the sources for each ``Auto`` request, as far as its guide allows.

    Args:
        works: the requests' works.
        verified: for each the drafts that a round in flight verifies, after which the proposed ones
            come; None: the text is known.
    """
    found = []
    for work, in_flight in zip(works, verified, strict=True):
        sequence, most, several = work.sequence, work.max_drafts, list[Proposal]()
        draft: DraftState = sequence.draft
        if draft.sources is None:
            draft.sources = [source for source in SOURCES if source.serves(draft)]
        for source in draft.sources:
            if in_flight is None:
                proposal = source.propose(sequence, draft, most)
            else:
                proposal = source.propose(sequence, draft, len(in_flight) + 1 + most)
                proposal = proposal.after(in_flight, most)
            if draft.guided is not None:
                proposal = guided_proposal(work, draft, proposal)
            if proposal.tokens:
                several.append(proposal)
        found.append(several)
    return found


def given_by_policy(
    works: Ordered[Work], verified: Ordered[Ordered[int] | None]
) -> list[list[int]]:
    """The drafts of requests whose policies name their source: the text, a draft head or a guide.

    Args:
        works: the requests' works.
        verified: for each the drafts that a round in flight verifies, as in :func:`proposals`.
    """
    given = []
    for work, in_flight in zip(works, verified, strict=True):
        sequence, most, tokens = work.sequence, work.max_drafts, list[int]()
        draft: DraftState = sequence.draft
        if draft.route.ngrams is not None:
            index, stops = draft.index or text_index(sequence, draft), sequence.stop_set
            more = sequence.output_ids[len(index.tokens) - len(sequence.prompt_ids) :]
            if in_flight is None:
                tokens, _ = index.propose(most, stops, more)
            else:  # as in Proposal.after
                tokens, _ = index.propose(len(in_flight) + 1 + most, stops, more)
                first = 1 + sum(takewhile(bool, map(eq, in_flight, tokens)))
                tokens = tokens[first : first + most]
        elif draft.ahead is not None and in_flight is None:  # else they are on the device
            proposal = HEAD.propose(sequence, draft, most)
            threshold = draft.route.draft_threshold or 0.0
            likely = takewhile(threshold.__le__, proposal.scores)
            tokens = proposal.tokens[: len(list(likely))]
        if draft.guided is not None:
            tokens = guided_proposal(work, draft, Proposal(tokens)).tokens
        given.append(tokens)
    return given


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
