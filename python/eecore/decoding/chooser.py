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
from typing import Any, Literal, NamedTuple, TypeVar

from eecore.decoding.budget import Budget
from eecore.decoding.history import (
    NEW_ROUND,
    NEW_ROUND_OF_ALL,
    TRY_HEAD,
    History,
    expected_of_all,
    kind_of,
)
from eecore.decoding.memory import power_of_two
from eecore.decoding.pass_times import (
    FIRST_STEPS,
    LEAST_ROW_COST,
    MOST_SLOWER,
    ROW_COST,
    Anchor,
    Pace,
    PassTimes,
    StepCost,
)
from eecore.decoding.proposal import MOST_AHEAD, NOTHING, Proposal
from eecore.exits import Auto

__all__ = ["FULL", "Choice", "Chooser", "best_exit_layers"]

T = TypeVar("T")
# Drafts have to gain so much before anything but full depth is done.
MIN_GAIN = 1.05
# Of passes of full depth in a row of which none went on from the last, this one counts and those
# behind it; of those that did, once full depth is known. Behind drafts a machine is slower for a
# while: it had less to do, and what it keeps in cache is older.
UNSTEADY_PASSES, SETTLED_PASSES = 3, 3
# And so much by a layer that promised less than another one: each has programs of its own.
MIN_GAIN_OF_LAYER = 1.05
# For so many rounds what follows from many measurements is held, unless one is so far off.
HOLD = 8
SURPRISE = 0.1
# Rounds after which full depth is measured once more, where it was not the best: at first, and each
# time twice as many.
MEASURE_AGAIN = (8, 256)
# Of how long it takes to choose, and of what lies between two rounds, what a new one weighs.
NEW_TIME = 0.08
# Of first drafts behind a text that heads are mostly sure of: their odds, and how many have these.
# Several requests try a head that others found not to pay where these would.
USUAL_FIRST = ((0.95, 0.3), (0.85, 0.1), (0.7, 0.2), (0.5, 0.1))
# Rounds of full depth that a request is ahead of it by and counts 1 / e as much beside one that is
# level, where both end in one batch; that one is behind it by and counts e times as much; the power
# of e that it counts at most.
AHEAD, BEHIND, MOST_BEHIND = 6.0, 2.0, 8.0
# Drafts that a request alone is given at first, which show what rows take.
FEW_ALONE = 4
# A look that takes more times as long as others was disturbed.
MOST_OF_LOOK = 2.0
# Of a draft of a head behind one that stands: how often it stands too. What a draft that a head
# went on behind stands for on average, and the least that it goes on behind.
NEXT_STANDS = 0.4
GOES_ON, LEAST_THRESHOLD = 0.7, 0.1
# How many drafts a layer makes, or as many as there is room for: a program is recorded for each.
NUM_DRAFTS = (1, 2, 3, 4, 6, 8, 10)
# Of one drafted token besides its layers, as a share of full depth: the LM head.
HEAD_COST = 0.1


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


FULL = Choice("full")


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
        self._num_layers = num_layers
        self._all = expected_of_all(num_layers, agreement, head_agreement or ())
        self._head_steps: dict[int, StepCost] = {}  # by about so many rows
        self._without_head, self._next_head = 0, MEASURE_AGAIN[0]  # rounds since one, and until it
        self._trial = 0  # rounds of it that are left
        self._best = best_exit_layers(agreement)
        self._looks: dict[int, float] = {}  # seconds that choosing takes, by about so many rows
        self._between: dict[int, float] = {}  # and what lies between two rounds
        self._layer_rounds: dict[tuple[int, int], StepCost] = {}  # by layer, and about so many rows
        self._pace = Pace()
        self._full = PassTimes(self._pace)
        # By about so many requests: each has keys and values of its own to be read.
        self._verify: dict[int, PassTimes] = {}
        self._rounds, self._next_full = 0, MEASURE_AGAIN[0]  # since full depth, and until it
        self._unsteady = self._steady = 0  # passes of full depth in a row, by how they went on
        self._clock = 0  # rounds that were chosen
        self._alone, self._several = Budget(is_alone=True), Budget(is_alone=False)
        self._estimates: dict[Any, tuple[int, Any]] = {}
        self._drafts: dict[Any, tuple[int, tuple[int, int, float]]] = {}

    def exit_layers(self, policy: Auto) -> tuple[int, ...]:
        """Those that may draft for a policy."""
        return self._best if policy.exit_layers is None else policy.exit_layers

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
        exit_layers: Ordered[int] = (),
        can_draft_ahead: bool = False,
        others_wait: bool = False,
    ) -> Choice:
        """What gives most tokens a second.

        Args:
            histories: one for each request.
            proposals: of which each can be given one.
            most: drafts that each has room for.
            exit_layers: that may draft.
            can_draft_ahead: whether a draft head may draft for the next round.
            others_wait: other requests wait for these to end, and all their tokens count the same.
        """
        self._clock += 1
        rows = len(histories)
        weights = _weights(histories) if rows > 1 and not others_wait else (1.0,) * rows
        seconds = self._full.near(rows)
        if seconds is None or self._rounds >= self._next_full:
            return FULL
        anchor = rows, seconds
        host = self._host(rows)
        besides = self._looks.get(rows.bit_length(), 0.0) + host
        best, speed = FULL, MIN_GAIN * rows / (seconds + besides)
        if any(proposals):
            choice, its_speed = self._give(histories, proposals, anchor, weights, besides)
            if its_speed > speed:
                best, speed = choice, its_speed
        if exit_layers:
            key = rows, exit_layers
            drafted = self._held(self._drafts, key)
            if drafted is None:
                drafted = self._draft(exit_layers, histories, max(most), anchor, weights, besides)
                self._hold(self._drafts, key, drafted)
            layer, count, tokens = drafted
            if tokens / seconds > speed:
                drafts = tuple(min(count, m) for m in most)
                best = Choice("draft", layer, drafts, (NOTHING,) * rows)
        if can_draft_ahead and best.kind != "draft":
            return self._ahead(best, histories, anchor, weights, host)
        return best

    def _ahead(
        self,
        best: Choice,
        histories: Ordered[History],
        anchor: Anchor,
        weights: Ordered[float],
        host: float,
    ) -> Choice:
        """The same, and drafts of the head for the next round where they are worth it."""
        rows = anchor[0]
        given = best.given or (NOTHING,) * rows
        thresholds, most = self._ahead_thresholds(anchor)
        steps = self._head_steps_that_pay(histories, anchor, weights, host, most)
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
        found: tuple[tuple[float, ...], int] | None = self._held(self._estimates, key)
        if found is None:
            step = self._head_cost(rows).step * seconds / (seconds + self._host(rows))
            worth = (self._row_cost(anchor) + step) / NEXT_STANDS
            thresholds = tuple(max(worth / GOES_ON**k, LEAST_THRESHOLD) for k in range(MOST_AHEAD))
            found = thresholds, 1 + sum(threshold < 1.0 for threshold in thresholds)
            self._hold(self._estimates, key, found)
        return found

    def _row_cost(self, anchor: Anchor) -> float:
        """Of a draft in a round that is given some, in tokens of full depth: of several requests
        the average of as many as half of these have, since rows are multiplied some at a time.
        """
        rows, seconds = anchor
        key = "row", rows
        cost: float | None = self._held(self._estimates, key)
        if cost is None:
            count = max(rows // 2, 1)
            passes = self._passes(anchor, count)
            more = (passes[count] - passes[0]) * seconds / count
            cost = max(rows * more / (seconds + self._host(rows)), LEAST_ROW_COST)
            self._hold(self._estimates, key, cost)
        return cost

    def _host(self, rows: int) -> float:
        """Seconds of the host between two rounds of so many requests, whatever these do."""
        return self._between.get(rows.bit_length(), 0.0)

    def _head_cost(self, rows: int) -> StepCost:
        """Of steps of a head, in passes of full depth."""
        about = rows.bit_length()
        known = self._head_steps.get(about)
        if known is None:
            known = self._head_steps[about] = StepCost()
        return known

    def _head_steps_that_pay(
        self,
        histories: Ordered[History],
        anchor: Anchor,
        weights: Ordered[float],
        host: float,
        most: int,
    ) -> int:
        """Steps of a head with which rounds are faster than full depth: ``most``, by what rounds of
        late came to, or one, by how sure it has been of first drafts; 0 for none.
        """
        rows, seconds = anchor
        row_cost = self._row_cost(anchor)
        step = self._head_cost(rows).step
        best, speed = 0, MIN_GAIN * rows / (seconds + host)

        def speed_of(gain: float, tried: float, steps: float) -> float:
            taken = (self._between_passes(tried, anchor) + steps * step) * seconds + host
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

    def _between_passes(self, drafts: float, anchor: Anchor) -> float:
        """A pass that verifies so many drafts on average, as a share of the anchor's."""
        low = int(drafts)
        passes = self._passes(anchor, low + 1)
        return passes[low] + (drafts - low) * (passes[low + 1] - passes[low])

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
        row_cost = self._row_cost(anchor)
        step = self._head_cost(rows).step * seconds / (seconds + self._host(rows))
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
        row_cost = self._row_cost(anchor)
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
        # Few show what they cost, and then twice as many.
        most_rows = self._passes_of(rows).most_rows
        del chances[2 * most_rows - rows if most_rows > rows else max(rows // 2, FEW_ALONE) :]
        passes = self._passes(anchor, len(chances))
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

    def _draft(
        self,
        exit_layers: Ordered[int],
        histories: Ordered[History],
        most: int,
        anchor: Anchor,
        weights: Ordered[float],
        besides: float,
    ) -> tuple[int, int, float]:
        """The best layer and number of drafts of each request; tokens in the time of a pass of
        full depth, where a round takes ``besides`` more.
        """
        rows, seconds = anchor
        besides /= seconds
        best = 0, 0, 0.0
        for layer in exit_layers:
            least = MIN_GAIN_OF_LAYER * best[2]
            cost = self._layer_cost(layer, anchor)
            shares = [history.share(("layer", layer)) for history in histories]
            stand, tokens, before = [1.0] * rows, [1.0] * rows, 0.0
            for count in range(1, most + 1):
                stand = [own * share for own, share in zip(stand, shares, strict=True)]
                tokens = [own + one for own, one in zip(tokens, stand, strict=True)]
                if count not in NUM_DRAFTS and count != most:
                    continue
                worth = sum([w * own for w, own in zip(weights, tokens, strict=True)])
                speed = worth / (cost.round(count) + besides)
                if speed < before:  # less and less stand, each costs as much
                    break
                if speed > max(least, best[2]):
                    best = layer, count, speed
                before = speed
        return best

    def _passes(self, anchor: Anchor, most: int) -> list[float]:
        """Passes that verify 0 to ``most`` drafts, or to more, as shares of the anchor's."""
        rows, seconds = anchor
        key = rows, power_of_two(most)
        passes: list[float] | None = self._held(self._estimates, key)
        if passes is None:
            counts = range(rows, rows + key[1] + 1)
            passes = [self._verified(count, anchor) / seconds for count in counts]
            self._hold(self._estimates, key, passes)
        return passes

    def _verified(self, rows: int, anchor: Anchor) -> float:
        """Seconds of a pass that verifies."""
        return self._passes_of(anchor[0]).of(rows, anchor, self._full)

    def _passes_of(self, requests: int) -> PassTimes:
        """Passes that verified drafts of so many requests."""
        about = requests.bit_length()
        passes = self._verify.get(about)
        if passes is None:
            passes = self._verify[about] = PassTimes(self._pace)
        return passes

    def _held(self, held: dict[Any, tuple[int, T]], key: Any) -> T | None:
        """What is held for some rounds; None where it has to be made anew."""
        found = held.get(key)
        return None if found is None or self._clock - found[0] >= HOLD else found[1]

    def _hold(self, held: dict[Any, tuple[int, T]], key: Any, value: T) -> None:
        held[key] = self._clock, value

    def _layer_cost(self, layer: int, anchor: Anchor) -> StepCost:
        """Of rounds in which a layer drafts: of its steps, and of verifying them."""
        rows, seconds = anchor
        known = self._layer_rounds.get((layer, rows.bit_length()))
        if known is not None:
            return known
        own = layer / self._num_layers
        rest = 1.0 - own  # the layers that verify
        few, more = (
            1.0
            + rest * (self._verified(rows + count * rows, anchor) / seconds - 1.0)
            + count * (own + HEAD_COST)
            for count in (FIRST_STEPS, 2 * FIRST_STEPS)
        )
        return StepCost((more - few) / FIRST_STEPS, few)

    # Learning

    def gained(
        self,
        rows: int,
        tokens: int,
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
            tokens: that they got.
            seconds: that it took; what is far more than was to be expected was no fault of the
                drafts. None for what was to be expected, where nothing that it took more was.
            look: seconds that choosing took.
            drafted: drafts of all.
            steps: in which a head or a layer drafted.
            layer: that drafted; 0 where drafts were given.
        """
        full = self._full.near(rows)
        if full is None:
            return 0.0
        expected, host = self._round(rows, full, drafted, steps, layer), self._host(rows)
        took = expected if seconds is None else min(seconds, MOST_SLOWER * expected)
        return tokens / rows - (took + look + host) / (full + host)

    def learn_look(self, rows: int, seconds: float) -> float:
        """How long it took to choose for so many requests, and to learn of what was chosen.

        Returns:
            What of it counts.
        """
        known = self._looks.get(rows.bit_length(), seconds)
        seconds = min(seconds, MOST_OF_LOOK * known)
        self._looks[rows.bit_length()] = known + NEW_TIME * (seconds - known)
        return seconds

    def learn_between(self, rows: int, seconds: float) -> None:
        """How long it was from a round of so many requests to their next one.

        It is the same for a round that gives several tokens: what a small model's drafts save is
        to a good part this. No more is believed than a pass of full depth takes.
        """
        full = self._full.near(rows)
        if full is None:
            return
        seconds = min(seconds, full)
        known = self._between.get(rows.bit_length(), seconds)
        seconds = min(seconds, 2.0 * known)
        self._between[rows.bit_length()] = known + NEW_TIME * (seconds - known)

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
        full = self._full.near(rows)
        if full is None:
            return
        expected, host = self._round(rows, full, drafted, steps, layer), self._host(rows)
        seconds = min(seconds, (1.0 + SURPRISE) * expected)
        for history, tokens in got:
            history.lead += tokens - (seconds + host) / (full + host)

    def _round(self, rows: int, full: float, drafted: int, steps: int, layer: int) -> float:
        """Seconds that a round is expected to take."""
        if layer and steps:
            return self._layer_cost(layer, (rows, full)).round(steps) * full
        verified = self._verified(rows + drafted, (rows, full)) if drafted or layer else full
        return verified + (0.0 if layer else steps * self._head_cost(rows).step * full)

    def learn_full(self, rows: int, seconds: float, *, steady: int = 1) -> None:
        """How long a round of full depth took.

        One behind another of the same requests is faster: it counts, and any that comes behind
        some that were not.

        Args:
            rows: requests.
            seconds: that it took.
            steady: rounds of full depth since the last one told of, with this one, each of which
                went on from the one before; 0 if this did not.
        """
        self._unsteady = 0 if steady else self._unsteady + 1
        self._steady = self._steady + steady if steady else 0
        is_known = self._full.near(rows) is not None
        if 0 < self._unsteady < UNSTEADY_PASSES or 0 < self._steady < SETTLED_PASSES * is_known:
            return
        self._note(self._full.add(rows, seconds))
        if self._rounds >= self._next_full:
            self._next_full = min(2 * self._next_full, MEASURE_AGAIN[1])
        self._rounds = 0

    def learn_given(self, rows: int, drafted: int, ahead: int, seconds: float) -> None:
        """How long a round took that was given ``drafted`` drafts of ``rows`` requests.

        Args:
            rows: requests.
            drafted: drafts.
            ahead: steps of a draft head behind it.
            seconds: the round's.
        """
        self._rounds += 1
        full = self._full.near(rows)
        if full is None:
            return
        of_head = ahead * self._head_cost(rows).step * full
        passed = max(seconds - of_head, full / MOST_SLOWER)
        passes = self._passes_of(rows)
        if passes.known(rows + drafted) is None:
            usual = max(
                self._verified(rows + drafted, (rows, full)), (1.0 + ROW_COST * drafted) * full
            )
            passed = min(max(passed, full), MOST_SLOWER * usual)
        self._note(passes.add(rows + drafted, passed))
        if ahead and not drafted:
            self._head_cost(rows).add(ahead, seconds / (self._full.near(rows) or full))

    def learn_drafted(self, layer: int, rows: int, steps: int, seconds: float) -> None:
        """How long a round took in which a layer drafted for ``rows`` requests.

        Args:
            layer: that drafted.
            rows: requests.
            steps: drafts of the request with most of them.
            seconds: the round's.
        """
        self._rounds += 1
        full = self._full.near(rows)
        if full is None:
            return
        if steps:
            cost = self._layer_cost(layer, (rows, full))
            self._layer_rounds[layer, rows.bit_length()] = cost
            self._note(cost.add(steps, seconds / full, self._pace))

    def _note(self, moved: float) -> None:
        """Nothing is held any longer where a round is taken to be another part of others."""
        if abs(moved) > SURPRISE:
            self._estimates.clear()
            self._drafts.clear()

    def learn_drafts(
        self, layer: int, history: History, given: Proposal, drafted: int, accepted: int
    ) -> None:
        """Which drafts of a request stood; nothing is known of those behind the first refused."""
        if layer:
            for known in (history, self._all):
                known.own(("layer", layer)).add_run(accepted, refused=accepted < drafted)
            return
        for k in range(min(drafted, accepted + 1)):
            kind = kind_of(given, k)
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


def best_exit_layers(agreement: Ordered[float] | None) -> tuple[int, ...]:
    """Exit layers whose drafts promise most, by what a layer and a draft cost: at most two."""
    if agreement is None:
        return ()
    num_layers = len(agreement)

    def gain(layer: int) -> float:
        share, step = agreement[layer - 1], layer / num_layers + HEAD_COST
        return max(
            sum(share**k for k in range(count + 1)) / (1 + count * (step + ROW_COST))
            for count in range(1, 9)
        )

    gains = sorted(((gain(layer), layer) for layer in range(1, num_layers)), reverse=True)
    return tuple(layer for value, layer in gains[:2] if value > MIN_GAIN)
