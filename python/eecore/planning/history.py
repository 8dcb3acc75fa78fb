"""What is known of how drafts fare: how many stand, how sure a head is, what its rounds come to.

Of each request and of all: what a request has not shown yet is expected to be as for others.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from eecore.planning.proposal import Proposal

__all__ = [
    "FirstDrafts",
    "HeadRounds",
    "History",
    "Kind",
    "Odds",
    "OwnDrafts",
    "expected_of_all",
    "kinds_of",
]

Kind = tuple[Literal["looked up", "headed"], int]
"""Of a draft: by the tokens that were found and those of the drafts before, or by tenths of the
probability that a draft head gave."""

# Before anything is drafted: the share of drafts that stand, by the tokens that were found.
LOOKUP_ODDS = (0.0, 0.25, 0.35, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85)
# By tenths of the probability that a draft head gives.
HEAD_ODDS = tuple((tenth + 0.5) / 10 for tenth in range(10))
LOOKED_UP: tuple[Kind, ...] = tuple(("looked up", n) for n in range(len(LOOKUP_ODDS)))
HEADED: tuple[Kind, ...] = tuple(("headed", min(n, len(HEAD_ODDS) - 1)) for n in range(11))
SUREST_FIRST = HEADED[len(HEAD_ODDS) - 1 :: -1]
# How many drafts such an expectation weighs, and what older drafts count beside newer ones.
PRIOR_DRAFTS, OLDER_DRAFTS = 4.0, 0.97
# How many drafts of a layer what is known of all requests weighs, of one of them.
PRIOR_OF_LAYER = 32.0
# Counts are divided once the newest is larger.
MOST_COUNT = 1e9
# Of what is expected of a request's next round, what one round weighs, and of those of all.
NEW_ROUND, NEW_ROUND_OF_ALL = 0.08, 0.02
# How many rounds of a request a head is tried in that others found not to pay.
TRY_HEAD = 3


class Odds:
    """The share of drafts that stand, counted; older ones count less."""

    __slots__ = ("_older", "stood", "tried")

    def __init__(
        self, expected: float, *, prior: float = PRIOR_DRAFTS, older: float = OLDER_DRAFTS
    ) -> None:
        self.stood, self.tried, self._older = prior * expected, prior, older

    @property
    def share(self) -> float:
        return self.stood / self.tried

    def add(self, stood: bool) -> None:
        """One more draft, before which none was refused."""
        self.stood = self._older * self.stood + stood
        self.tried = self._older * self.tried + 1.0

    def add_run(self, stood: int, *, refused: bool) -> None:
        """Drafts that stood one behind the other, and perhaps one behind them that did not."""
        old = self._older**stood
        new = (1.0 - old) / (1.0 - self._older)
        self.stood, self.tried = old * self.stood + new, old * self.tried + new
        if refused:
            self.add(False)


class FirstDrafts:
    """How sure a head is of the first draft behind a text: by tenths of its probability, counted;
    older ones count less.

    Args:
        shares: of each tenth, as is expected.
    """

    __slots__ = ("_next", "counts", "total")

    def __init__(self, shares: Ordered[float]) -> None:
        self.counts = [PRIOR_DRAFTS * share for share in shares]
        self.total, self._next = PRIOR_DRAFTS, 1.0

    @property
    def shares(self) -> list[float]:
        """Of each tenth."""
        return [count / self.total for count in self.counts]

    def add(self, probability: float) -> None:
        """One more, which the head gave this to. A newer one counts more, instead of older less."""
        _, tenth = kind_of_headed(probability)
        self._next /= OLDER_DRAFTS
        self.counts[tenth] += self._next
        self.total += self._next
        if self._next > MOST_COUNT:
            self.counts = [count / self._next for count in self.counts]
            self.total, self._next = self.total / self._next, 1.0


@dataclass(slots=True)
class HeadRounds:
    """What a round with a head's drafts comes to for a request, on average; of late more."""

    gain: float
    """Drafts that stand."""
    tried: float
    """Those that are verified."""
    steps: float
    """Those that are made for the next one."""
    is_known: bool = False
    """There was such a round; else it is what others came to, or what is expected."""

    def add(self, accepted: int, drafted: int, steps: int, weight: float) -> None:
        """One more round."""
        self.gain += weight * (accepted - self.gain)
        self.tried += weight * (drafted - self.tried)
        self.steps += weight * (steps - self.steps)
        self.is_known = True


@dataclass(slots=True)
class OwnDrafts:
    """Of one request: drafts that stood, and how many were expected to."""

    stood: float = PRIOR_OF_LAYER
    expected: float = PRIOR_OF_LAYER

    @property
    def factor(self) -> float:
        """How many times as often as others' its drafts stand."""
        return self.stood / self.expected


@dataclass(slots=True)
class History:
    """How drafts fared: those of a request, which keeps it, or of all."""

    odds: dict[Kind, Odds]
    """By kind of draft; what is not there is expected to be as for others."""
    rounds: dict[int, HeadRounds]
    """By about how many requests a head drafted for, since it drafts less where that hardly pays;
    0 before it drafted for any."""
    others: History | None = None
    """Of all requests; None for these."""
    first: FirstDrafts | None = None
    """Of a head; None before it drafted for a request."""
    lead: float = 0.0
    """Of a request: rounds of full depth that it is ahead by, or behind if it is negative."""
    layers: dict[int, OwnDrafts] = field(default_factory=dict)
    """Of a request: what exit layers drafted for it."""
    trials: int = TRY_HEAD
    """Of a request: rounds that are left to try a head in that others found not to pay."""

    def own_drafts(self, layer: int) -> OwnDrafts:
        """What a layer drafted for a request."""
        own = self.layers.get(layer)
        if own is None:
            own = self.layers[layer] = OwnDrafts()
        return own

    def share(self, kind: Kind) -> float:
        """That a draft of a kind stands, if those before it do."""
        odds = self.odds.get(kind)
        if odds is None:
            assert self.others is not None
            return self.others.share(kind)
        return odds.share

    def own(self, kind: Kind) -> Odds:
        """What more drafts of a kind are counted in."""
        odds = self.odds.get(kind)
        if odds is None:
            odds = self.odds[kind] = Odds(self.share(kind))
        return odds

    def head_rounds(self, rows: int) -> HeadRounds:
        """What rounds of so many requests with a head's drafts come to."""
        about = rows.bit_length()
        rounds = self.rounds.get(about)
        if rounds is None:
            expected = self.rounds[0] if self.others is None else self.others.head_rounds(rows)
            rounds = self.rounds[about] = replace(expected, is_known=False)
        return rounds

    def first_drafts(self) -> FirstDrafts:
        """How sure a head is of the first draft of a round."""
        if self.first is not None:
            return self.first
        assert self.others is not None
        return self.others.first_drafts()

    def first_draft(self, row_cost: float) -> tuple[float, float]:
        """What comes of a head's first draft, verified only if that is worth its row.

        Args:
            row_cost: of a draft, in tokens.

        Returns:
            Drafts that stand, and drafts that are verified.
        """
        gain = tried = 0.0
        own, others = self.odds, {} if self.others is None else self.others.odds
        first = self.first_drafts()
        for kind, count in zip(SUREST_FIRST, reversed(first.counts), strict=False):
            odds = own.get(kind) or others[kind]
            if odds.stood <= row_cost * odds.tried:
                break  # those that it is less sure of stand less often
            gain += count * odds.stood / odds.tried
            tried += count
        return gain / first.total, tried / first.total

    def add_first_draft(self, probability: float) -> None:
        """One more, which a head gave this to."""
        if self.first is None:
            self.first = FirstDrafts(self.first_drafts().shares)
        self.first.add(probability)

    def chances(self, given: Proposal, weight: float = 1.0, least: float = 0.0) -> list[float]:
        """How likely the first of such drafts stands, the first two, ..., each times ``weight``, as
        far as that is more than ``least``.
        """
        chance, found = weight, list[float]()
        own, others = self.odds, {} if self.others is None else self.others.odds
        for kind in kinds_of(given):
            odds = own.get(kind) or others[kind]
            chance *= odds.stood / odds.tried
            if chance <= least:
                break
            found.append(chance)
        return found


def kinds_of(given: Proposal) -> Ordered[Kind]:
    """Of such drafts, one by one."""
    if given.probabilities:  # a head made them
        return [kind_of_headed(probability) for probability in given.probabilities]
    count, match = len(given.tokens), min(given.match, len(LOOKED_UP) - 1)
    return LOOKED_UP[match : match + count] + LOOKED_UP[-1:] * (match + count - len(LOOKED_UP))


def kind_of_headed(probability: float) -> Kind:
    """Of a draft that a head gave this to."""
    return HEADED[int(10 * probability)]


def expected_of_all(head_agreement: Ordered[float]) -> History:
    """Of all requests, before there are any.

    Args:
        head_agreement: of a draft head's first draft with the model, its second, ...
    """
    odds: dict[Kind, Odds] = {}
    for n, share in enumerate(LOOKUP_ODDS):
        odds["looked up", n] = Odds(share)
    for tenth, share in enumerate(HEAD_ODDS):
        odds["headed", tenth] = Odds(share)
    # In a round it makes the drafts that it is sure of.
    stand: float = sum(accumulate(head_agreement, operator.mul))
    gain = 0.8 * stand
    tried = 1.3 * gain
    every = 1.0 / len(HEAD_ODDS)
    return History(
        odds,
        {0: HeadRounds(gain, tried, 1.0 + tried)},
        first=FirstDrafts([every] * len(HEAD_ODDS)),
    )
