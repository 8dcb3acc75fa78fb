"""What each decoding request does in an iteration: its route, and the drafts that it is given.

For most that follows from their policy alone; the rounds of ``Auto`` requests are chosen here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from eecore.exits import Exit
from eecore.models import DraftHead, Network
from eecore.planning.budget import Budget
from eecore.planning.chooser import Chooser
from eecore.planning.guided import Guided
from eecore.planning.history import History
from eecore.planning.ngrams import look_up
from eecore.planning.outcome import Outcome
from eecore.planning.proposal import MOST_AHEAD, NOTHING, Ahead, Proposal
from eecore.planning.route import GIVEN, DraftPath, Route, route_of
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Sequence

__all__ = ["Planned", "Planner"]

FRESH = object()
"""What a request has in place of a history before anybody looks for it."""
MOST_COUNTED = 8
"""Rounds without a look that are counted before anything is learnt of them."""


class Planned(NamedTuple):
    """What one request does."""

    work: Work
    route: Route
    given: Proposal = NOTHING
    """Drafts that it is given."""
    ahead: int = 0
    """Drafts that a draft head is to make for the next round at most."""
    ahead_thresholds: Ordered[float] = ()
    """Behind the first, the second, ... of these there is none if its probability is below it."""


@dataclass(slots=True)
class _Rest:
    """Rounds in which nobody looks, and of which the budget is not told yet."""

    budget: Budget
    requests: int
    most: int
    """As many as there are until it is told."""
    rounds: int = 0


class Planner:
    """Plans the iterations of one model, and learns from how they went.

    Args:
        model: the model.
        num_threads: of a CPU, of which it depends how long passes take.
    """

    def __init__(self, model: Network, num_threads: int) -> None:
        self._model, self.num_threads = model, num_threads
        self._num_layers = model.config.num_layers
        self._has_head = model.draft_head is not None
        self._chooser: Chooser | None = None  # of this iteration
        self._routes: dict[tuple[Exit, int, int], Route] = {}  # of Auto requests that draft
        self._free: list[Sequence] = []  # requests of Auto that were asked for last
        self._look: float | None = None  # seconds that it took to choose; None: nobody did
        self._learning = 0.0  # seconds that it took to learn of the last round
        self._begins = False  # whether all come from their prompts, whose pass emptied the caches
        self._between: float | None = None  # and from the last round to this one
        self._has_drafted = False  # whether that round had drafts, or made some
        self._is_due = False  # whether full depth was chosen to be measured
        self._rest: _Rest | None = None  # while rounds without a look are counted
        self.others_wait = False
        """Whether requests wait for those that are planned for to end."""

    @property
    def chooser(self) -> Chooser:
        """Of ``Auto`` requests. It stays with the model: another engine need not learn it again."""
        if self._chooser is None:
            head, source = self._model.draft_head, self._model.source
            key = self.num_threads, head
            chooser: Chooser | None = self._model.learnt.get(key)
            if chooser is None:
                agreement = None if source is None else source.exit_agreement(self._num_layers)
                chooser = self._model.learnt[key] = Chooser(
                    self._num_layers, agreement, None if head is None else head.settings.agreement
                )
            self._chooser = chooser
        return self._chooser

    def route(self, sequence: Sequence) -> Route:
        """Of a request, as its policy says."""
        return route_of(sequence, self._num_layers)

    @property
    def looked(self) -> bool:
        """Whether the last rounds that were planned had somebody choose what they do."""
        return self._look is not None

    def chooses(self, works: Ordered[Work]) -> bool:
        """Whether what some of them do is chosen; it is not where nobody is to look."""
        self._free, looks, self._chooser = [], False, None
        for work in works:
            sequence = work.sequence
            route = sequence.route or self.route(sequence)
            if route.auto is not None:
                self._free.append(sequence)
                if not sequence.is_resting:
                    looks = True
        between, self._between = self._between, None
        if between is not None and self._free and self._rest is None:
            self.chooser.costs.learn_between(len(self._free), between, drafts=self._has_drafted)
        self._has_drafted = False
        return looks

    def went_between(self, seconds: float) -> None:
        """The time since these same requests' last iteration, which none of them spent waiting."""
        self._between = seconds

    def went_on(self, rows: int, seconds: float) -> None:
        """The round of those that were asked for last went on as the one before, without a look.

        Where none is due for a while, rounds are counted, and one of several is learnt of: what is
        learnt of each would be much of what a small model's round takes.

        Args:
            rows: of the round.
            seconds: that it took.
        """
        requests = len(self._free)
        if not requests:
            return
        rest = self._rest
        if rest is not None and rest.requests == requests:
            rest.rounds += 1
            if rest.rounds < rest.most:
                return
        steady = self._count_rest() or 1
        budget = self.chooser.budget(requests)
        if rest is None or rest.requests != requests:
            budget.rested(1)
        if requests == rows:
            self.chooser.costs.learn_full(rows, seconds, steady=steady)
        _note_spent(self._free, budget)
        if budget.is_spent:
            self._rest = _Rest(budget, requests, min(budget.rests, MOST_COUNTED))

    def _count_rest(self) -> int:
        """Rounds that were counted, which the budget is told of now."""
        rest, self._rest = self._rest, None
        if rest is None or not rest.rounds:
            return 0
        rest.budget.rested(rest.rounds)
        return rest.rounds

    def plan(self, works: Ordered[Work]) -> list[Planned]:
        """For decoding requests, in their order."""
        started = time.perf_counter()
        planned: list[Planned] = []
        free: list[int] = []
        for work in works:
            route = self.route(work.sequence)
            if route.auto is not None:
                free.append(len(planned))
            planned.append(_planned(work, route))
        if free:
            chosen = self._chosen([planned[i] for i in free])
            for i, each in zip(free, chosen, strict=True):
                planned[i] = each
        head = self._model.draft_head
        if head is not None:
            for each in planned:
                if each.ahead:
                    _tell(head, each.work.sequence)
        if free and self._look is not None:
            self._look += time.perf_counter() - started
        return planned

    def _chosen(self, planned: list[Planned]) -> list[Planned]:
        """What ``Auto`` requests do, all of them the same."""
        self._look = None
        self._count_rest()
        rows, chooser, fresh = len(planned), self.chooser, 0
        budget = chooser.budget(rows)
        for each in planned:
            if each.work.sequence.drafting is None:
                each.work.sequence.drafting = FRESH
                fresh += 1
        self._begins = fresh == rows
        if fresh:
            budget.welcome(fresh / rows)
        if budget.is_spent:
            budget.rested(1)
            _note_spent([each.work.sequence for each in planned], budget)
            return planned
        self._look = self._learning
        histories, most = [], []
        proposals: list[list[Proposal]] = []
        exit_layers = _exit_layers(planned, chooser)
        looks_up = chooser.layers.is_lookup_due if exit_layers else True
        can_draft_ahead = self._has_head
        for each in planned:
            work, route = each.work, each.route
            histories.append(_history(work.sequence, chooser))
            proposals.append(_proposals(work, route) if looks_up else [])
            most.append(work.max_drafts)
            can_draft_ahead = can_draft_ahead and route.auto is not None and route.auto.head
        choice = chooser.choose(
            histories,
            proposals,
            most,
            exit_layers=exit_layers,
            written=[len(each.work.sequence.output_ids) for each in planned],
            can_draft_ahead=can_draft_ahead,
            others_wait=self.others_wait,
        )
        self._is_due = choice.is_due
        if choice.kind == "full":
            return planned
        layer = 0 if choice.kind == "given" else choice.exit_layer
        return [
            Planned(
                Work(each.work.sequence, each.work.num_tokens, count),
                self._drafting(each.route, layer),
                given,
                choice.ahead,
                choice.ahead_thresholds,
            )
            for each, count, given in zip(planned, choice.drafts, choice.given, strict=True)
        ]

    def _drafting(self, route: Route, layer: int) -> Route:
        """The route of an ``Auto`` request whose drafts a layer makes, or which is given some."""
        made = route.drafting.get(layer)
        if made is None:
            key = route.policy, route.depth, layer
            made = self._routes.get(key)
            if made is None:
                path = DraftPath(layer, layer) if layer else GIVEN
                made = self._routes[key] = replace(route, path=path)
            route.drafting[layer] = made
        return made

    # Learning

    def learn(
        self,
        planned: Ordered[Planned],
        outcomes: Ordered[Outcome],
        seconds: float,
        *,
        went_on: bool,
    ) -> None:
        """How a run went that was not its program's first one; nothing is learnt but of ``Auto``.

        Args:
            planned: who took part.
            outcomes: what came of it, for each.
            seconds: that it took.
            went_on: whether it went on from the program's last run.
        """
        free = []
        for each, outcome in zip(planned, outcomes, strict=True):
            if each.route.auto is not None and outcome.error is None:
                free.append((each, outcome))
        if free:
            started = time.perf_counter()
            self._learn(planned, outcomes, free, seconds, went_on)
            self._learning = time.perf_counter() - started

    def learn_end(self, sequence: Sequence, tokens: int, *, ends: bool) -> None:
        """A request got its last token; nothing is learnt but of ``Auto``.

        Args:
            sequence: its.
            tokens: that it has now.
            ends: whether its text came to its end; it was cut otherwise.
        """
        if sequence.drafting is not None:
            self.chooser.layers.lengths.add(tokens, ends=ends)

    def _learn(
        self,
        planned: Ordered[Planned],
        outcomes: Ordered[Outcome],
        free: list[tuple[Planned, Outcome]],
        seconds: float,
        went_on: bool,
    ) -> None:
        chooser = self.chooser
        rows, path = len(planned), free[0][0].route.path
        if path is None and self._look is None:
            self._learn_full(planned, seconds, went_on)
            return
        drafted = most = 0
        for outcome in outcomes:
            drafted += outcome.counters.drafted
            most = max(most, outcome.counters.drafted)
        layer, steps = 0, 0
        if path is not None:
            layer = path.num_layers
            steps = max([_num_ahead(*each) for each in free]) if path.is_given else most
            self._has_drafted = drafted + steps > 0
        if self._look is not None:
            look = chooser.costs.learn_look(len(free), self._look)
            budget = chooser.budget(len(free))
            took = None if path is None or self._begins else seconds
            tokens = float(rows)
            if path is not None:
                counts = [len(outcome.records) for outcome in outcomes]
                tokens = chooser.worth(counts, [_ends(outcome) for outcome in outcomes])
            gained = chooser.gained(
                *(rows, tokens, took), look=look, drafted=drafted, steps=steps, layer=layer
            )
            budget.looked(gained, found=path is not None or self._is_due)
            if rows > 1:  # one that is alone falls behind nobody
                got = [(_history(o.sequence, chooser), len(o.records)) for _, o in free]
                chooser.learn_leads(
                    *(rows, got, seconds + look), drafted=drafted, steps=steps, layer=layer
                )
            _note_spent([each.work.sequence for each, _ in free], budget)
        if path is None:
            self._learn_full(planned, seconds, went_on)
            return
        if not path.is_given:
            chooser.costs.learn_drafted(layer, rows, steps, seconds)
        elif not self._begins:  # no other pass is as slow
            chooser.costs.learn_given(rows, drafted, steps, seconds)
        for each, outcome in free:
            counters, sequence = outcome.counters, each.work.sequence
            drafted, accepted = counters.drafted, counters.accepted
            history = _history(sequence, chooser)
            chooser.learn_drafts(
                *(layer, history, each.given, drafted, accepted), written=len(sequence.output_ids)
            )
            if each.ahead and outcome.ahead is not None:
                chooser.learn_first_draft(history, outcome.ahead.probabilities[0])
            if each.ahead and _ahead_of(sequence) and not each.given.match:
                ahead = _num_ahead(each, outcome)
                chooser.learn_ahead(history, len(free), drafted, accepted, ahead)

    def _learn_full(self, planned: Ordered[Planned], seconds: float, went_on: bool) -> None:
        """How long a pass took, if it was of full depth for all."""
        for each in planned:
            if each.route.depth != self._num_layers or each.route.points:
                return
        self.chooser.costs.learn_full(len(planned), seconds, steady=int(went_on))


def _tell(head: DraftHead, sequence: Sequence) -> None:
    """What a text has that a head may draft from then on."""
    num_tokens = sequence.num_tokens
    head.know(sequence.tokens(sequence.num_known, num_tokens))
    sequence.num_known = num_tokens


def _ends(outcome: Outcome) -> bool:
    """Whether a text is known to end with what came of a round."""
    records, sequence = outcome.records, outcome.sequence
    return bool(records) and (
        records[-1].token_id in sequence.stop_set or len(records) >= sequence.tokens_left
    )


def _note_spent(sequences: Iterable[Sequence], budget: Budget) -> None:
    """Whether anybody is to look in their next round."""
    is_spent = budget.is_spent
    for sequence in sequences:
        sequence.is_resting = is_spent


def _history(sequence: Sequence, chooser: Chooser) -> History:
    """Of a request, which keeps it."""
    history: History | None = sequence.drafting
    if history is None or history is FRESH:
        history = sequence.drafting = chooser.history()
    return history


def _exit_layers(planned: list[Planned], chooser: Chooser) -> tuple[int, ...]:
    """That may draft: none where somebody has a guide, or draws tokens: they would be others."""
    allowed: tuple[int, ...] | None = None
    for each in planned:
        sequence, route = each.work.sequence, each.route
        if sequence.sampling.temperature > 0.0 or sequence.guided is not None:
            return ()
        if route.auto is not None:
            own = chooser.exit_layers(route.auto)
            if allowed is not None:
                own = tuple(layer for layer in allowed if layer in own)
            allowed = own
    return allowed or ()


def _planned(work: Work, route: Route) -> Planned:
    """What follows from a request's policy alone."""
    if route.path is None:
        return Planned(work, route)
    ahead, threshold = min(route.ahead, MOST_AHEAD), route.draft_threshold or 0.0
    return Planned(
        work, route, _guided(work, _given(work, route)), ahead, (threshold,) * MOST_AHEAD
    )


def _given(work: Work, route: Route) -> Proposal:
    """Drafts of a request whose policy leaves nothing to choose."""
    if route.ngrams is not None:
        return look_up(work.sequence, route.ngrams, work.max_drafts)
    if not route.ahead:
        return NOTHING
    drafted = _drafted_ahead(work)
    threshold = route.draft_threshold or 0.0
    sure = list(takewhile(lambda p: p >= threshold, drafted.probabilities))
    return drafted.first(len(sure))


def _proposals(work: Work, route: Route) -> list[Proposal]:
    """What there is for a request of ``Auto``."""
    found = [_drafted_ahead(work)]
    if route.ngrams is not None:
        found.append(look_up(work.sequence, route.ngrams, work.max_drafts))
    proposals = []
    for proposal in found:
        its = proposal if work.sequence.guided is None else _guided(work, proposal)
        if its.tokens:
            proposals.append(its)
    return proposals


def _guided(work: Work, proposal: Proposal) -> Proposal:
    """What a request's guide lets come of a proposal, and what it has come behind that."""
    sequence = work.sequence
    guided: Guided | None = sequence.guided
    if guided is None or work.max_drafts <= 0:
        return proposal
    tokens = guided.drafts(sequence.output_ids, proposal.tokens, work.max_drafts, sequence.stop_set)
    if proposal.tokens and not proposal.is_headed:
        return Proposal(tokens, proposal.match)
    pairs = zip(tokens, proposal.tokens, proposal.probabilities, strict=False)
    kept = [p for _, _, p in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return Proposal(tokens, 0, kept + [1.0] * (len(tokens) - len(kept)))


def _drafted_ahead(work: Work) -> Proposal:
    """What a draft head drafted, as far as there is room for it."""
    drafted, most = _ahead_of(work.sequence), work.max_drafts
    if drafted is None or most <= 0:
        return NOTHING
    return Proposal(drafted.tokens[:most], 0, drafted.probabilities[:most])


def _ahead_of(sequence: Sequence) -> Ahead | None:
    """What a draft head drafted behind a text that is still the same, if anything."""
    drafted: Ahead | None = sequence.ahead
    if (
        drafted is None
        or not drafted.tokens
        or drafted.num_tokens != sequence.num_tokens
        or drafted.after != sequence.output_ids[-1]
    ):
        return None
    return drafted


def _num_ahead(planned: Planned, outcome: Outcome) -> int:
    """Steps of a draft head that a round took for one request."""
    drafted: Ahead | None = outcome.ahead
    return planned.ahead and (1 if drafted is None else len(drafted.tokens))
