"""What a round of ``Auto`` requests does: full depth, or drafts of the text, a head or layers.

The choice is the option with most expected tokens a second. It follows from the times of rounds
(:mod:`eecore.planning.costs`) and from acceptance rates (:mod:`eecore.planning.odds`), both
measured as rounds run. A verified token scores all drafts that were proposed for its place, also
those that were not chosen. All ``Auto`` requests of a round get the same option, since the weights
are read once for all of them. (HedgeSpec, arXiv 2510.20064; DEL, Zarch et al. 2025; Kangaroo, Liu
et al. 2024; LayerSkip, Elhoushi et al. 2024; Leviathan et al. 2023.)
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from itertools import chain, pairwise, repeat
from math import exp
from typing import NamedTuple

from eecore.planning.costs import FIRST_COST, MAX_SLOWER, NEW, Costs, Curve
from eecore.planning.draft_state import DraftState
from eecore.planning.odds import Key, Odds, count_drafts
from eecore.planning.proposal import MAX_AHEAD, NOTHING, Proposal

MIN_GAIN = 1.03
"""An option is chosen over full depth if it promises more than this many times its tokens."""
HOLD_ROUNDS = 8
"""Rounds of the same requests for which a choice is held."""
FIRST_ROUNDS = 3
"""Rounds of full depth until it has been timed; the first one is not."""
HEAD_ROUNDS = 4
"""Rounds of a trial of a head; in the first one no drafts are verified. A layer's trial is one."""
MIN_WAIT = 32
"""Rounds after which a head or layers that lost are tried again."""
MAX_WAIT = 128
"""The longest such wait, in rounds; each one is twice the last."""
LEAD = 8.0
"""The lead, in rounds of full depth, at which a request's tokens count 1 / e as much."""


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
        self._goes_on = sum(head_agreement) / len(head_agreement) if head_agreement else 0.5
        self._num_layers, self._agreement = num_layers, agreement
        self.costs = Costs()
        self._loop = num_layers // len(agreement or (1,) * num_layers)  # layers between exits
        self.exit_layers = best_exit_layers(agreement, self._loop)
        """Exit layers that may draft for a policy that names none."""
        self.odds_of_all = Odds(self._expected)
        """Acceptance rates over all requests, from which each new request starts."""
        self._head: dict[int, tuple[int, float, float]] = {}
        """For each bit length of the number of requests: the means of a request's tokens in a round
        with a draft head, and of the round's time in rounds of full depth.
        """
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
        looks_up: bool = False,
        share: float = 1.0,
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
            looks_up: whether sources are asked in rounds of full depth as well, as a round without
                drafts then takes no longer.
            share: how much tokens of a round with drafts count. Where a round of full depth would
                serve other rows, too, drafts have to gain what these lose.
        """
        requests = len(drafts)
        if self.costs.full(requests) is None:
            return FULL._replace(rounds=FIRST_ROUNDS)
        options = {"full": (MIN_GAIN, FULL._replace(asks=looks_up))}
        if any(given) and not looks_up:
            tokens = self.pick(drafts, given, others_wait=others_wait, share=share)[1]
            options["given"] = tokens / requests, Choice(asks=True)
        if has_head:
            tokens, choice = self._with_head(requests)
            options["head"] = share * tokens, choice
        for layer in exit_layers:
            tokens, choice = self._layer(layer, written, most)
            options[f"layer {layer}"] = share * tokens, choice
        best = max(options, key=lambda name: options[name][0])
        if best == "given" and has_head and options["head"][0] > MIN_GAIN:
            best = "head"  # whose rounds verify given drafts as well
        for name in options:
            due, wait = self._waits.get(name, (0, MIN_WAIT))
            if name == best:
                self._waits[name] = self._clock, max(wait // 2, MIN_WAIT)
            elif name not in ("full", "given") and self._clock >= due:
                self._waits[name] = self._clock + wait, min(2 * wait, MAX_WAIT)
                trial = options[name][1]
                if trial.layer:
                    return trial._replace(rounds=1)
                about = requests.bit_length()
                if about in self._head:
                    self._head[about] = (2, *self._head[about][1:])
                return trial._replace(rounds=HEAD_ROUNDS)
        return options[best][1]

    def pick(
        self,
        drafts: Ordered[DraftState],
        given: Ordered[Ordered[Proposal]],
        *,
        others_wait: bool = False,
        share: float = 1.0,
    ) -> tuple[list[Proposal], float]:
        """For each request the drafts that are likely enough to be worth a row; and the tokens that
        are expected in the time of a round of full depth. Tokens of a round with drafts count times
        ``share``, see :meth:`choose`.
        """
        requests, weights = len(drafts), _weights(drafts, others_wait)
        curve = self._rows(requests)
        row_cost = _row_cost(curve, requests)
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
        times = curve.upto(len(chances))
        total, count, speed = float(requests), 0, requests / times[0]
        for number, (chance, _) in enumerate(chances, 1):
            total += chance
            here = share * total / times[number]
            if here > speed:
                count, speed = number, here
        numbers = [0] * requests
        for _, i in chances[:count]:
            numbers[i] += 1
        for i, (proposal, kept_drafts) in enumerate(zip(taken, numbers, strict=True)):
            if kept_drafts < len(proposal.tokens):
                taken[i] = proposal.first(kept_drafts)
        return taken, speed

    def odds(self, draft: DraftState) -> Odds:
        """The acceptance rates of a request, which start from those over all requests."""
        if draft.odds is None:
            draft.odds = Odds(self.odds_of_all.share)
        return draft.odds

    def _rows(self, requests: int) -> Curve:
        """Times of rounds that verify drafts, by their number; a row costs less than its share."""
        return self.costs.curve("rows", requests, min(FIRST_COST, 0.75 / requests))

    def _with_head(self, requests: int) -> tuple[float, Choice]:
        """Rounds with drafts of a head: a request's tokens in the time of a round of full depth, by
        the means of such rounds so far, and the choice.
        """
        _, tokens, time = self._head.get(requests.bit_length(), (0, 0.0, 1.0))
        curve, half = self._rows(requests), max(requests // 2, 1)
        times = curve.upto(half * self._max_ahead)[::half]
        thresholds = list[float]()
        for k, (before, after) in enumerate(pairwise(times[1:]), 1):
            # A further draft is worth its row and step if it is accepted often enough.
            cost = requests / half * (after - before + (0.0 if self._at_once else curve.step))
            thresholds.append(min(max(tokens / time, 1.0) * cost / self._goes_on**k, 1.0))
        ahead = 1 + sum([threshold < 1.0 for threshold in thresholds])
        thresholds.append(1.0)
        return tokens / time, Choice(asks=True, ahead=ahead, thresholds=tuple(thresholds))

    def _layer(self, layer: int, written: Ordered[int], most: int) -> tuple[float, Choice]:
        """Rounds in which a layer drafts: a request's tokens in the time of a round of full depth,
        and the draft length that gives most of them.
        """
        source, times = f"layer {layer}", self._steps(layer, len(written)).upto(most)
        tokens, best, number = float(len(written)), 0.0, 1
        chances = [1.0] * len(written)
        for count in range(1, most + 1):
            for i, size in enumerate(written):
                share = self.odds_of_all.share((source, (size + count).bit_length()))
                chances[i] *= min(share, 0.999)
            tokens += sum(chances)
            speed = tokens / times[count]
            if speed <= best:
                break
            best, number = speed, count
        return best / len(written), Choice(layer, number)

    def _steps(self, layer: int, requests: int) -> Curve:
        """Times of rounds by a layer's steps; the layers above it verify what it drafted."""
        share = layer / self._num_layers
        slope = share + FIRST_COST + (1.0 - share) * FIRST_COST * requests
        return self.costs.curve(f"layer {layer}", requests, slope)

    # Learning

    def count_round(self) -> None:
        """Count a round: the waits of rejected options are in rounds."""
        self._clock += 1

    def learn_given(self, requests: int, verified: int, steps: int, seconds: float) -> None:
        """Learn from the time of a round that verified drafts and in which a head made steps."""
        self.costs.learn(self._rows(requests), requests, verified, steps, seconds)

    def learn_layer(self, layer: int, requests: int, steps: int, seconds: float) -> None:
        """Learn from the time of a round in which a layer drafted."""
        self.costs.learn(self._steps(layer, requests), requests, steps, 0, seconds)

    def learn_proposals(
        self, rounds: Iterable[tuple[DraftState, Ordered[Proposal], Ordered[int]]]
    ) -> None:
        """Score what the sources proposed for requests, up to the first wrong draft of each.

        Args:
            rounds: a request, the proposals for it, and how its text went on.
        """
        counted: list[tuple[tuple[Odds, ...], list[Key], int]] = []
        for draft, proposals, tokens in rounds:
            tables = draft.odds or self.odds(draft), self.odds_of_all
            for proposal in proposals:
                keys, accepted = list[Key](), 0
                for token, score, got in zip(
                    proposal.tokens, proposal.scores, tokens, strict=False
                ):
                    keys.append((proposal.source, min(int(10 * score), 9)))
                    if token != got:
                        break
                    accepted += 1
                counted.append((tables, keys, accepted))
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

    def learn_head(self, requests: int, tokens: int, seconds: float) -> None:
        """Learn from a round of requests for which a head had drafted, and drafted again.

        Args:
            requests: of the round.
            tokens: the tokens that they got.
            seconds: the time of the round.
        """
        full = self.costs.full(requests)
        if full is None:
            return
        about, gain, time = requests.bit_length(), tokens / requests, seconds / full
        count, gains, times = self._head.get(about, (0, gain, time))
        time, new = min(time, MAX_SLOWER * times), max(NEW, 1.0 / (count + 1))
        self._head[about] = count + 1, gains + new * (gain - gains), times + new * (time - times)


def _weights(drafts: Ordered[DraftState], others_wait: bool) -> list[float]:
    """The weight of a token of each request, 1 on average: tokens of requests that lag count
    more, since a batch takes as long as its last request.
    """
    if others_wait or len(drafts) == 1:
        return [1.0] * len(drafts)
    counts = [exp(min(-draft.lead / LEAD, 2.0)) for draft in drafts]
    scale = len(counts) / sum(counts)
    return [scale * count for count in counts]


def _row_cost(curve: Curve, requests: int) -> float:
    """The cost of one draft's row, in tokens of full depth: the mean over one draft for every
    second request, since products take several rows at a time.
    """
    count = max(requests // 2, 1)
    return requests * (curve.upto(count)[-1] - 1.0) / count


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
