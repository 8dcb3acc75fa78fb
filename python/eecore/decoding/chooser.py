"""What a round of ``Auto`` requests does: full depth, or drafts of layers or of the text.

Nobody is asked: how long passes take is measured as they run, by their number of rows, and how many
drafts stand is counted, by request, and by the length of the n-gram that was found. A round does
what gives most tokens a second by these, for all of its ``Auto`` requests together, since weights
are read once for all. (DEL, Zarch et al. 2025; Kangaroo, Liu et al. 2024; Leviathan et al. 2023.)
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from eecore.decoding.memory import power_of_two
from eecore.decoding.ngrams import Proposal
from eecore.decoding.pass_times import ROW_COST, Anchor, PassTimes, blended
from eecore.exits import Auto

__all__ = ["FULL", "Choice", "Chooser", "History", "Odds", "best_exit_layers"]

T = TypeVar("T")

# Before anything is drafted: the share of drafts that stand, by the tokens that were found.
LOOKUP_ODDS = (0.0, 0.25, 0.35, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85)
# How many drafts such an expectation weighs, and what older drafts count beside newer ones.
PRIOR_DRAFTS, OLDER_DRAFTS = 4.0, 0.97
# Drafts have to gain so much before anything but full depth is done.
MIN_GAIN = 1.05
# Of passes of full depth in a row of which none went on from the last, this one counts and those
# behind it.
UNSTEADY_PASSES = 3
# For so many rounds what follows from many measurements is held, unless one is so far off.
HOLD = 8
SURPRISE = 0.1
# Rounds after which full depth is measured once more, where it was not the best: at first, and each
# time twice as many.
MEASURE_AGAIN = (8, 256)
# A drafted token takes so much of full depth at least.
LEAST_STEP = 0.02
# Of one drafted token besides its layers, as a share of full depth: the LM head.
HEAD_COST = 0.1


class Odds:
    """The share of drafts that stand, counted; older ones count less."""

    def __init__(self, expected: float) -> None:
        self._stood, self._tried = PRIOR_DRAFTS * expected, PRIOR_DRAFTS

    @property
    def share(self) -> float:
        return self._stood / self._tried

    def add(self, stood: bool) -> None:
        """One more draft, before which none was refused."""
        self._stood = OLDER_DRAFTS * self._stood + stood
        self._tried = OLDER_DRAFTS * self._tried + 1.0


@dataclass
class History:
    """How drafts fared: those of a request, which keeps it, or of all."""

    looked_up: list[Odds]
    """By the tokens that were found, and those of the drafts before."""
    drafted: dict[int, Odds]
    """By exit layer."""


@dataclass(frozen=True)
class Choice:
    """What all ``Auto`` requests of a round do."""

    kind: Literal["full", "lookup", "draft"]
    exit_layer: int = 0
    """That drafts; 0 where drafts are looked up."""
    drafts: tuple[int, ...] = ()
    """How many each request gets, or makes at most."""


FULL = Choice("full")


class Chooser:
    """Chooses for the ``Auto`` requests of one engine.

    Args:
        num_layers: of the model.
        agreement: of each exit layer with the last one, of models that were trained to exit.
    """

    def __init__(self, num_layers: int, agreement: Ordered[float] | None) -> None:
        self._num_layers = num_layers
        self._agreement = agreement
        self._all = History([Odds(share) for share in LOOKUP_ODDS], {})
        self._best = best_exit_layers(agreement)
        self._step_share: dict[int, float] = {}  # a drafted token's time, by exit layer, of a pass
        self._full, self._verify = PassTimes(), PassTimes()
        self._rounds, self._next_full = 0, MEASURE_AGAIN[0]  # since full depth, and until it
        self._unsteady = 0
        self._clock = 0  # rounds that were chosen
        self._estimates: dict[Any, tuple[int, list[float]]] = {}
        self._drafts: dict[Any, tuple[int, tuple[int, int, float]]] = {}

    def exit_layers(self, policy: Auto) -> tuple[int, ...]:
        """Those that may draft for a policy."""
        return self._best if policy.exit_layers is None else policy.exit_layers

    def history(self) -> History:
        """Of a new request, of which is expected what was seen of others."""
        return History(
            [Odds(odds.share) for odds in self._all.looked_up],
            {layer: Odds(odds.share) for layer, odds in self._all.drafted.items()},
        )

    # Choosing

    def choose(
        self,
        histories: Ordered[History],
        proposals: Ordered[Proposal],
        most: Ordered[int],
        *,
        exit_layers: Ordered[int] = (),
    ) -> Choice:
        """What gives most tokens a second.

        Args:
            histories: one for each request.
            proposals: what was looked up for each.
            most: drafts that each has room for.
            exit_layers: that may draft.
        """
        self._clock += 1
        rows = len(histories)
        seconds = self._full.near(rows)
        if seconds is None or self._rounds >= self._next_full:
            return FULL
        anchor = rows, seconds
        best, speed = FULL, MIN_GAIN * rows / seconds
        if any(proposal.tokens for proposal in proposals):
            choice, its_speed = self._look_up(histories, proposals, anchor)
            if its_speed > speed:
                best, speed = choice, its_speed
        if exit_layers:
            key = rows, exit_layers
            layer, count, its_speed = self._held(
                self._drafts, key, lambda: self._draft(exit_layers, histories, max(most), anchor)
            )
            if its_speed > speed:
                best = Choice("draft", layer, tuple(min(count, m) for m in most))
        return best

    def _look_up(
        self, histories: Ordered[History], proposals: Ordered[Proposal], anchor: Anchor
    ) -> tuple[Choice, float]:
        """Of drafts that were looked up, those likely enough to be worth a row; tokens a second."""
        chances: list[tuple[float, int]] = []
        for i, (history, proposal) in enumerate(zip(histories, proposals, strict=True)):
            chance, odds = 1.0, history.looked_up
            for k in range(len(proposal.tokens)):
                chance *= odds[min(proposal.match + k, len(odds) - 1)].share
                chances.append((chance, i))
        chances.sort(reverse=True)
        rows = len(histories)
        passes = self._passes(anchor, len(chances))
        tokens, taken, speed = float(rows), 0, 0.0
        for count, (chance, _) in enumerate(chances, 1):
            tokens += chance
            here = tokens / passes[count]
            if here > speed:
                taken, speed = count, here
        drafts = [0] * rows
        for _, i in chances[:taken]:
            drafts[i] += 1
        return Choice("lookup", 0, tuple(drafts)), speed

    def _draft(
        self, exit_layers: Ordered[int], histories: Ordered[History], most: int, anchor: Anchor
    ) -> tuple[int, int, float]:
        """The best layer and number of drafts of each request; tokens a second."""
        rows, seconds = anchor
        passes = self._passes(anchor, rows * most)
        best = 0, 0, 0.0
        for layer in exit_layers:
            step = seconds * self._share_of(layer)
            shares = [self._drafted(history, layer).share for history in histories]
            tokens = float(rows)
            for count in range(1, most + 1):
                tokens += sum(share**count for share in shares)
                speed = tokens / (count * step + passes[count * rows])
                if speed > best[2]:
                    best = layer, count, speed
        return best

    def _passes(self, anchor: Anchor, most: int) -> list[float]:
        """Seconds of passes that verify 0 to ``most`` drafts, or to more."""
        rows = anchor[0]
        key = rows, power_of_two(most)

        def estimate() -> list[float]:
            return [self._verified(rows + drafts, anchor) for drafts in range(key[1] + 1)]

        return self._held(self._estimates, key, estimate)

    def _verified(self, rows: int, anchor: Anchor) -> float:
        """Seconds of a pass that verifies: measured, or not less than those of full depth."""
        seconds = self._verify.of(rows, anchor)
        if rows in self._verify:
            return seconds
        return max(seconds, self._full.near(rows) or 0.0)

    def _held(self, held: dict[Any, tuple[int, T]], key: Any, make: Callable[[], T]) -> T:
        """What is held for some rounds, or made anew."""
        made_at, value = held.get(key, (-HOLD, None))
        if value is None or self._clock - made_at >= HOLD:
            value = make()
            held[key] = self._clock, value
        return value

    def _share_of(self, layer: int) -> float:
        return self._step_share.get(layer, layer / self._num_layers + HEAD_COST)

    def _drafted(self, history: History, layer: int) -> Odds:
        odds = history.drafted.get(layer)
        if odds is None:
            share = 0.5 if self._agreement is None else self._agreement[layer - 1]
            odds = history.drafted[layer] = Odds(share)
        return odds

    # Learning

    def learn_full(self, rows: int, seconds: float, *, is_steady: bool = True) -> None:
        """How long a round of full depth took.

        One behind another of the same requests is faster: it counts, and any that comes behind
        some that were not.
        """
        self._unsteady = 0 if is_steady else self._unsteady + 1
        if 0 < self._unsteady < UNSTEADY_PASSES:
            return
        self._full.add(rows, seconds)
        if self._rounds >= self._next_full:
            self._next_full = min(2 * self._next_full, MEASURE_AGAIN[1])
        self._rounds = 0

    def learn_round(self, layer: int, rows: int, drafted: int, steps: int, seconds: float) -> None:
        """How long a round took, with ``drafted`` drafts of ``rows`` requests.

        Args:
            layer: that drafted; 0 where drafts were looked up.
            rows: requests.
            drafted: drafts.
            steps: those of the request with most of them.
            seconds: the round's.
        """
        self._rounds += 1
        full = self._full.near(rows)
        if full is None:
            return
        expected = self._verified(rows + drafted, (rows, full))
        if layer == 0:
            self._verify.add(rows + drafted, seconds)
        elif steps:
            share = self._share_of(layer)
            measured = (seconds - expected) / steps / full
            self._step_share[layer] = max(blended(share, measured), LEAST_STEP)
            expected += steps * share * full
        if abs(seconds - expected) > SURPRISE * expected:
            self._estimates.clear()
            self._drafts.clear()

    def learn_drafts(
        self, layer: int, history: History, match: int, drafted: int, accepted: int
    ) -> None:
        """Which drafts of a request stood; nothing is known of those behind the first refused."""
        for k in range(min(drafted, accepted + 1)):
            for known in (history, self._all):
                if layer == 0:
                    odds = known.looked_up[min(match + k, len(known.looked_up) - 1)]
                else:
                    odds = self._drafted(known, layer)
                odds.add(k < accepted)


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
