"""The state that decoding keeps for one request, in ``Sequence.draft``, and its draft sources."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from eecore.planning.draft_stop import AdaptiveDraftStop
from eecore.planning.guided import Guided
from eecore.planning.ngrams import NgramIndex
from eecore.planning.odds import Odds
from eecore.planning.proposal import Ahead, Drafts
from eecore.planning.route import GIVEN, Route, make_route
from eecore.planning.thoughts import GuidedThought
from eecore.scheduling.sequence import Sequence

AnyGuided = Guided | GuidedThought


@dataclass(slots=True)
class DraftState:
    """How one request decodes, and what one of its rounds keeps for the next."""

    route: Route
    guided: AnyGuided | None = None
    """The request's progress through its thought and its guide."""
    stop: AdaptiveDraftStop | None = None
    """The adaptive draft threshold of DraftAndVerify, updated by committed rounds."""
    ahead: Ahead | None = None
    """The drafts that a draft head made after the last round."""
    forced: int = 0
    """The first drafts of the next round, which are accepted whatever the model gives."""
    index: NgramIndex | None = None
    """The n-grams of the text, for a request whose drafts are looked up."""
    sources: list[DraftSource] | None = None
    """The sources that serve an ``Auto`` request, once it has been planned."""
    routes: dict[int, Route] = field(default_factory=dict)
    """The routes of an ``Auto`` request by the layer that drafts; 0: drafts are given."""
    num_known: int = 0
    """Tokens of the text that a draft head knows."""
    odds: Odds | None = None
    """How often the request's drafts are accepted, once ``Auto`` has chosen for it."""
    lead: float = 0.0
    """Tokens of the request's rounds, less the tokens of full depth in the same time."""


class DraftSource(Protocol):
    """Proposes drafts without running the model."""

    @property
    def name(self) -> str:
        """The name under which the acceptance rates of this source are counted."""

    def serves(self, draft: DraftState) -> bool:
        """Whether a request's policy lets this source draft for it, now and later."""

    def propose(self, sequence: Sequence, draft: DraftState, most: int) -> Drafts:
        """Propose at most ``most`` drafts after a request's last token."""


def draft_state(
    sequence: Sequence, exit_layers: range, guided: AnyGuided | None = None
) -> DraftState:
    """The state of a request, made when it is first needed.

    Args:
        exit_layers: exit layers of the model, the last one full depth.
        guided: the beginning of the request's guide, if it has one.
    """
    state = sequence.draft
    if state is None:
        route = make_route(sequence.exit, exit_layers, sequence.sampling.temperature > 0.0)
        drafts = route.path is not None and not route.path.is_given
        if guided is not None and guided.binds_all and drafts:
            # The masks after drafts are computed before a round, so the drafts have to be given.
            route = Route(sequence.exit, exit_layers[-1], path=GIVEN)
        stop = None
        if route.adaptive:
            assert route.draft_threshold is not None
            stop = AdaptiveDraftStop(route.draft_threshold, route.draft_threshold)
        state = sequence.draft = DraftState(route, guided, stop)
    return state


def guided_of(sequence: Sequence) -> AnyGuided | None:
    """The progress of a request through its thought and its guide, if masks follow them."""
    state = sequence.draft
    return None if state is None else state.guided


def exit_thresholds(route: Route, sequence: Sequence, t: int) -> list[float]:
    """The threshold of each exit point for a request's token ``t``; infinity where it cannot exit.

    Where rows exit in thoughts alone, ``t`` is the next token.
    """
    if route.in_thought:
        guided = guided_of(sequence)
        is_thought = isinstance(guided, GuidedThought) and guided.is_thought(sequence.output_ids)
        if not is_thought:
            return [inf] * len(route.points)
    return route.thresholds(t, sequence.sampling.max_tokens)


def route_of(sequence: Sequence, exit_layers: range) -> Route:
    """The route of a request."""
    return draft_state(sequence, exit_layers).route
