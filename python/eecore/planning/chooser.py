"""What a round of ``Auto`` requests does: full depth, or drafts of layers, a head or the text.

Nobody is asked: how long passes take is measured as they run, by their number of rows, and how many
drafts stand is counted, by request, and by the length of the n-gram that was found or by the
probability that a draft head gave. A round does what gives most tokens a second by these, for all
of its ``Auto`` requests together, since weights are read once for all. Unless more requests wait
for these to end, what a batch takes is what its last one takes: a token of a request counts the
less the farther that one is ahead of full depth, and the more the farther it is behind.
(DEL, Zarch et al. 2025; Kangaroo, Liu et al. 2024; Leviathan et al. 2023.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Ordered
from typing import Literal, NamedTuple

from eecore.exits import Auto
from eecore.planning.budget import Budget
from eecore.planning.history import (
    NEW_ROUND,
    NEW_ROUND_OF_ALL,
    TRY_HEAD,
    History,
    expected_of_all,
    kinds_of,
)
from eecore.planning.layer_chooser import LayerChooser, RoundAhead
from eecore.planning.pass_times import MOST_SLOWER, Anchor
from eecore.planning.proposal import MOST_AHEAD, NOTHING, Proposal
from eecore.planning.round_costs import MEASURE_AGAIN, SURPRISE, RoundCosts

__all__ = ["FULL", "Choice", "Chooser"]

# Drafts have to gain so much before anything but full depth is done.
MIN_GAIN = 1.05
# And so much more for a layer to draft for several: passes of full depth are measured between its
# rounds, where they are slower than in a row.
MORE_OF_SEVERAL = 1.1
# Of first drafts behind a text that heads are mostly sure of: their odds, and how many have these.
# Several requests try a head that others found not to pay where these would.
USUAL_FIRST = ((0.95, 0.3), (0.85, 0.1), (0.7, 0.2), (0.5, 0.1))
# Rounds of full depth that a request is ahead of it by and counts 1 / e as much beside one that is
# level, where both end in one batch; that one is behind it by and counts e times as much; the power
# of e that it counts at most.
AHEAD, BEHIND, MOST_BEHIND = 6.0, 2.0, 8.0
# Of a draft of a head behind one that stands: how often it stands too. What a draft that a head
# went on behind stands for on average, and the least that it goes on behind.
NEXT_STANDS = 0.4
GOES_ON, LEAST_THRESHOLD = 0.7, 0.1


class Choice(NamedTuple):
    """What all ``Auto`` requests of a round do."""

    kind: Literal["full", "given", "draft"]
    exit_layer: int = 0
    """That drafts; 0 where drafts are given."""
    drafts: tuple[int, ...] = ()
    """How many each request gets, or makes at most."""
    given: tuple[Proposal, ...] = ()
    """What each request gets, nothing where a layer drafts."""
    ahead: int = 0
    """Drafts that a draft head makes for the next round at most."""
    ahead_thresholds: tuple[float, ...] = ()
    """Behind the first, the second, ... of these there is none if its probability is below it."""
    is_due: bool = False
    """Full depth is measured: whether something else would have been better was not asked."""


FULL = Choice("full")
MEASURE = Choice("full", is_due=True)


class Chooser:
    """Chooses for the ``Auto`` requests of one engine.

    Args:
        num_layers: of the model.
        agreement: of each exit layer with the last one, of models that were trained to exit.
        head_agreement: of a draft head's first draft with the model, its second, ..., with a head.
    """

    def __init__(
        self,
        num_layers: int,
        agreement: Ordered[float] | None,
        head_agreement: Ordered[float] | None = None,
    ) -> None:
        self.costs = RoundCosts(num_layers)
        self.layers = LayerChooser(num_layers, agreement, self.costs)
        self._all = expected_of_all(head_agreement or ())
        self._without_head, self._next_head = 0, MEASURE_AGAIN[0]  # rounds since one, and until it
        self._trial = 0  # rounds of it that are left
        self._alone, self._several = Budget(is_alone=True), Budget(is_alone=False)

    def exit_layers(self, policy: Auto) -> tuple[int, ...]:
        """Those that may draft for a policy."""
        return self.layers.best if policy.exit_layers is None else policy.exit_layers

    def history(self) -> History:
        """Of a new request, of which is expected what was seen of others."""
        return History({}, {}, self._all)

    # Choosing

    def budget(self, rows: int) -> Budget:
        """Of rounds of so many requests: what a batch gained pays for what is left of it."""
        return self._alone if rows == 1 else self._several

    def choose(
        self,
        histories: Ordered[History],
        proposals: Ordered[Ordered[Proposal]],
        most: Ordered[int],
        *,
        written: Ordered[int] = (),
        exit_layers: tuple[int, ...] = (),
        can_draft_ahead: bool = False,
        others_wait: bool = False,
    ) -> Choice:
        """What gives most tokens a second.

        Args:
            histories: one for each request.
            proposals: of which each can be given one.
            most: drafts that each has room for.
            written: tokens that each has so far; none where it is empty.
            exit_layers: that may draft.
            can_draft_ahead: whether a draft head may draft for the next round.
            others_wait: other requests wait for these to end, and all their tokens count the same.
        """
        self.costs.begin_round()
        rows = len(histories)
        written = written or (0,) * rows
        weights = _weights(histories) if rows > 1 and not others_wait else (1.0,) * rows
        seconds = self.costs.full(rows)
        if seconds is None:
            return FULL
        if self.costs.is_full_due(rows):
            return MEASURE
        anchor = rows, seconds
        look, host = self.costs.look(rows), self.costs.host(rows)
        besides = look + self.costs.host(rows, drafts=True)
        best = FULL
        speed = rows / min((seconds + look + host) / MIN_GAIN, seconds + host)
        if any(proposals):
            choice, its_speed = self._give(histories, proposals, anchor, weights, besides)
            if its_speed > speed:
                best, speed = choice, its_speed
        if exit_layers:
            ahead = RoundAhead(histories, written, max(most), anchor, weights, besides)
            drafted = self.layers.choose(exit_layers, ahead)
            pays = drafted.speed / seconds > speed * (MORE_OF_SEVERAL if rows > 1 else 1.0)
            self.layers.chosen(
                *(drafted if pays else None, exit_layers),
                first=all(not history.layers for history in histories),
            )
            if pays:
                drafts = tuple(min(drafted.drafts, m) for m in most)
                best = Choice("draft", drafted.layer, drafts, (NOTHING,) * rows)
        if can_draft_ahead and best.kind != "draft":
            return self._ahead(best, histories, anchor, weights)
        return best

    def _ahead(
        self,
        best: Choice,
        histories: Ordered[History],
        anchor: Anchor,
        weights: Ordered[float],
    ) -> Choice:
        """The same, and drafts of the head for the next round where they are worth it."""
        rows = anchor[0]
        given = best.given or (NOTHING,) * rows
        thresholds, most = self._ahead_thresholds(anchor)
        steps = self._head_steps_that_pay(histories, anchor, weights, most)
        if not steps:
            if not self._is_trial(histories, anchor):
                return best
            steps = 1
        return Choice(
            "given", 0, best.drafts or (0,) * rows, given, min(steps, MOST_AHEAD), thresholds
        )

    def _ahead_thresholds(self, anchor: Anchor) -> tuple[tuple[float, ...], int]:
        """Behind the first draft of a head, the second, ...: how likely it has to be; and how many
        there are at most by that.
        """
        rows, seconds = anchor
        key = "ahead", rows
        found: tuple[tuple[float, ...], int] | None = self.costs.held(key)
        if found is None:
            step = self.costs.head(rows).step * seconds / (seconds + self.costs.host(rows))
            worth = (self.costs.row(anchor) + step) / NEXT_STANDS
            thresholds = tuple(max(worth / GOES_ON**k, LEAST_THRESHOLD) for k in range(MOST_AHEAD))
            found = thresholds, 1 + sum(threshold < 1.0 for threshold in thresholds)
            self.costs.hold(key, found)
        return found

    def _head_steps_that_pay(
        self,
        histories: Ordered[History],
        anchor: Anchor,
        weights: Ordered[float],
        most: int,
    ) -> int:
        """Steps of a head with which rounds are faster than full depth: ``most``, by what rounds of
        late came to, or one, by how sure it has been of first drafts; 0 for none.
        """
        rows, seconds = anchor
        row_cost = self.costs.row(anchor)
        step = self.costs.head(rows).step
        best, speed = 0, MIN_GAIN * rows / (seconds + self.costs.host(rows))
        host = self.costs.host(rows, drafts=True)

        def speed_of(gain: float, tried: float, steps: float) -> float:
            taken = (self.costs.between_passes(tried, anchor) + steps * step) * seconds + host
            return (rows + gain) / taken

        if rows == 1 or self._all.head_rounds(rows).is_known:
            gain = tried = steps = 0.0
            for history, weight in zip(histories, weights, strict=True):
                late = history.head_rounds(rows)
                gain += weight * late.gain
                tried += late.tried
                steps = max(steps, late.steps)
            of_most = speed_of(gain, tried, steps)
            if of_most > speed:
                best, speed = most, of_most
        if not best or (most > 1 and rows > 1):
            gain = tried = 0.0
            for history, weight in zip(histories, weights, strict=True):
                stand, verified = history.first_draft(row_cost / weight)
                gain += weight * stand
                tried += verified
            if speed_of(gain, tried, 1.0) > speed:
                best = 1
        return best

    def _is_trial(self, histories: Ordered[History], anchor: Anchor) -> bool:
        """Whether a head that does not pay is tried again, for a step."""
        if not self._would_usually_pay(anchor):
            return False
        willing = [history for history in histories if history.trials]
        if 2 * len(willing) >= len(histories):  # of other texts
            for history in willing:
                history.trials -= 1
            return True
        if self._trial:
            self._trial -= 1
            return True
        self._without_head += 1
        if self._without_head < self._next_head:
            return False
        self._without_head, self._trial = 0, TRY_HEAD
        self._next_head = min(2 * self._next_head, MEASURE_AGAIN[1])
        return True

    def _would_usually_pay(self, anchor: Anchor) -> bool:
        """Whether one step of a head would, of a text that it is mostly sure of."""
        rows, seconds = anchor
        row_cost = self.costs.row(anchor)
        step = self.costs.head(rows).step * seconds / (seconds + self.costs.host(rows))
        gain = sum(share * max(odds - row_cost, 0.0) for odds, share in USUAL_FIRST)
        return gain - step > MIN_GAIN - 1.0

    def _give(
        self,
        histories: Ordered[History],
        proposals: Ordered[Ordered[Proposal]],
        anchor: Anchor,
        weights: Ordered[float],
        besides: float,
    ) -> tuple[Choice, float]:
        """Of drafts that there are, those likely enough to be worth a row; tokens a second, as much
        as they count. A round takes ``besides`` more.
        """
        rows, seconds = anchor
        row_cost = self.costs.row(anchor)
        least = 0.5 * row_cost  # a few more rows may be cheaper than the average
        given: list[Proposal] = []
        chances: list[tuple[float, int]] = []
        for i, (history, several) in enumerate(zip(histories, proposals, strict=True)):
            chosen, own, most = NOTHING, list[float](), 0.0
            for proposal in several:
                its = history.chances(proposal, weights[i], least)
                worth = sum([c - row_cost for c in its if c > row_cost])
                if worth > most:
                    chosen, own, most = proposal, its, worth
            given.append(chosen)
            for chance in own:
                chances.append((chance, i))
        if rows > 1:  # of one request they fall as it is
            chances.sort(reverse=True)
        del chances[self.costs.most_drafts(rows) :]
        passes = self.costs.passes(anchor, len(chances))
        total, taken, speed = float(rows), 0, 0.0
        for count, (chance, _) in enumerate(chances, 1):
            total += chance
            here = total / (passes[count] * seconds + besides)
            if here > speed:
                taken, speed = count, here
        drafts = [0] * rows
        for _, i in chances[:taken]:
            drafts[i] += 1
        taking = tuple(proposal.first(n) for proposal, n in zip(given, drafts, strict=True))
        return Choice("given", 0, tuple(drafts), taking), speed

    # Learning

    def worth(self, counts: Ordered[int], ends: Ordered[bool]) -> float:
        """Tokens of a round, as many as full depth makes in the same time with all its requests:
        behind a text's end it has fewer, whose tokens take longer each.

        Args:
            counts: tokens of each request.
            ends: whether its text ended with them.
        """
        rows = len(counts)
        seconds = self.costs.full(rows) if any(ends) else None
        if seconds is None:
            return sum(counts)
        tokens = 0.0
        for k in range(max(counts)):
            left = rows - sum([end and count <= k for count, end in zip(counts, ends, strict=True)])
            got = sum([count > k for count in counts])
            tokens += got * rows / left * self.costs.fewer(left, (rows, seconds))
        return tokens

    def gained(
        self,
        rows: int,
        tokens: float,
        seconds: float | None,
        *,
        look: float = 0.0,
        drafted: int = 0,
        steps: int = 0,
        layer: int = 0,
    ) -> float:
        """In rounds of full depth, by a round that was chosen.

        Args:
            rows: requests.
            tokens: that they got, or what these are worth.
            seconds: that it took; what is far more than was to be expected was no fault of the
                drafts. None for what was to be expected, where nothing that it took more was.
            look: seconds that choosing took.
            drafted: drafts of all.
            steps: in which a head or a layer drafted.
            layer: that drafted; 0 where drafts were given.
        """
        full = self.costs.full(rows)
        if full is None:
            return 0.0
        expected = self.costs.round(rows, full, drafted, steps, layer)
        took = expected if seconds is None else min(seconds, MOST_SLOWER * expected)
        host = self.costs.host(rows, drafts=drafted + steps > 0)
        return tokens / rows - (took + look + host) / (full + self.costs.host(rows))

    def learn_leads(
        self,
        rows: int,
        got: Ordered[tuple[History, int]],
        seconds: float,
        *,
        drafted: int = 0,
        steps: int = 0,
        layer: int = 0,
    ) -> None:
        """What requests got of a round, and the time that it took of each.

        Args:
            rows: of the round.
            got: the requests, and the tokens of each.
            seconds: that it took, and choosing; what is far more than was to be expected was no
                fault of the drafts.
            drafted: drafts of all.
            steps: in which a head or a layer drafted.
            layer: that drafted; 0 where drafts were given.
        """
        full = self.costs.full(rows)
        if full is None:
            return
        expected = self.costs.round(rows, full, drafted, steps, layer)
        seconds = min(seconds, (1.0 + SURPRISE) * expected)
        seconds += self.costs.host(rows, drafts=drafted + steps > 0)
        full += self.costs.host(rows)
        for history, tokens in got:
            history.lead += tokens - seconds / full

    def learn_drafts(
        self,
        layer: int,
        history: History,
        given: Proposal,
        drafted: int,
        accepted: int,
        *,
        written: int = 0,
    ) -> None:
        """Which drafts of a request stood, behind ``written`` tokens of its; nothing is known of
        those behind the first refused.
        """
        if layer:
            self.layers.learn(layer, history, written, drafted, accepted)
            return
        for k, kind in enumerate(kinds_of(given.first(min(drafted, accepted + 1)))):
            for known in (history, self._all):
                known.own(kind).add(k < accepted)

    def learn_first_draft(self, history: History, probability: float) -> None:
        """How sure a head was of the first draft that it made behind a round of a request."""
        for known in (history, self._all):
            known.add_first_draft(probability)

    def learn_ahead(
        self, history: History, rows: int, drafted: int, accepted: int, steps: int
    ) -> None:
        """What a round of so many requests came to for one of them, with a head's drafts and some
        for the next one.
        """
        for known in (history, self._all):
            weight = NEW_ROUND if known is history else NEW_ROUND_OF_ALL
            known.head_rounds(rows).add(accepted, drafted, steps, weight)


def _weights(histories: Ordered[History]) -> list[float]:
    """What a token of each counts: most of those that are farthest behind, as much as one on
    average.
    """
    counts = []
    for history in histories:
        lead = history.lead
        counts.append(math.exp(-lead / AHEAD if lead > 0.0 else min(-lead / BEHIND, MOST_BEHIND)))
    scale = len(counts) / sum(counts)
    return [scale * count for count in counts]
