"""What a round of ``Auto`` requests does: full depth, or drafts of the text, a head or layers.

The choice is the option with most expected tokens a second. It follows from a table of costs
(:mod:`eecore.planning.costs`) and one of acceptance rates (:mod:`eecore.planning.odds`), both
measured as rounds run. All ``Auto`` requests of a round get the same option, since the weights are
read once for all of them. (DEL, Zarch et al. 2025; Kangaroo, Liu et al. 2024; LayerSkip, Elhoushi
et al. 2024; Leviathan et al. 2023.)
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import replace
from itertools import chain, repeat
from math import exp
from typing import NamedTuple

from eecore.planning.costs import Costs, Times
from eecore.planning.draft_state import DraftState
from eecore.planning.odds import NEW, HeadRounds, Key, Odds, count_drafts
from eecore.planning.proposal import MAX_AHEAD, NOTHING, Proposal

MIN_GAIN = 1.05
"""An option is chosen over full depth if it promises more than this many times its tokens."""
HOLD_ROUNDS = 8
"""Rounds of the same requests for which a choice is held."""
TRIAL_ROUNDS = 3
"""Rounds of a trial of full depth or of a head; the first one measures nothing."""
MIN_TRIAL_DRAFTS = 3
"""Minimum draft length in the one round of a layer's trial."""
MAX_WAIT = 256
"""The longest wait, in rounds, before a rejected option is tried again: the first wait is 2 rounds,
and each one is twice the last.
"""
FIRST_COST = 0.08
"""The cost, in rounds of full depth, that is assumed until it is measured: for one more row, for
one step of a head, and for the LM head after a step of layers.
"""
LEAD = 8.0
"""The lead, in rounds of full depth, at which a request's tokens count 1 / e as much."""
GOES_ON = 0.5
"""The assumed chance that a head's draft is worth verifying if the previous one was."""


class Choice(NamedTuple):
    """What all ``Auto`` requests of some rounds do."""

    layer: int = 0
    """The exit layer that drafts; 0: no layer drafts."""
    drafts: int = 0
    """Maximum number of drafts that a layer makes for each request."""
    asks: bool = False
    """Whether sources are asked for drafts to give."""
    ahead: int = 0
    """Maximum number of drafts that a draft head makes for the next round."""
    thresholds: tuple[float, ...] = ()
    """A probability for each of these drafts: the head stops after a draft that is less likely."""
    rounds: int = HOLD_ROUNDS
    """Rounds for which the choice is held."""


FULL = Choice()


class Chooser:
    """Chooses for the ``Auto`` requests of one model, and learns from their rounds.

    Args:
        agreement: how often each exit layer agrees with the last one; None where that was not
            measured.
        head_agreement: how often a draft head's first, second, ... draft agrees with the model;
            empty without a head.
        max_ahead: maximum number of drafts that the head makes for a round.
        at_once: whether the head makes all of them in one step.
    """

    def __init__(
        self,
        num_layers: int,
        agreement: Ordered[float] | None,
        head_agreement: Ordered[float] = (),
        max_ahead: int = MAX_AHEAD,
        at_once: bool = False,
    ) -> None:
        self._max_ahead, self._at_once = max_ahead, at_once
        self._num_layers, self._agreement = num_layers, agreement
        self.costs = Costs()
        self._loop = num_layers // len(agreement or (1,) * num_layers)  # layers between exits
        self.exit_layers = best_exit_layers(agreement, self._loop)
        """Exit layers that may draft for a policy that names none."""
        self.odds_of_all = Odds(self._expected)
        """Acceptance rates over all requests, from which each new request starts."""
        accepted, chance = 0.0, 1.0
        for share in head_agreement:
            chance *= share
            accepted += chance
        self._usual_head = HeadRounds(accepted, accepted, 1.0 if at_once else 1.0 + accepted)
        self._head_rounds: dict[int, HeadRounds] = {}
        self._steps: dict[int, float] = {}
        self._clock = 0
        self._waits: dict[str, tuple[int, int]] = {}
        """For each option: the round in which it may be tried again, and the current wait."""

    def _expected(self, key: Key) -> float:
        """The acceptance rate assumed for a key until a draft has been counted."""
        source, about = key
        if not source.startswith("layer "):
            return (about + 0.5) / 10
        if (source, about - 1) in self.odds_of_all.counts:
            return self.odds_of_all.share((source, about - 1))
        if self._agreement is None:
            return 0.5
        return self._agreement[int(source[6:]) // self._loop - 1]

    def odds(self, draft: DraftState) -> Odds:
        """The acceptance rates of a request, which start from those over all requests."""
        if draft.odds is None:
            draft.odds = Odds(self.odds_of_all.share)
        return draft.odds

    # Choosing

    def choose(
        self,
        drafts: Ordered[DraftState],
        written: Ordered[int],
        most: int,
        *,
        given: Ordered[Ordered[Proposal]],
        exit_layers: Ordered[int] = (),
        has_head: bool = False,
        others_wait: bool = False,
    ) -> Choice:
        """Choose for the next rounds of these requests.

        Args:
            drafts: states of the requests.
            written: output tokens of each request so far.
            most: maximum number of drafts of a request.
            given: the proposals of the sources for each request in this round.
            exit_layers: layers that may draft.
            has_head: whether a draft head may draft.
            others_wait: whether waiting requests need these to end; all tokens then count the same.
        """
        requests = len(drafts)
        full = self.costs.full(requests)
        if full is None:
            return FULL._replace(rounds=TRIAL_ROUNDS)
        weights = _weights(drafts, others_wait)
        options: dict[str, tuple[float, Choice]] = {"full": (MIN_GAIN * requests, FULL)}
        if any(given):
            picked = self.pick(drafts, given, others_wait=others_wait)
            options["given"] = picked[1], Choice(asks=True)
        if has_head:
            options["head"] = self._head(drafts, weights)
        for layer in exit_layers:
            options[f"layer {layer}"] = self._layer(layer, written, most)
        best = max(options, key=lambda name: options[name][0])
        if best == "given" and has_head and options["head"][0] > options["full"][0]:
            best = "head"  # whose rounds verify given drafts as well
        for name in options:
            if name != best and name != "given" and self._is_due(name):
                trial = options[name][1]
                if not trial.layer:
                    return trial._replace(rounds=TRIAL_ROUNDS)
                self.odds_of_all.fade(name)
                length = min(max(trial.drafts, MIN_TRIAL_DRAFTS), most)
                return trial._replace(rounds=1, drafts=length)
        self._wins(best)
        return options[best][1]

    def _is_due(self, name: str) -> bool:
        """Whether an option is due for a trial; if so, its next wait is twice as long."""
        due, wait = self._waits.get(name, (0, 1))
        if self._clock < due:
            return False
        wait = min(2 * wait, MAX_WAIT)
        self._waits[name] = self._clock + wait, wait
        return True

    def _wins(self, name: str) -> None:
        """Halve the wait of the chosen option: once it loses, it is tried again sooner."""
        _, wait = self._waits.get(name, (0, 1))
        self._waits[name] = self._clock + wait, max(wait // 2, 1)

    def _step(self, requests: int) -> float:
        """The cost of one step of a head, in rounds of full depth."""
        return self._steps.get(requests.bit_length(), FIRST_COST)

    def pick(
        self,
        drafts: Ordered[DraftState],
        given: Ordered[Ordered[Proposal]],
        *,
        others_wait: bool = False,
    ) -> tuple[list[Proposal], float]:
        """For each request the drafts that are likely enough to be worth a row; and the tokens that
        are expected in the time of a round of full depth.
        """
        requests, weights = len(drafts), _weights(drafts, others_wait)
        passes = self.costs.rounds("verify", requests, FIRST_COST)
        row_cost = _row_cost(passes, requests)
        counts_of_all = self.odds_of_all.counts  # as in Odds.share, without a call for each draft
        taken: list[Proposal] = []
        chances: list[tuple[float, int]] = []
        for i, (draft, several) in enumerate(zip(drafts, given, strict=True)):
            best, best_chances, most = NOTHING, list[float](), 0.0
            counts = (draft.odds or self.odds(draft)).counts
            for proposal in several:
                chance, worth, kept = weights[i], 0.0, list[float]()
                before = () if proposal.before is None else proposal.before[1]
                for number, score in enumerate(chain(before, proposal.scores), -len(before)):
                    tenth = min(int(10 * score), 9)
                    key = proposal.source, tenth
                    known = counts.get(key) or counts_of_all.get(key)
                    chance *= (tenth + 0.5) / 10 if known is None else known[0] / known[1]
                    if number < 0:  # a token that the round in flight has to give
                        continue
                    if chance <= 0.5 * row_cost:  # a few more rows may be cheaper than the mean
                        break
                    kept.append(chance)
                    worth += max(chance - row_cost, 0.0)
                if worth > most:
                    best, best_chances, most = proposal, kept, worth
            taken.append(best)
            chances += zip(best_chances, repeat(i))
        chances.sort(reverse=True)
        times = passes.between(0, len(chances))
        total, count, speed = float(requests), 0, requests / times[0]
        for number, (chance, _) in enumerate(chances, 1):
            total += chance
            here = total / times[number]
            if here > speed:
                count, speed = number, here
        numbers = [0] * requests
        for _, i in chances[:count]:
            numbers[i] += 1
        for i, (proposal, kept_drafts) in enumerate(zip(taken, numbers, strict=True)):
            if kept_drafts < len(proposal.tokens):
                taken[i] = proposal.first(kept_drafts)
        return taken, speed

    def _head(self, drafts: Ordered[DraftState], weights: Ordered[float]) -> tuple[float, Choice]:
        """Rounds with drafts of a head, by the means of such rounds so far: the tokens expected in
        the time of a round of full depth, and the choice.
        """
        requests, about = len(drafts), len(drafts).bit_length()
        accepted = verified = steps = 0.0
        for draft, weight in zip(drafts, weights, strict=True):
            mean = draft.head_rounds.get(about) or self._rounds_of(draft, requests)
            accepted += weight * mean.accepted
            verified += mean.verified
            steps = max(steps, mean.steps)
        step, low = self._step(requests), int(verified)
        passes = self.costs.rounds("verify", requests, FIRST_COST)
        before, after = passes.between(low, low + 1)
        taken = before + (verified - low) * (after - before) + step * max(steps, 1.0)
        # A draft is worth its row and step if it is accepted often enough.
        worth = _row_cost(passes, requests) + (0.0 if self._at_once else step)
        thresholds = tuple([min(worth / GOES_ON ** (k + 1), 1.0) for k in range(self._max_ahead)])
        ahead = 1 + self._max_ahead - thresholds.count(1.0)
        choice = Choice(asks=True, ahead=min(ahead, self._max_ahead), thresholds=thresholds)
        return (requests + accepted) / taken, choice

    def _rounds_of(self, draft: DraftState, requests: int) -> HeadRounds:
        """The means of a request's rounds with a head, which start from those over all requests."""
        about = requests.bit_length()
        if about not in draft.head_rounds:
            draft.head_rounds[about] = replace(self._all_rounds(about))
        return draft.head_rounds[about]

    def _all_rounds(self, about: int) -> HeadRounds:
        if about not in self._head_rounds:
            self._head_rounds[about] = replace(self._usual_head)
        return self._head_rounds[about]

    def _layer(self, layer: int, written: Ordered[int], most: int) -> tuple[float, Choice]:
        """Rounds in which a layer drafts: the tokens expected in the time of a round of full depth,
        and the draft length that gives most of them.
        """
        source, times = f"layer {layer}", self._layer_times(layer, len(written))
        tokens, best, number = float(len(written)), 0.0, 1
        # Outputs whose lengths have the same number of bits are counted together.
        chances: dict[int, float] = {}
        for size in written:
            chances[size.bit_length()] = chances.get(size.bit_length(), 0.0) + 1.0
        for count in range(1, most + 1):
            for place, chance in chances.items():
                here = ((1 << place >> 1) + count).bit_length()
                chances[place] = chance * min(self.odds_of_all.share((source, here)), 0.999)
            tokens += sum(chances.values())
            speed = tokens / times.at(count)
            if speed <= best:
                break
            best, number = speed, count
        return best, Choice(layer, number)

    def _layer_times(self, layer: int, requests: int) -> Times:
        """Times of rounds by a layer's steps; the layers above it verify what it drafted."""
        share = layer / self._num_layers
        slope = share + FIRST_COST + (1.0 - share) * FIRST_COST * requests
        return self.costs.rounds(f"layer {layer}", requests, slope)

    # Learning

    def count_round(self) -> None:
        """Count a round: the waits of rejected options are in rounds."""
        self._clock += 1

    def learn_given(self, requests: int, verified: int, steps: int, seconds: float) -> None:
        """Learn from the time of a round that verified drafts and in which a head made steps."""
        passes = self.costs.rounds("verify", requests, FIRST_COST)
        step = self._step(requests)
        expected_pass = passes.at(verified)
        expected = expected_pass + step * steps
        ratio = self.costs.ratio(requests, seconds, expected)
        if ratio is None:
            return
        if steps:
            off = 0.5 * (ratio - expected)
            passes.add(verified, expected_pass + off)
            step = max(step + NEW * off / steps, 0.0)
            self._steps[requests.bit_length()] = step
        else:
            passes.add(verified, ratio)

    def learn_layer(self, layer: int, requests: int, steps: int, seconds: float) -> None:
        """Learn from the time of a round in which a layer drafted."""
        times = self._layer_times(layer, requests)
        ratio = self.costs.ratio(requests, seconds, times.at(steps))
        if ratio is not None:
            times.add(steps, ratio)

    def learn_drafts(self, rounds: Iterable[tuple[DraftState, Proposal, int, int]]) -> None:
        """Count the verified drafts of requests by their scores.

        Args:
            rounds: a request, its proposal, the drafts that were verified of it and those accepted.
        """
        counted: list[tuple[tuple[Odds, ...], list[Key], int]] = []
        for draft, given, verified, accepted in rounds:
            keys: list[Key] = []
            for score in given.scores[:verified]:
                keys.append((given.source, min(int(10 * score), 9)))
            counted.append(((draft.odds or self.odds(draft), self.odds_of_all), keys, accepted))
        count_drafts(counted)

    def learn_layer_drafts(self, layer: int, rounds: Iterable[tuple[int, int, int]]) -> None:
        """Count a layer's drafts by their positions.

        Args:
            layer: the layer that drafted.
            rounds: the position of a request's first draft, and the numbers of its drafts and of
                those accepted.
        """
        source, tables = f"layer {layer}", (self.odds_of_all,)
        counted: list[tuple[tuple[Odds, ...], list[Key], int]] = []
        for first, verified, accepted in rounds:
            places = map(int.bit_length, range(first, first + verified))
            counted.append((tables, list(zip(repeat(source), places)), accepted))
        count_drafts(counted)

    def learn_head(self, rounds: Ordered[tuple[DraftState, int, int, int]], requests: int) -> None:
        """Learn from a round of requests for which a head had drafted, and drafted again.

        Args:
            rounds: a request, the drafts that were accepted and verified, and the head's steps.
            requests: of the round.
        """
        about = requests.bit_length()
        of_all = self._all_rounds(about)
        for draft, accepted, verified, steps in rounds:
            for mean in (draft.head_rounds.get(about) or self._rounds_of(draft, requests), of_all):
                mean.accepted += NEW * (accepted - mean.accepted)
                mean.verified += NEW * (verified - mean.verified)
                mean.steps += NEW * (steps - mean.steps)


def _weights(drafts: Ordered[DraftState], others_wait: bool) -> list[float]:
    """The weight of a token of each request, 1 on average: tokens of requests that lag count
    more, since a batch takes as long as its last request.
    """
    if others_wait or len(drafts) == 1:
        return [1.0] * len(drafts)
    counts = [exp(min(-draft.lead / LEAD, 2.0)) for draft in drafts]
    scale = len(counts) / sum(counts)
    return [scale * count for count in counts]


def _row_cost(passes: Times, requests: int) -> float:
    """The cost of one draft's row, in tokens of full depth: the mean over one draft for every
    second request, since products take several rows at a time.
    """
    count = max(requests // 2, 1)
    times = passes.between(0, count)
    return max(requests * (times[-1] - times[0]) / count, 0.0)


def best_exit_layers(agreement: Ordered[float] | None, step: int = 1) -> tuple[int, ...]:
    """At most two exit layers whose drafts promise most, by the costs of a layer and a draft.

    Args:
        step: layers from one exit layer to the next; in a looped model the layers of a loop.
    """
    if agreement is None:
        return ()
    count_exits = len(agreement)

    def gain(place: int) -> float:
        share, step = agreement[place - 1], place / count_exits + FIRST_COST
        return max(
            sum(share**k for k in range(count + 1)) / (1 + count * (step + FIRST_COST))
            for count in range(1, 9)
        )

    gains = sorted(((gain(place), place) for place in range(1, count_exits)), reverse=True)
    return tuple(place * step for value, place in gains[:2] if value > MIN_GAIN)
