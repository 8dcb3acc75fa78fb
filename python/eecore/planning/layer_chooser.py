"""Which exit layer drafts in a round of ``Auto`` requests, and how many drafts each makes.

(LayerSkip, Elhoushi et al. 2024; DEL, Zarch et al. 2025.) In a small model's short answers what
texts have in common counts most: how they begin, and that they end.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import NamedTuple

from eecore.planning.history import History
from eecore.planning.layer_drafts import MOST_SHARE, LayerDrafts
from eecore.planning.lengths import TextLengths, span_of
from eecore.planning.pass_times import LEAST_ROUND, ROW_COST, Anchor
from eecore.planning.round_costs import HEAD_COST, RoundCosts

__all__ = ["LayerChoice", "LayerChooser", "RoundAhead", "best_exit_layers"]

# Layers have to promise so much to be asked at all.
MIN_PROMISE = 1.05
# And so much more than the one that has drafted for these requests: one that is only asked where
# others failed would seem to be no better than they are. Each has programs of its own besides.
MIN_GAIN_OF_LAYER = 1.1
# How much better a layer may be than it looks, for each so many first rounds of requests in which
# others drafted.
UNTRIED, TRY_LAYER = 0.15, 16
# As if so many had gone by before the first.
NEVER = 48
# Choices of a layer's drafts behind which nobody asks what could be given instead.
WITHOUT_LOOKUP = 7
# Requests are alike for which a layer's drafts stand as often, to so many parts.
ALIKE = 20
# For so many rounds a layer's drafts are as many for requests that are alike.
HOLD_LAYERS = 24
# How many drafts a layer makes, or as many as there is room for: a program is recorded for each.
NUM_DRAFTS = (1, 2, 3, 4, 6, 8, 10)


class RoundAhead(NamedTuple):
    """What is known of a round in which layers may draft."""

    histories: Ordered[History]
    """Of its requests."""
    written: Ordered[int]
    """Tokens that each has so far."""
    most: int
    """Drafts that there is room for."""
    anchor: Anchor
    """A pass of full depth of these requests."""
    weights: Ordered[float]
    """What a token of each counts."""
    besides: float
    """Seconds that it takes more."""


class LayerChoice(NamedTuple):
    """What a round of a layer would be."""

    layer: int
    drafts: int
    """Of each request at most."""
    speed: float
    """Tokens in the time of a pass of full depth, everything counted."""


class LayerChooser:
    """Chooses among the exit layers of one model.

    Args:
        agreement: of each exit layer with the last one, as it was measured on other texts; None if
            it was not.
        costs: of rounds.
    """

    def __init__(
        self, num_layers: int, agreement: Ordered[float] | None, costs: RoundCosts
    ) -> None:
        self._costs = costs
        self.lengths = TextLengths()
        self.best = best_exit_layers(agreement)
        """Layers that may draft where a policy names none."""
        self._drafts = {
            layer: LayerDrafts(None if agreement is None else agreement[layer - 1])
            for layer in range(1, num_layers)
        }
        self._idle: dict[int, int] = {}  # first rounds of requests since a layer's last one
        self._without_lookup = 0  # choices that are left in which only layers are asked

    @property
    def is_lookup_due(self) -> bool:
        """Whether it is worth its time to ask what could be given instead."""
        return self._without_lookup == 0

    def choose(self, exit_layers: tuple[int, ...], ahead: RoundAhead) -> LayerChoice:
        """The best layer and number of drafts; it is held for some rounds of requests alike.

        Args:
            exit_layers: that may draft.
            ahead: the round.
        """
        rows = ahead.anchor[0]
        factor = sum([_factor(exit_layers[0], history) for history in ahead.histories])
        span = span_of(1 + sum(ahead.written) // rows)
        used = frozenset([layer for history in ahead.histories for layer in history.layers])
        key = "layers", rows, exit_layers, span, used, ahead.most, round(factor / rows)
        found: LayerChoice | None = self._costs.held(key, HOLD_LAYERS)
        if found is None:
            choices = self._choices(exit_layers, ahead)
            found = self._most_promising(choices, used)
            if found.speed >= max([choice.speed for choice in choices]):  # it is no trial
                self._costs.hold(key, found)
        return found

    def chosen(self, choice: LayerChoice | None, exit_layers: Ordered[int], *, first: bool) -> None:
        """What came of it.

        Args:
            choice: that was taken; None for another kind of round.
            exit_layers: that were asked.
            first: whether no layer has drafted for these requests before.
        """
        if choice is None:
            self._without_lookup = 0
            return
        self._without_lookup = (self._without_lookup or WITHOUT_LOOKUP + 1) - 1
        if first:
            for layer in exit_layers:
                self._idle[layer] = 0 if layer == choice.layer else self._idle.get(layer, NEVER) + 1

    def learn(
        self, layer: int, history: History, written: int, drafted: int, accepted: int
    ) -> None:
        """Which drafts of a request stood; nothing is known of those behind the first refused."""
        self._drafts[layer].add(
            *(history.own_drafts(layer), written, accepted), refused=accepted < drafted
        )

    def _choices(self, exit_layers: Ordered[int], ahead: RoundAhead) -> list[LayerChoice]:
        """The best of each layer."""
        most, (rows, seconds) = ahead.most, ahead.anchor
        # Requests that have got about as far are alike: how many there are, and how likely their
        # texts have one more token, two more, ..., and so are drafted behind.
        spans = [span_of(count + 1) for count in ahead.written]
        lasts: dict[int, tuple[int, list[float]]] = {}
        for span, count in zip(spans, ahead.written, strict=True):
            if span not in lasts:
                lasts[span] = spans.count(span), self.lengths.go_on(count, 1 + most)
        ended, worth_of = list[float](), list[float]()
        for k in range(1 + most):
            none, left = 1.0, 0.0
            for alike, last in lasts.values():
                none *= (1.0 - last[k]) ** alike
                left += alike * last[k]
            # All have stopped where each has drafted the end of its text.
            ended.append(none)
            # What one token is worth of each of those whose texts go on behind k others.
            is_less = left < rows
            worth_of.append(rows / left * self._costs.fewer(left, ahead.anchor) if is_less else 1.0)
        choices = []
        for layer in exit_layers:
            base, step = self._costs.layer(layer, ahead.anchor)
            base += ahead.besides / seconds
            kinds = self._alike(layer, ahead, spans)
            stand = [1.0] * len(kinds)
            worth, steps, right = sum(ahead.weights), 0.0, 1.0
            best = LayerChoice(layer, 0, 0.0)
            for count in range(1, most + 1):
                steps += 1.0 - ended[count - 1] * right
                right, new = 1.0, 0.0
                for i, (shares, span, alike, weight) in enumerate(kinds):
                    own = stand[i] = stand[i] * shares[count - 1]
                    right *= own**alike
                    new += weight * own * lasts[span][1][count]
                worth += worth_of[count] * new
                if count not in NUM_DRAFTS and count != most:
                    continue
                speed = worth / max(base + steps * step, LEAST_ROUND)
                if speed < best.speed:  # less and less stand, each costs as much
                    break
                best = LayerChoice(layer, count, speed)
            choices.append(best)
        return choices

    def _most_promising(self, choices: list[LayerChoice], used: frozenset[int]) -> LayerChoice:
        """Of the best of each layer, beside those that have drafted for these requests."""

        def promises(choice: LayerChoice) -> float:
            if not used:
                return choice.speed * (
                    1.0 + UNTRIED * self._idle.get(choice.layer, NEVER) / TRY_LAYER
                )
            return choice.speed * (MIN_GAIN_OF_LAYER if choice.layer in used else 1.0)

        return max(choices, key=promises)

    def _alike(
        self, layer: int, ahead: RoundAhead, spans: Ordered[int]
    ) -> list[tuple[list[float], int, int, float]]:
        """Requests that have got about as far and for which a layer does about as well: that each
        of its drafts stands if those before it do, the span, how many they are, their weight.
        """
        alike: dict[tuple[int, int], tuple[int, list[float]]] = {}
        requests = zip(ahead.histories, ahead.written, spans, ahead.weights, strict=True)
        for history, count, span, weight in requests:
            factor = round(_factor(layer, history))
            _, its = alike.setdefault((span, factor), (count, []))
            its.append(weight)
        kinds = []
        for (span, factor), (count, its) in alike.items():
            shares = self._drafts[layer].shares(count, ahead.most)
            if factor != ALIKE:
                shares = [min(share * factor / ALIKE, MOST_SHARE) for share in shares]
            kinds.append((shares, span, len(its), sum(its)))
        return kinds


def _factor(layer: int, history: History) -> float:
    """How many times as often as others' a request's drafts stand, in parts of one."""
    own = history.layers.get(layer)
    return ALIKE if own is None else ALIKE * own.factor


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
    return tuple(layer for value, layer in gains[:2] if value > MIN_PROMISE)
