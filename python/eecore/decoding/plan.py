"""What each decoding request does in an iteration: its route, and the drafts that it is given.

For most that follows from their policy alone; the rounds of ``Auto`` requests are chosen here.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from functools import cached_property

from eecore.decoding.chooser import Chooser, History
from eecore.decoding.ngrams import NOTHING, Proposal, look_up
from eecore.decoding.outcome import Outcome
from eecore.decoding.route import LOOKED_UP, DraftPath, Route, route_of
from eecore.models import Network
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Sequence

__all__ = ["Planned", "Planner"]


@dataclass(frozen=True)
class Planned:
    """What one request does."""

    work: Work
    route: Route
    drafts: Ordered[int] = ()
    """That it is given."""
    match: int = 0
    """Tokens that were found where the drafts were looked up."""


class Planner:
    """Plans the iterations of one model, and learns from how they went.

    Args:
        model: the model.
    """

    def __init__(self, model: Network) -> None:
        self._model = model
        self._num_layers = model.config.num_layers

    @cached_property
    def chooser(self) -> Chooser:
        """Of ``Auto`` requests, once there is one."""
        source = self._model.source
        agreement = None if source is None else source.exit_agreement(self._num_layers)
        return Chooser(self._num_layers, agreement)

    def route(self, sequence: Sequence) -> Route:
        """Of a request, as its policy says."""
        return route_of(sequence, self._num_layers)

    def chooses(self, works: Ordered[Work]) -> bool:
        """Whether what some of them do is chosen."""
        return any(self.route(work.sequence).auto is not None for work in works)

    def plan(self, works: Ordered[Work]) -> list[Planned]:
        """For decoding requests, in their order."""
        routes = [self.route(work.sequence) for work in works]
        proposals = [_proposal(*each) for each in zip(works, routes, strict=True)]
        planned = [
            Planned(work, route, proposal.tokens, proposal.match)
            for work, route, proposal in zip(works, routes, proposals, strict=True)
        ]
        free = [i for i, route in enumerate(routes) if route.auto is not None]
        if free:
            chosen = self._chosen([planned[i] for i in free])
            for i, each in zip(free, chosen, strict=True):
                planned[i] = each
        return planned

    def _chosen(self, planned: list[Planned]) -> list[Planned]:
        """What ``Auto`` requests do, all of them the same."""
        histories = [self._history(each.work.sequence) for each in planned]
        choice = self.chooser.choose(
            histories,
            [Proposal(list(each.drafts), each.match) for each in planned],
            [each.work.max_drafts for each in planned],
            exit_layers=self._exit_layers(planned),
        )
        if choice.kind == "full":
            return [Planned(each.work, each.route) for each in planned]
        works = [
            each.work._replace(max_drafts=count)
            for each, count in zip(planned, choice.drafts, strict=True)
        ]
        path = _path(choice.exit_layer)
        return [
            Planned(
                work,
                replace(each.route, path=path),
                each.drafts[: work.max_drafts] if path.is_given else (),
                each.match,
            )
            for each, work in zip(planned, works, strict=True)
        ]

    def _exit_layers(self, planned: list[Planned]) -> tuple[int, ...]:
        """That may draft: none where somebody draws tokens, which would be others then."""
        if any(each.work.sequence.sampling.temperature > 0.0 for each in planned):
            return ()
        allowed = [self.chooser.exit_layers(each.route.auto) for each in planned if each.route.auto]
        return tuple(layer for layer in allowed[0] if all(layer in other for other in allowed))

    def _history(self, sequence: Sequence) -> History:
        history: History | None = sequence.drafting
        if history is None:
            history = sequence.drafting = self.chooser.history()
        return history

    # Learning

    def learn(
        self,
        planned: Ordered[Planned],
        outcomes: Ordered[Outcome],
        seconds: float,
        *,
        went_on: bool,
    ) -> None:
        """How a run went that was not its program's first one.

        Args:
            planned: who took part.
            outcomes: what came of it, for each.
            seconds: that it took.
            went_on: whether it went on from the program's last run.
        """
        free = [
            (each, outcome)
            for each, outcome in zip(planned, outcomes, strict=True)
            if self.route(each.work.sequence).auto is not None and outcome.error is None
        ]
        if not free:
            return
        rows, path = len(planned), free[0][0].route.path
        if path is None:
            if all(
                each.route.depth == self._num_layers and not each.route.points for each in planned
            ):
                self.chooser.learn_full(rows, seconds, is_steady=went_on)
            return
        drafted = [outcome.counters.drafted for outcome in outcomes]
        layer = path.num_layers
        self.chooser.learn_round(layer, rows, sum(drafted), max(drafted), seconds)
        for each, outcome in free:
            counters, history = outcome.counters, self._history(each.work.sequence)
            self.chooser.learn_drafts(
                layer, history, each.match, counters.drafted, counters.accepted
            )


def _proposal(work: Work, route: Route) -> Proposal:
    if route.ngrams is None:
        return NOTHING
    return look_up(work.sequence, route.ngrams, work.max_drafts)


def _path(exit_layer: int) -> DraftPath:
    """By which a chosen round drafts."""
    return LOOKED_UP if exit_layer == 0 else DraftPath(exit_layer, exit_layer)
