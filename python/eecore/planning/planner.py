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


InFlight = Mapping[Sequence, tuple[Row, int]]
"""The row of each request in a round whose outcome is not known yet, and its place in its run."""


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
        self._max_ahead = max_ahead(model.draft_head)
        self.past = PastOutputs(history_tokens) if history_tokens else None
        """The outputs of requests that have ended, where they are kept."""
        self.held: HeldChoice | None = None
        """The current choice for ``Auto`` requests."""
        self._steady: tuple[Ordered[Work], list[Row]] | None = None
        """Works for which no drafts are proposed, and their rows, which are reused for the same."""
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
        in_flight: InFlight | None = None,
    ) -> list[Row]:
        """Plan an iteration.

        Args:
            others_wait: whether waiting requests need these to end.
            in_flight: a round whose outcome is not known yet, which has all these requests; None:
                all outcomes are known.

        Returns:
            A row for each, in their order; the same list object as in the last call where all of
            them go on without drafts that are proposed.
        """
        self._others_wait, self._in_flight = others_wait, in_flight
        steady, held = self._steady, self.held
        if steady is not None and steady[0] == works:
            if held is None:
                return steady[1]
            if held.left > 0:
                held.left -= 1
                if held.left == 0:
                    _rest(held.sequences, False)
                return steady[1]
        rows, free = self._by_policy(works)
        if free:
            for i, row in zip(free, self._chosen([rows[i] for i in free]), strict=True):
                rows[i] = row
        else:
            self.held = None
        if self._model.draft_head is not None:
            _tell(self._model.draft_head, rows)
        held = self.held
        is_steady = held is None or not held.choice.asks
        for row in rows:
            path = row.route.path
            if row.follows is not None or (path is not None and path.is_given):
                is_steady = False
        self._steady = (works, rows) if is_steady else None
        return rows

    def put_back(self) -> None:
        """Hold the choice for the planned round once more: that round does not run."""
        if self.held is not None:
            self.held.left += 1

    def _by_policy(self, works: Ordered[Work]) -> tuple[list[Row], list[int]]:
        """The rows of requests, and the places of ``Auto`` requests among them, whose rows are
        those of full depth.
        """
        in_flight, routes = self._in_flight, list[Route]()
        asking: list[Work] = []
        verified: list[Ordered[int] | None] = []
        for work in works:
            draft = work.sequence.draft or draft_state(work.sequence, self._exit_layers)
            routes.append(draft.route)
            if draft.route.path is not None and draft.route.path.is_given:
                asking.append(work)
                before = None if in_flight is None else in_flight[work.sequence][0].drafts
                verified.append(before)
        given = iter(given_by_policy(asking, verified) if asking else ())
        rows: list[Row] = []
        free: list[int] = []
        for work, route in zip(works, routes, strict=True):
            path = route.path
            if path is None:
                if route.auto is not None:
                    work.sequence.draft.past = self.past
                    free.append(len(rows))
                rows.append(Row(work, route))
                continue
            drafts, ahead, thresholds = next(given) if path.is_given else (), 0, tuple[float, ...]()
            if route.ahead:
                most, threshold = self._max_ahead, route.draft_threshold or 0.0
                ahead, thresholds = min(route.ahead, most), (threshold,) * most
            follows, pending = None, 0
            if in_flight is not None:
                last, follows = in_flight[work.sequence]
                pending = 1 + last.work.max_drafts
            rows.append(Row(work, route, drafts, ahead, thresholds, follows, pending))
        return rows, free

    def _asked(self, rows: list[Row]) -> list[list[Proposal]]:
        """The proposals of the sources for each request."""
        in_flight = self._in_flight
        verified: list[Ordered[int] | None] = [None] * len(rows)
        if in_flight is not None:
            verified = [in_flight[row.work.sequence][0].verified for row in rows]
        return proposals([row.work for row in rows], verified)

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
                Row(row.work, self._route(row.route, 0), (), choice.ahead, choice.thresholds)
                for row in rows
            ]
        drafts: list[DraftState] = [sequence.draft for sequence in sequences]
        if asked is None:
            asked = self._asked(rows)
        given = [NOTHING] * len(rows)
        if any(asked):
            given, _ = self.chooser.pick(drafts, asked, others_wait=self._others_wait)
        if not (choice.ahead or self._ahead or any(proposal.tokens for proposal in given)):
            return rows
        return [
            Row(
                Work(row.work.sequence, 1, len(proposal.tokens)),
                self._routes.get((row.route, 0)) or self._route(row.route, 0),
                proposal.tokens,
                0 if proposal.source == "text" else choice.ahead,
                choice.thresholds,
                given=proposal,
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
            if exit_layers not in (None, own):
                own = tuple(layer for layer in exit_layers if layer in own)
            exit_layers = own
            has_head = has_head and policy.head
        asked = self._asked(rows)
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
                steps = max([row.ahead and self._num_steps(row, out) for row, out in free])
                chooser.learn_given(len(rows), verified, steps, seconds)
            else:
                steps = max([outcome.counters.drafted for outcome in outcomes])
                if steps:
                    chooser.learn_layer(path.num_layers, len(rows), steps, seconds)
        took = 0.0 if seconds is None else chooser.costs.in_full(len(rows), seconds)
        for row, outcome in free:
            if took:
                row.work.sequence.draft.lead += len(outcome.token_ids) - took
            counters, draft = outcome.counters, row.work.sequence.draft
            verified, accepted = counters.drafted, counters.accepted
            if path.is_given:
                given, text = row.given, row.work.sequence.output_ids
                if given.before is None or given.fits(text):
                    chooser.learn_drafts(draft, given, verified, accepted)
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


def _tell(head: DraftHead | KeyedHead, rows: Ordered[Row]) -> None:
    """Tell a head the new tokens of the texts that it drafts for; it may draft such tokens."""
    new: list[int] = []
    for row in rows:
        if row.ahead:
            sequence, draft = row.work.sequence, row.work.sequence.draft
            num_prompt, num_known = len(sequence.prompt_ids), draft.num_known
            new += sequence.prompt_ids[num_known:]
            new += sequence.output_ids[max(num_known - num_prompt, 0) :]
            draft.num_known = num_prompt + len(sequence.output_ids)
    if new:
        head.know(new)
