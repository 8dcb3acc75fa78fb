"""What each decoding request does in an iteration.

For most requests it follows from their policy alone. ``Auto`` requests do what
:mod:`eecore.planning.auto` chooses, which learns from their rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace

from eecore.models import DraftHead, KeyedHead, Network, PassHead
from eecore.planning.auto import FULL, Choice, Chooser
from eecore.planning.draft_state import DraftState, draft_state
from eecore.planning.heads import max_ahead
from eecore.planning.past_outputs import PastOutputs
from eecore.planning.proposal import NOTHING, Proposal
from eecore.planning.route import GIVEN, DraftPath, Route
from eecore.planning.row import Outcome, Row
from eecore.planning.sources import given_by_policy, proposals
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Sequence

PLAIN_ROUNDS = 4
"""Without ``Auto`` requests, one out of this many rounds of full depth is learnt from."""


@dataclass(slots=True)
class HeldChoice:
    """A choice for the ``Auto`` requests of some rounds."""

    sequences: list[Sequence]
    choice: Choice
    left: int
    """Rounds for which the choice is held after the one that is planned."""
    asked: list[list[Proposal]] | None = None
    """The proposals of the sources for the first round."""


class Planner:
    """Plans the iterations of one model, and learns from how they went.

    Args:
        num_threads: CPU threads; the times of rounds depend on them.
        history_tokens: tokens of past outputs that are kept to draft from; 0: none.
        ahead: whether a round can be launched while the last one is in flight: only if both run the
            same program, which a choice then keeps.
    """

    def __init__(
        self,
        model: Network,
        num_threads: int = 1,
        history_tokens: int = 0,
        *,
        ahead: bool = False,
    ) -> None:
        self._model, self._exit_layers, self._ahead = model, model.config.exit_layers, ahead
        self.num_threads = num_threads
        self.past = PastOutputs(history_tokens) if history_tokens else None
        """The outputs of requests that have ended, where they are kept."""
        self.held: HeldChoice | None = None
        """The current choice for ``Auto`` requests."""
        self._steady: tuple[list[Sequence], list[Row]] | None = None
        """Requests that draft nothing, and their rows, which are reused for the same requests."""
        self._last: Ordered[Row] | None = None
        """The rows of the last round, if nothing was drafted in it."""
        self._is_full = False
        """Whether all rows of that round ran all layers."""
        self._num_plain = 0
        """Rounds of full depth with the rows of the previous one, without ``Auto`` requests."""
        self._routes: dict[tuple[Route, int], Route] = {}

    @property
    def chooser(self) -> Chooser:
        """The chooser for ``Auto`` requests, kept with the model for all its engines."""
        head, source = self._model.draft_head, self._model.source
        key = self.num_threads, head
        chooser: Chooser | None = self._model.learnt.get(key)
        if chooser is None:
            agreement = None if source is None else source.exit_agreement(self._exit_layers)
            of_head = () if head is None else head.agreement
            chooser = self._model.learnt[key] = Chooser(
                self._exit_layers[-1],
                agreement,
                of_head,
                max_ahead(head),
                isinstance(head, PassHead),
            )
        return chooser

    def plan(
        self,
        works: Ordered[Work],
        *,
        others_wait: bool = False,
        in_flight: Mapping[Sequence, Row] | None = None,
    ) -> list[Row]:
        """Plan an iteration.

        Args:
            others_wait: whether waiting requests need these to end.
            in_flight: each request's row of a round whose outcome is not known yet; None: all
                outcomes are known.

        Returns:
            A row for each, in their order; the same list object as in the last call where all of
            them go on at full depth.
        """
        self._others_wait, self._in_flight = others_wait, in_flight
        steady, held = self._steady, self.held
        if steady is not None and steady[0] == [work.sequence for work in works]:
            if held is None:
                return steady[1]
            if held.left > 0:
                held.left -= 1
                if held.left == 0:
                    _rest(held.sequences, False)
                return steady[1]
        rows: list[Row] = []
        free: list[int] = []
        for work in works:
            draft = draft_state(work.sequence, self._exit_layers)
            route = draft.route
            if route.auto is not None:
                draft.past = self.past
                free.append(len(rows))
                rows.append(Row(work, route))
            elif route.path is None:
                rows.append(Row(work, route))
            else:
                row = Row(work, route)
                if route.path.is_given:
                    row = Row(work, route, given_by_policy(work, draft, self._verified(work)))
                if route.ahead:
                    most = max_ahead(self._model.draft_head)
                    thresholds = (route.draft_threshold or 0.0,) * most
                    row = Row(work, route, row.given, min(route.ahead, most), thresholds)
                rows.append(row)
        if free:
            for i, row in zip(free, self._chosen([rows[i] for i in free]), strict=True):
                rows[i] = row
        else:
            self.held = None
        head = self._model.draft_head
        if head is not None:
            for row in rows:
                if row.ahead:
                    _tell(head, row.work.sequence)
        held = self.held
        is_plain = (held is None or held.choice.is_full) and not any(row.route.path for row in rows)
        self._steady = ([row.work.sequence for row in rows], rows) if is_plain else None
        return rows

    def put_back(self) -> None:
        """Hold the choice for the planned round once more: that round does not run."""
        if self.held is not None:
            self.held.left += 1

    def _verified(self, work: Work) -> list[int] | None:
        """The drafts that the round in flight verifies for a request, where they are known."""
        return None if self._in_flight is None else self._in_flight[work.sequence].verified

    def _asked(self, rows: list[Row], drafts: list[DraftState]) -> list[list[Proposal]]:
        """The proposals of the sources for each request."""
        return [
            proposals(row.work, draft, self._verified(row.work))
            for row, draft in zip(rows, drafts, strict=True)
        ]

    def _chosen(self, rows: list[Row]) -> list[Row]:
        """The rows of ``Auto`` requests, which all follow one choice."""
        sequences = [row.work.sequence for row in rows]
        held = self.held
        most = max([row.work.max_drafts for row in rows])
        if held is None or held.left <= 0 or not set(sequences).issubset(held.sequences):
            held = self.held = self._new_choice(rows, sequences, most)
        else:
            held.left -= 1
        choice = held.choice
        _rest(sequences, choice.is_full and held.left > 0)
        if choice.layer:
            path = self._route(rows[0].route, choice.layer)
            return [
                Row(Work(row.work.sequence, 1, min(choice.drafts, row.work.max_drafts)), path)
                for row in rows
            ]
        if not choice.asks or (most == 0 and not self._ahead):
            return rows
        asked, held.asked = held.asked, None
        if choice.ahead and self._in_flight is not None:  # the head's drafts are on the device
            return [
                Row(row.work, self._route(row.route, 0), NOTHING, choice.ahead, choice.thresholds)
                for row in rows
            ]
        drafts: list[DraftState] = [sequence.draft for sequence in sequences]
        if asked is None:
            asked = self._asked(rows, drafts)
        given = [NOTHING] * len(rows)
        if any(asked):
            given, _ = self.chooser.pick(drafts, asked, others_wait=self._others_wait)
        if not (choice.ahead or self._ahead or any(proposal.tokens for proposal in given)):
            return rows
        return [
            Row(
                Work(row.work.sequence, 1, len(proposal.tokens)),
                self._route(row.route, 0),
                proposal,
                0 if proposal.source == "text" else choice.ahead,
                choice.thresholds,
            )
            for row, proposal in zip(rows, given, strict=True)
        ]

    def _new_choice(self, rows: list[Row], sequences: list[Sequence], most: int) -> HeldChoice:
        """A choice for the next rounds of these requests."""
        if most == 0:  # no pages for drafts; the next round may have some
            return HeldChoice(sequences, FULL, 0)
        chooser = self.chooser
        drafts: list[DraftState] = [sequence.draft for sequence in sequences]
        exit_layers: tuple[int, ...] | None = None
        has_head = self._model.draft_head is not None
        for sequence, draft in zip(sequences, drafts, strict=True):
            policy = draft.route.auto
            assert policy is not None
            own = chooser.exit_layers if policy.exit_layers is None else policy.exit_layers
            if sequence.sampling.temperature > 0.0 or draft.guided is not None:
                own = ()  # drafts of a layer would change the tokens
            if isinstance(self._model.draft_head, KeyedHead):
                own = ()  # rows that layers draft for give the head no keys
            if exit_layers is not None:
                own = tuple(layer for layer in exit_layers if layer in own)
            exit_layers = own
            has_head = has_head and policy.head
        asked = self._asked(rows, drafts)
        choice = chooser.choose(
            drafts,
            [len(sequence.output_ids) for sequence in sequences],
            most,
            given=asked,
            exit_layers=exit_layers or (),
            has_head=has_head,
            others_wait=self._others_wait,
        )
        return HeldChoice(sequences, choice, choice.rounds - 1, asked)

    def _route(self, route: Route, layer: int) -> Route:
        """The route of an ``Auto`` request whose drafts ``layer`` makes; 0: drafts are given."""
        made = self._routes.get((route, layer))
        if made is None:
            path = DraftPath(layer, layer) if layer else GIVEN
            made = self._routes[route, layer] = replace(route, path=path)
        return made

    # Learning

    def ended(self, sequence: Sequence) -> None:
        """Keep the output of a request whose text is complete or was cut."""
        if self.past is not None:
            self.past.add(sequence)

    def learn(self, rows: Ordered[Row], outcomes: Ordered[Outcome], seconds: float | None) -> None:
        """Learn from a run of rows that share a program.

        Args:
            rows: the rows as planned.
            outcomes: the outcome of each.
            seconds: from the end of the previous iteration to the end of this one; None where the
                time includes other work.
        """
        path = rows[0].route.path
        goes_on = path is None and rows is self._last
        if not goes_on:
            self._last = rows if path is None else None
            ways = {(row.route.depth, row.route.points) for row in rows}
            self._is_full = ways == {(self._exit_layers[-1], ())}
        is_full = goes_on and self._is_full
        if is_full and self.held is None:  # no choice depends on it: most rounds skip the work
            self._num_plain += 1
            if self._num_plain % PLAIN_ROUNDS:
                return
        chooser = self.chooser
        if is_full and seconds is not None:
            chooser.costs.learn_full(len(rows), seconds)
        if self.held is not None:
            chooser.count_round()
            if path is not None:
                self._learn_drafts(path, rows, outcomes, seconds)
        full = chooser.costs.full(len(rows))
        if seconds is not None and full is not None:
            for outcome in outcomes:
                outcome.seconds, outcome.full_depth_s = seconds, full

    def _learn_drafts(
        self,
        path: DraftPath,
        rows: Ordered[Row],
        outcomes: Ordered[Outcome],
        seconds: float | None,
    ) -> None:
        """Learn from a round of drafts, of which some rows may be of ``Auto`` requests."""
        chooser = self.chooser
        free = [
            (row, outcome)
            for row, outcome in zip(rows, outcomes, strict=True)
            if row.route.auto is not None and outcome.error is None
        ]
        verified = sum([outcome.counters.drafted for outcome in outcomes])
        if seconds is not None and len(free) == len(rows):
            if path.is_given:
                steps = max([self._num_steps(row, outcome) for row, outcome in free])
                chooser.learn_given(len(rows), verified, steps, seconds)
            else:
                steps = max([outcome.counters.drafted for outcome in outcomes])
                if steps:
                    chooser.learn_layer(path.num_layers, len(rows), steps, seconds)
        took = 0.0 if seconds is None else chooser.costs.in_full(len(rows), seconds)
        for row, outcome in free:
            if took:
                row.work.sequence.draft.lead += len(outcome.records) - took
            counters, draft = outcome.counters, row.work.sequence.draft
            verified, accepted = counters.drafted, counters.accepted
            if path.is_given:
                if row.given.fits(row.work.sequence.output_ids):
                    chooser.learn_drafts(draft, row.given, verified, accepted)
            else:
                before = len(row.work.sequence.output_ids)
                chooser.learn_layer_drafts(path.num_layers, before, verified, accepted)
            if row.ahead and draft.ahead is not None and row.given.source != "text":
                steps = self._num_steps(row, outcome)
                chooser.learn_head(draft, len(free), accepted, verified, steps)

    def _num_steps(self, row: Row, outcome: Outcome) -> int:
        """Steps that a draft head made for one request in a round; one if it drafts a block."""
        ahead = outcome.ahead
        if ahead is None or isinstance(self._model.draft_head, PassHead):
            return min(row.ahead, 1)
        return row.ahead and len(ahead.tokens)


def _rest(sequences: list[Sequence], is_resting: bool) -> None:
    """Set whether these requests rest: a resting one gets no pages for drafts."""
    for sequence in sequences:
        sequence.is_resting = is_resting


def _tell(head: DraftHead | KeyedHead, sequence: Sequence) -> None:
    """Tell a head the new tokens of a text; it may draft tokens that it knows."""
    draft, num_tokens = sequence.draft, sequence.num_tokens
    head.know(sequence.tokens(draft.num_known, num_tokens))
    draft.num_known = num_tokens
