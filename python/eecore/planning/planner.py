"""What each decoding request does in an iteration.

For most requests it follows from their policy alone. ``Auto`` requests do what
:mod:`eecore.planning.auto` chooses, which learns from their rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from operator import attrgetter

from eecore.models import DraftHead, Network
from eecore.planning.auto import FULL, Choice, Chooser
from eecore.planning.draft_state import DraftState, draft_state
from eecore.planning.heads import max_ahead
from eecore.planning.proposal import NOTHING, Proposal
from eecore.planning.route import GIVEN, Route, draft_path
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
    asked: list[list[Proposal]]
    """The proposals of the sources for the first round."""
    written: list[int]
    """Output tokens of each request before that round."""


class Planner:
    """Plans the iterations of one model, and learns from how they went.

    Args:
        num_threads: CPU threads; the times of rounds depend on them.
        ahead: whether a round can be launched while the last one is in flight: only if both run the
            same program, which a choice then keeps.
    """

    def __init__(self, model: Network, num_threads: int = 1, *, ahead: bool = False) -> None:
        self._model, self._exit_layers, self._ahead = model, model.config.exit_layers, ahead
        self.num_threads = num_threads
        head = model.draft_head
        self._max_ahead = max_ahead(head)
        self._at_once = head is not None and head.num_at_once > 0
        self.held: HeldChoice | None = None
        """The current choice for ``Auto`` requests."""
        self._steady: tuple[Ordered[Work], list[Row]] | None = None
        """Works for which no drafts are proposed, and their rows, which are reused for the same."""
        self._last: Ordered[Row] | None = None
        """The rows of the last round, if nothing was drafted in it."""
        self._is_full = False
        """Whether all rows of that round ran all layers."""
        self._share = 1.0
        """How much the tokens of a round of ``Auto`` requests with drafts count."""
        self._num_plain = 0
        """Rounds of full depth with the rows of the previous one, without ``Auto`` requests."""

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
                self._max_ahead,
                self._at_once,
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
                    for sequence in held.sequences:
                        sequence.is_resting = False
                return steady[1]
        rows, free = self._by_policy(works)
        if free:
            for i, row in zip(free, self._chosen([rows[i] for i in free]), strict=True):
                rows[i] = row
        else:
            self.held = None
        held = self.held
        is_steady, has_head = held is None or not held.choice.asks, False
        for row in rows:
            path = row.route.path
            has_head = has_head or row.ahead > 0
            if row.follows is not None or (path is not None and path.is_given):
                is_steady = False
        if has_head and self._model.draft_head is not None:
            _tell(self._model.draft_head, rows)
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
        num_full = 0
        for work, route in zip(works, routes, strict=True):
            path = route.path
            if path is None:
                num_full += 1
                if route.auto is not None:
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
            rows.append(Row(work, route, drafts, ahead, thresholds, (), follows, pending))
        if free:
            # In a looped model the other rows wait; else they take a pass of their own.
            waits = self._exit_layers.step > 1 or len(free) == num_full
            self._share = len(free) / (num_full if waits else num_full + len(free))
        return rows, free

    def _asked(self, rows: list[Row]) -> list[list[Proposal]]:
        """The proposals of the sources for each request."""
        in_flight = self._in_flight
        works, verified = list[Work](), list[Ordered[int] | None]()
        for row in rows:
            works.append(row.work)
            drafts: Ordered[int] | None = None
            if in_flight is not None:
                last, _ = in_flight[row.work.sequence]
                path = last.route.path
                # Drafts of layers, or that a head made in the run before that one, are not known.
                is_ahead = last.ahead > 0 and last.follows is not None
                if path is None or (path.is_given and not is_ahead):
                    drafts = last.drafts
            verified.append(drafts)
        return proposals(works, verified)

    def _chosen(self, rows: list[Row]) -> list[Row]:
        """The rows of ``Auto`` requests, which all follow one choice."""
        sequences = [row.work.sequence for row in rows]
        held = self.held
        most = max([row.work.max_drafts for row in rows])
        is_new = held is None or held.left <= 0 or not set(sequences).issubset(held.sequences)
        if is_new or held is None:
            held = self.held = self._new_choice(rows, sequences, most)
        else:
            held.left -= 1
        choice = held.choice
        is_resting = held.left > 0 and not (choice.layer or choice.asks)
        for sequence in sequences:
            sequence.is_resting = is_resting
        if choice.layer:
            if any(sequence.is_masked for sequence in sequences):
                return rows  # layers draft no tokens that may have masks
            draft = sequences[0].draft
            assert draft is not None
            path = self._route(draft, choice.layer)
            return [
                Row(Work(row.work.sequence, 1, min(choice.drafts, row.work.max_drafts)), path)
                for row in rows
            ]
        if not choice.asks or (most == 0 and not self._ahead):
            return rows
        on_device = choice.ahead and self._in_flight is not None  # where the head's drafts are
        given = [NOTHING] * len(rows)
        asked: list[list[Proposal]] = [[] for _ in rows]
        if not on_device:
            asked = held.asked if is_new else self._asked(rows)
            if any(asked):
                drafts = [each.draft for each in sequences if each.draft is not None]
                given, _ = self.chooser.pick(
                    drafts, asked, others_wait=self._others_wait, share=self._share
                )
        if not (choice.ahead or self._ahead or any(map(attrgetter("tokens"), given))):
            if any(asked):  # drafts that are not verified are scored as well
                rows = [row._replace(proposed=its) for row, its in zip(rows, asked, strict=True)]
            return rows
        made, follows, pending = list[Row](), None, 0
        for row, its, proposal in zip(rows, asked, given, strict=True):
            work, tokens, draft = row.work, proposal.tokens, row.work.sequence.draft
            assert draft is not None
            route = draft.routes.get(0) or self._route(draft, 0)
            if self._in_flight is not None:
                last, follows = self._in_flight[work.sequence]
                pending = 1 if last.route.path is None else 1 + last.work.max_drafts
                if not on_device and last.work.max_drafts == len(tokens):
                    work = last.work
            if not on_device and work.max_drafts != len(tokens):
                work = Work(work.sequence, 1, len(tokens))
            ahead = 0 if proposal.source == "text" else choice.ahead
            made.append(
                Row(work, route, tokens, ahead, choice.thresholds, its, follows, pending, proposal)
            )
        return made

    def _new_choice(self, rows: list[Row], sequences: list[Sequence], most: int) -> HeldChoice:
        """A choice for the next rounds of these requests."""
        lengths = [len(sequence.output_ids) for sequence in sequences]
        if most == 0:  # no pages for drafts; the next round may have some
            return HeldChoice(sequences, FULL, 0, [], lengths)
        chooser, last = self.chooser, self.held
        if last is not None and not last.choice.asks:  # else the rounds have counted them
            for sequence, its, start in zip(last.sequences, last.asked, last.written, strict=False):
                for each in its:
                    before = [] if each.before is None else each.before[0]
                    end = start + len(before)
                    if sequence.output_ids[start:end] == before and sequence.draft is not None:
                        found = sequence.draft, [each], sequence.output_ids[end:]
                        chooser.learn_proposals([found])
        drafts = [each.draft for each in sequences if each.draft is not None]
        exit_layers: tuple[int, ...] | None = None
        head = self._model.draft_head
        has_head, has_keys = head is not None, head is not None and head.keys is not None
        for sequence, draft in zip(sequences, drafts, strict=True):
            policy = draft.route.auto
            assert policy is not None
            own = chooser.exit_layers if policy.exit_layers is None else policy.exit_layers
            binds = draft.guided is not None and draft.guided.binds_all
            if sequence.sampling.temperature > 0.0 or binds:
                own = ()  # drafts of a layer would change the tokens
            if has_keys:
                own = ()  # rows that layers draft for give the head no keys
            if exit_layers not in (None, own):
                own = tuple(layer for layer in exit_layers if layer in own)
            exit_layers = own
            has_head = has_head and policy.head
        asked = self._asked(rows)
        choice = chooser.choose(
            drafts,
            lengths,
            most,
            given=asked,
            exit_layers=exit_layers or (),
            has_head=has_head,
            others_wait=self._others_wait,
            looks_up=not self._ahead and any(draft.route.ngrams for draft in drafts),
            share=self._share,
        )
        return HeldChoice(sequences, choice, choice.rounds - 1, asked, lengths)

    def _route(self, draft: DraftState, layer: int) -> Route:
        """The route of an ``Auto`` request whose drafts ``layer`` makes; 0: drafts are given."""
        made = draft.routes.get(layer)
        if made is None:
            path = draft_path(layer, layer) if layer else GIVEN
            made = draft.routes[layer] = replace(draft.route, path=path)
        return made

    # Learning

    def learn(self, rows: Ordered[Row], outcomes: Ordered[Outcome], seconds: float | None) -> None:
        """Learn from a run of rows that share a program.

        Args:
            rows: the rows as planned.
            outcomes: the outcome of each.
            seconds: from the end of the previous iteration to the end of this one; None where the
                time includes other work.
        """
        last, self._last = self._last, rows if rows[0].route.path is None else None
        if rows is not last:
            ways = {(row.route.depth, row.route.points) for row in rows}
            self._is_full = ways == {(self._exit_layers[-1], ())}
        is_full = last is not None and self._last is not None and self._is_full
        if is_full and self.held is None:  # no choice depends on it: most rounds skip the work
            self._num_plain += 1
            if self._num_plain % PLAIN_ROUNDS:
                return
        chooser = self.chooser
        if is_full and seconds is not None:
            chooser.costs.learn_full(len(rows), seconds)
        if self.held is not None:
            chooser.count_round()
            if self._last is None or rows[0].proposed:
                self._learn_drafts(chooser, rows, outcomes, seconds)
        full = None if seconds is None else chooser.costs.full(len(rows))
        if seconds is not None and full is not None:
            for outcome in outcomes:
                outcome.seconds, outcome.full_depth_s = seconds, full
                if outcome.sequence.draft is not None:
                    outcome.sequence.draft.lead += len(outcome.token_ids) - seconds / full

    def _learn_drafts(
        self,
        chooser: Chooser,
        rows: Ordered[Row],
        outcomes: Ordered[Outcome],
        seconds: float | None,
    ) -> None:
        """Learn from a round of drafts, of which some rows may be of ``Auto`` requests."""
        path = rows[0].route.path
        verified, tokens, steps = list[int](), 0, 0
        by_source = list[tuple[DraftState, list[Proposal], list[int]]]()
        by_layer = list[tuple[int, int, int]]()
        has_drafted = False
        for row, outcome in zip(rows, outcomes, strict=True):
            text, draft, ahead = (
                row.work.sequence.output_ids,
                row.work.sequence.draft,
                outcome.ahead,
            )
            if row.route.auto is None or outcome.error is not None or draft is None:
                continue
            tokens += len(outcome.token_ids)
            verified.append(outcome.counters.drafted)
            by_layer.append((len(text), outcome.counters.drafted, outcome.counters.accepted))
            if row.ahead:
                has_drafted = has_drafted or draft.ahead is not None
                # A head that drafts a block makes one step; others make one for each draft.
                steps = max(steps, 1 if self._at_once or ahead is None else len(ahead.tokens))
            its = list[Proposal]()
            for each in row.proposed:
                before = () if each.before is None else each.before[0]
                if not before or text[-len(before) :] == before:
                    its.append(each)
            if its:
                by_source.append((draft, its, outcome.token_ids))
        if by_source:
            chooser.learn_proposals(by_source)
        if path is not None and not path.is_given:
            chooser.learn_layer_drafts(path.num_layers, by_layer)
        if path is None or seconds is None or len(verified) < len(rows):
            return
        if path.is_given:
            chooser.learn_given(len(rows), sum(verified), steps, seconds)
        elif any(verified):
            chooser.learn_layer(path.num_layers, len(rows), max(verified), seconds)
        if has_drafted:
            chooser.learn_head(len(rows), tokens, seconds)


def _tell(head: DraftHead, rows: Ordered[Row]) -> None:
    """Tell a head the new tokens of the texts that it drafts for; it may draft such tokens."""
    new: list[int] = []
    for row in rows:
        if row.ahead:
            sequence, draft = row.work.sequence, row.work.sequence.draft
            assert draft is not None
            num_prompt, num_known = len(sequence.prompt_ids), draft.num_known
            new += sequence.prompt_ids[num_known:]
            new += sequence.output_ids[max(num_known - num_prompt, 0) :]
            draft.num_known = num_prompt + len(sequence.output_ids)
    if new:
        head.know(new)
