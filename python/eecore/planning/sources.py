"""The sources of drafts, and the drafts that a request gets from them."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from itertools import takewhile
from operator import eq

from eecore.planning.draft_state import DraftSource, DraftState
from eecore.planning.heads import AheadDrafts
from eecore.planning.ngrams import NgramIndex, match_scores
from eecore.planning.proposal import Drafts, Proposal
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Sequence


class TextDrafts:
    """Drafts that are looked up in the request's own text: a :class:`DraftSource`."""

    name = "text"

    def serves(self, draft: DraftState) -> bool:
        """Whether the policy looks drafts up."""
        return draft.route.ngrams is not None

    def propose(self, sequence: Sequence, draft: DraftState, most: int) -> Drafts:
        """The tokens after the longest n-gram that ends the text, at its latest earlier place."""
        index = draft.index or text_index(sequence, draft)
        more = sequence.output_ids[len(index.tokens) - len(sequence.prompt_ids) :]
        tokens, match = index.propose(max(most, 0), sequence.stop_set, more)
        return tokens, match_scores(match, len(tokens))


def text_index(sequence: Sequence, draft: DraftState) -> NgramIndex:
    """The index of a request's text, which has its prompt at first."""
    assert draft.route.ngrams is not None
    draft.index = NgramIndex(*draft.route.ngrams)
    draft.index.extend(sequence.prompt_ids)
    return draft.index


HEAD = AheadDrafts()
SOURCES: tuple[DraftSource, ...] = (HEAD, TextDrafts())
"""All sources; a request gets proposals from the sources that serve it."""


def proposals(works: Ordered[Work], verified: Ordered[Ordered[int] | None]) -> list[list[Proposal]]:
    """The proposals of the sources for each ``Auto`` request, as far as its guide allows.

    While a round is in flight a source proposes how the text goes on from before that round. The
    round is expected to give those of its drafts that agree with the proposal, and one token more;
    the drafts are the proposed tokens after them.

    Args:
        works: the requests' works.
        verified: for each the drafts that a round in flight verifies; None: the text is known.
    """
    found = []
    for work, in_flight in zip(works, verified, strict=True):
        sequence, most, several = work.sequence, work.max_drafts, list[Proposal]()
        draft = sequence.draft
        assert draft is not None
        if draft.sources is None:
            draft.sources = [source for source in SOURCES if source.serves(draft)]
        for source in draft.sources:
            given = 0 if in_flight is None else len(in_flight) + 1
            tokens, scores = source.propose(sequence, draft, given + most)
            before: Drafts | None = None
            if in_flight is not None and tokens:
                given = 1 + sum(takewhile(bool, map(eq, in_flight, tokens)))
                before, end = (tokens[:given], scores[:given]), given + most
                tokens, scores = tokens[given:end], scores[given:end]
            name = source.name
            if sequence.is_masked:
                name = name if tokens else "guide"
                tokens, scores = guided_drafts(work, draft, tokens, scores)
            if tokens:
                several.append(Proposal(tokens, name, scores, before))
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
        draft = sequence.draft
        assert draft is not None
        if draft.route.ngrams is not None:
            index, stops = draft.index or text_index(sequence, draft), sequence.stop_set
            more = sequence.output_ids[len(index.tokens) - len(sequence.prompt_ids) :]
            if in_flight is None:
                tokens, _ = index.propose(most, stops, more)
            else:  # as in proposals
                tokens, _ = index.propose(len(in_flight) + 1 + most, stops, more)
                first = 1 + sum(takewhile(bool, map(eq, in_flight, tokens)))
                tokens = tokens[first : first + most]
        elif draft.ahead is not None and in_flight is None:  # else they are on the device
            tokens, scores = HEAD.propose(sequence, draft, most)
            threshold = draft.route.draft_threshold or 0.0
            tokens = tokens[: len(list(takewhile(threshold.__le__, scores)))]
        if sequence.is_masked:
            tokens, _ = guided_drafts(work, draft, tokens, ())
        given.append(tokens)
    return given


def guided_drafts(
    work: Work, draft: DraftState, tokens: list[int], scores: Ordered[float]
) -> Drafts:
    """The proposed tokens that the grammar allows, followed by the tokens that it forces."""
    guided, sequence, most = draft.guided, work.sequence, work.max_drafts
    if guided is None or most <= 0:
        return tokens, scores
    allowed = guided.drafts(sequence.output_ids, tokens, most, sequence.stop_set)
    pairs = zip(allowed, tokens, scores, strict=False)
    kept = [score for _, _, score in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return allowed, kept + [1.0] * (len(allowed) - len(kept))
