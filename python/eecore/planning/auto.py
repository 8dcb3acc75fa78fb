"""What a round of ``Auto`` requests does: full depth, or drafts of the text, a head or layers.

All of it follows from one table of costs (:mod:`eecore.planning.costs`) and one of acceptance rates
(:mod:`eecore.planning.odds`), both measured as rounds run: whatever gives most tokens a second, for
all ``Auto`` requests of a round together, since weights are read once for all. (DEL, Zarch et al.
2025; Kangaroo, Liu et al. 2024; LayerSkip, Elhoushi et al. 2024; Leviathan et al. 2023.)
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import replace
from math import exp
from typing import NamedTuple

from eecore.planning.costs import Costs, Times
from eecore.planning.draft_state import DraftState
from eecore.planning.odds import NEW, HeadRounds, Key, Odds
from eecore.planning.proposal import MAX_AHEAD, NOTHING, Proposal

__all__ = ["FULL", "Choice", "Chooser", "best_exit_layers"]

MIN_GAIN = 1.05
"""How many times the tokens of full depth anything else has to promise."""
HOLD_ROUNDS = 8
"""Rounds of the same requests for which a choice is held."""
TRIAL_ROUNDS = 3
"""Rounds of a trial of full depth or a head, of which the first tells nothing; a layer's drafts."""
MAX_WAIT = 256
"""Rounds after which what lost is tried again at the latest; at first after 2, then twice as many
each time.
"""
FIRST_COST = 0.08
"""What one more row takes in rounds of full depth, a step of a head, and an LM head after a step of
layers, until that is measured.
"""
LEAD = 8.0
"""Rounds of full depth by which a request is ahead whose tokens count 1 / e as much."""
GOES_ON = 0.5
"""How often a head's draft is worth verifying where the one before it was."""


class Choice(NamedTuple):
    """What all ``Auto`` requests of some rounds do."""

    layer: int = 0
    """The exit layer that drafts; 0: drafts are given."""
    drafts: int = 0
    """Maximum number of drafts that a layer makes for each request."""
    asks: bool = False
    """Whether sources are asked for drafts to give."""
    ahead: int = 0
    """Maximum number of drafts that a draft head makes for the next round."""
    thresholds: tuple[float, ...] = ()
    """Probabilities below which the first, the second, ... of these is the last."""
    rounds: int = HOLD_ROUNDS
    """Rounds for which it is held."""

    @property
    def is_full(self) -> bool:
        """Whether nothing drafts."""
        return not (self.layer or self.asks)


FULL = Choice()


class Chooser:
    """Chooses for the ``Auto`` requests of one model, and learns from their rounds.

    Args:
        num_layers: of the model.
        agreement: of each exit layer with the last one; None where it was not measured.
        head_agreement: of a draft head's first draft with the model, its second, ...; empty without
            a head.
        max_ahead: drafts that the head makes for a round, at most.
        at_once: whether it makes all of them in one step.
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
        """Layers that may draft where a policy names none."""
        self.odds_of_all = Odds(self._expected)
        """Odds of which those of each request begin."""
        accepted, chance = 0.0, 1.0
        for share in head_agreement:
            chance *= share
            accepted += chance
        self._usual_head = HeadRounds(accepted, accepted, 1.0 if at_once else 1.0 + accepted)
        self._head_rounds: dict[int, HeadRounds] = {}
        self._steps: dict[int, float] = {}
        self._clock = 0
        self._waits: dict[str, tuple[int, int]] = {}
        """When what lost is due to be tried, and the wait until then."""

    def _expected(self, key: Key) -> float:
        """The acceptance rate of drafts of which none has been counted."""
        source, about = key
        if not source.startswith("layer "):
            return (about + 0.5) / 10
        if (source, about - 1) in self.odds_of_all.counts:
            return self.odds_of_all.share((source, about - 1))
        if self._agreement is None:
            return 0.5
        return self._agreement[int(source[6:]) // self._loop - 1]

    def odds(self, draft: DraftState) -> Odds:
        """The odds of a request, which begin as those of all."""
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
            written: tokens that each has so far.
            most: drafts that there is room for.
            given: what sources propose for each in this round.
            exit_layers: layers that may draft.
            has_head: whether a draft head may draft.
            others_wait: whether other requests wait for these to end: all tokens count the same.
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
            best = "head"  # which is given what there is, too
        for name in options:
            if name != best and name != "given" and self._is_due(name):
                trial = options[name][1]
                if not trial.layer:
                    return trial._replace(rounds=TRIAL_ROUNDS)
                self.odds_of_all.fade(name)
                return trial._replace(rounds=1, drafts=min(max(trial.drafts, TRIAL_ROUNDS), most))
        self._wins(best)
        return options[best][1]

    def _is_due(self, name: str) -> bool:
        """Whether what lost is to be tried again."""
        due, wait = self._waits.get(name, (0, 1))
        if self._clock < due:
            return False
        wait = min(2 * wait, MAX_WAIT)
        self._waits[name] = self._clock + wait, wait
        return True

    def _wins(self, name: str) -> None:
        """Note what is chosen: once it loses again it is tried sooner than before."""
        _, wait = self._waits.get(name, (0, 1))
        self._waits[name] = self._clock + wait, max(wait // 2, 1)

    def _row_cost(self, requests: int) -> float:
        """What a draft's row takes, in tokens of full depth: the mean of as many as half of the
        requests have, since rows are multiplied some at a time.
        """
        passes = self._verified(requests)
        count = max(requests // 2, 1)
        return max(requests * (passes.at(count) - passes.at(0)) / count, 0.0)

    def _verified(self, requests: int) -> Times:
        return self.costs.rounds("verify", requests, FIRST_COST)

    def _step(self, requests: int) -> float:
        """What one step of a head takes, in rounds of full depth."""
        return self._steps.get(requests.bit_length(), FIRST_COST)

    def pick(
        self,
        drafts: Ordered[DraftState],
        given: Ordered[Ordered[Proposal]],
        *,
        others_wait: bool = False,
    ) -> tuple[list[Proposal], float]:
        """The drafts that are likely enough to be worth a row, for each request; and tokens in the
        time of a round of full depth.
        """
        requests, weights = len(drafts), _weights(drafts, others_wait)
        passes, row_cost = self._verified(requests), self._row_cost(requests)
        taken: list[Proposal] = []
        chances: list[tuple[float, int]] = []
        for i, (draft, several) in enumerate(zip(drafts, given, strict=True)):
            best, own, most = NOTHING, list[float](), 0.0
            odds = self.odds(draft)
            for proposal in several:
                chance, worth, its = weights[i], 0.0, list[float]()
                for score in proposal.scores:
                    chance *= odds.share((proposal.source, min(int(10 * score), 9)))
                    if chance <= 0.5 * row_cost:  # a few more rows may be cheaper than the mean
                        break
                    its.append(chance)
                    worth += max(chance - row_cost, 0.0)
                if worth > most:
                    best, own, most = proposal, its, worth
            taken.append(best)
            chances += [(chance, i) for chance in own]
        chances.sort(reverse=True)
        total, count, speed = float(requests), 0, requests / passes.at(0)
        for number, (chance, _) in enumerate(chances, 1):
            total += chance
            here = total / passes.at(number)
            if here > speed:
                count, speed = number, here
        counts = [0] * requests
        for _, i in chances[:count]:
            counts[i] += 1
        return [p.first(n) for p, n in zip(taken, counts, strict=True)], speed

    def _head(self, drafts: Ordered[DraftState], weights: Ordered[float]) -> tuple[float, Choice]:
        """Rounds with drafts of a head, by what such rounds have given."""
        requests = len(drafts)
        accepted = verified = steps = 0.0
        for draft, weight in zip(drafts, weights, strict=True):
            mean = self._rounds_of(draft, requests)
            accepted += weight * mean.accepted
            verified += mean.verified
            steps = max(steps, mean.steps)
        step = self._step(requests)
        taken = _between(self._verified(requests), verified) + step * max(steps, 1.0)
        # A draft is worth its row and step if it is accepted often enough.
        worth = self._row_cost(requests) + (0.0 if self._at_once else step)
        thresholds = tuple(min(worth / GOES_ON ** (k + 1), 1.0) for k in range(self._max_ahead))
        ahead = 1 + sum(threshold < 1.0 for threshold in thresholds)
        choice = Choice(asks=True, ahead=min(ahead, self._max_ahead), thresholds=thresholds)
        return (requests + accepted) / taken, choice

    def _rounds_of(self, draft: DraftState, requests: int) -> HeadRounds:
        """The means of a request, which begin as those of all."""
        about = requests.bit_length()
        if about not in draft.head_rounds:
            draft.head_rounds[about] = replace(self._all_rounds(about))
        return draft.head_rounds[about]

    def _all_rounds(self, about: int) -> HeadRounds:
        return self._head_rounds.setdefault(about, replace(self._usual_head))

    def _layer(self, layer: int, written: Ordered[int], most: int) -> tuple[float, Choice]:
        """Rounds in which a layer drafts: the number of drafts that gives most tokens a second."""
        source, times = f"layer {layer}", self._layer_times(layer, len(written))
        tokens, best, number = float(len(written)), 0.0, 1
        # Texts that have got about as far are alike.
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
        """Rounds by the steps of a layer; what it drafted is verified by the layers above."""
        share = layer / self._num_layers
        slope = share + FIRST_COST + (1.0 - share) * FIRST_COST * requests
        return self.costs.rounds(f"layer {layer}", requests, slope)

    # Learning

    def count_round(self) -> None:
        """Count a round, for what waits to be tried again."""
        self._clock += 1

    def learn_given(self, requests: int, verified: int, steps: int, seconds: float) -> None:
        """Learn what a round took that verified drafts, and in which a head made steps."""
        passes, step = self._verified(requests), self._step(requests)
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
        """Learn what a round took in which a layer drafted."""
        times = self._layer_times(layer, requests)
        ratio = self.costs.ratio(requests, seconds, times.at(steps))
        if ratio is not None:
            times.add(steps, ratio)

    def learn_drafts(
        self, draft: DraftState, given: Proposal, verified: int, accepted: int
    ) -> None:
        """Count given drafts of a request, as many as were verified, by their scores; nothing is
        known of those after the first that was rejected.
        """
        odds = self.odds(draft)
        for k, score in enumerate(given.scores[: min(verified, accepted + 1)]):
            key = given.source, min(int(10 * score), 9)
            odds.add(key, k < accepted)
            self.odds_of_all.add(key, k < accepted)

    def learn_layer_drafts(self, layer: int, written: int, verified: int, accepted: int) -> None:
        """Count a layer's drafts after so many tokens, by their places."""
        source = f"layer {layer}"
        for k in range(min(verified, accepted + 1)):
            self.odds_of_all.add((source, (written + k).bit_length()), k < accepted)

    def learn_head(
        self, draft: DraftState, requests: int, accepted: int, verified: int, steps: int
    ) -> None:
        """Learn what a round gave a request for which a head had drafted, and drafted again."""
        self._rounds_of(draft, requests).add(accepted, verified, steps)
        self._all_rounds(requests.bit_length()).add(accepted, verified, steps)


def _weights(drafts: Ordered[DraftState], others_wait: bool) -> list[float]:
    """What a token of each request counts, 1 on average: a batch takes as long as its last one."""
    if others_wait or len(drafts) == 1:
        return [1.0] * len(drafts)
    counts = [exp(min(-draft.lead / LEAD, 2.0)) for draft in drafts]
    scale = len(counts) / sum(counts)
    return [scale * count for count in counts]


def _between(times: Times, place: float) -> float:
    """The value between two whole numbers."""
    low = int(place)
    return times.at(low) + (place - low) * (times.at(low + 1) - times.at(low))


def best_exit_layers(agreement: Ordered[float] | None, step: int = 1) -> tuple[int, ...]:
    """Exit layers whose drafts promise most, by what a layer and a draft cost: at most two.

    Args:
        agreement: of each exit layer with the last one.
        step: layers from an exit layer to the next: those of a loop.
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
