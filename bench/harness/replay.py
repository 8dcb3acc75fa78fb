"""Rounds of ``Auto`` replayed from recorded drafts of heads and times of passes.

Only the model is replaced: the planner, its learning and its choices are the real ones.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple, cast

from eecore.config import SamplingParams
from eecore.exits import Auto
from eecore.models import Network
from eecore.planning.auto import Chooser
from eecore.planning.planner import HeldChoice, Planner
from eecore.planning.proposal import Ahead, Proposal
from eecore.planning.row import Outcome
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Counters
from eecore.scheduling.sequence import Sequence as Request

__all__ = ["Answer", "Played", "RoundTimes", "new_planner", "play"]


@dataclass(frozen=True)
class Answer:
    """A prompt's greedy answer, and a draft head's drafts after each of its tokens."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    drafts: Sequence[Proposal]
    """The drafts after the first token, after the first two, ..."""

    def after(self, count: int, most: int, thresholds: Sequence[float]) -> Proposal:
        """The drafts after ``count`` tokens, up to the first one that is not likely enough."""
        drafted = self.drafts[count - 1] if count <= len(self.drafts) else Proposal([])
        size = 0
        for probability in drafted.scores[:most]:
            size += 1
            if probability < thresholds[size - 1]:
                break
        return drafted.first(size)

    def num_accepted(self, count: int, drafts: Iterable[int]) -> int:
        """The number of drafts that are the next tokens after the first ``count``."""
        accepted = 0
        for draft, token in zip(drafts, self.tokens[count:], strict=False):
            if draft != token:
                break
            accepted += 1
        return accepted


class RoundTimes:
    """Seconds of rounds, by requests and drafts; linear between the measured numbers.

    Args:
        full: seconds of a round of full depth, by requests.
        given: seconds of a round that verifies drafts, by requests, then by drafts.
        step: seconds of one step of a draft head, by requests.
        choosing: seconds of a choice, by requests.
    """

    def __init__(
        self,
        full: dict[int, float],
        given: dict[int, dict[int, float]],
        step: dict[int, float],
        choosing: dict[int, float],
    ) -> None:
        self._full, self._step, self._choosing = full, step, choosing
        self._given = {}
        for requests, by_drafts in given.items():
            times, rising = 0.0, {}
            for drafts in sorted(by_drafts):
                times = max(times, by_drafts[drafts])
                rising[drafts] = times
            self._given[requests] = rising

    def full(self, requests: int) -> float:
        return _between(self._full, requests)

    def given(self, requests: int, drafts: int) -> float:
        """Seconds of a round that verifies ``drafts`` drafts, without steps of a head."""
        by_requests = {n: _between(times, drafts) for n, times in self._given.items()}
        return _between(by_requests, requests)

    def step(self, requests: int) -> float:
        return _between(self._step, requests)

    def choosing(self, requests: int) -> float:
        return _between(self._choosing, requests)


def _between(known: dict[int, float], at: float) -> float:
    """Linear interpolation; beyond the last known point with the slope of the last half."""
    places = sorted(known)
    if at <= places[0]:
        return known[places[0]]
    if at >= places[-1]:
        middle = places[len(places) // 2 - 1] if len(places) > 1 else places[-1]
        rise = (known[places[-1]] - known[middle]) / max(places[-1] - middle, 1)
        return known[places[-1]] + rise * (at - places[-1])
    high = bisect.bisect(places, at)
    low, high = places[high - 1], places[high]
    share = (at - low) / (high - low)
    return known[low] + share * (known[high] - known[low])


class Played(NamedTuple):
    """Seconds of a batch until its last answer is complete, and counts of its drafts."""

    full: float
    """Seconds at full depth."""
    auto: float
    drafted: int
    accepted: int


def new_planner(
    num_layers: int, head_agreement: Sequence[float], auto: Chooser | None = None
) -> Planner:
    """A planner of a model of which only its layers and its draft head's agreement are known."""

    class Nothing(SimpleNamespace):
        __hash__ = object.__hash__

    head = Nothing(agreement=tuple(head_agreement), num_at_once=0, keys=None)
    head.know = lambda _: None  # the recorded drafts do not change
    learnt = {} if auto is None else {(1, head): auto}
    config = SimpleNamespace(num_layers=num_layers, exit_layers=range(1, num_layers + 1))
    model = Nothing(config=config, draft_head=head, source=None, learnt=learnt)
    return Planner(cast(Network, model), 1)


def play(
    planner: Planner,
    answers: Sequence[Answer],
    times: RoundTimes,
    *,
    max_tokens: int,
    noise: float = 0.0,
    chance: random.Random | None = None,
) -> Played:
    """A batch of answers, round by round.

    Args:
        planner: the planner, which chooses and learns.
        answers: the answers of the requests, which all start together.
        times: the times of rounds.
        max_tokens: the length of an answer at most.
        noise: standard deviation of the logarithm of a round's time.
        chance: the source of the noise.
    """
    chance = chance or random.Random(0)
    batch = _Batch(planner, answers, times, max_tokens)
    while batch.running:
        batch.round(math.exp(chance.gauss(0.0, noise)))
    lengths = sorted(min(max_tokens, len(answer.tokens)) - 1 for answer in answers)
    full, before = 0.0, 0
    for ended, length in enumerate(lengths):
        requests = len(answers) - ended
        full += (length - before) * times.full(requests)
        before = length
    return Played(full, batch.seconds, batch.drafted, batch.accepted)


class _Batch:
    """Requests that decode together."""

    def __init__(
        self,
        planner: Planner,
        answers: Sequence[Answer],
        times: RoundTimes,
        max_tokens: int,
    ) -> None:
        self._planner, self._times = planner, times
        self._answers: dict[Request, Answer] = {}
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        for i, answer in enumerate(answers):
            request = Request(str(i), list(answer.prompt), sampling, Auto(), i, frozenset())
            request.output_ids.append(answer.tokens[0])
            self._answers[request] = answer
        self.running = list(self._answers)
        self._held: HeldChoice | None = None
        self._last_running: list[Request] | None = None
        self.seconds = 0.0
        self.drafted = self.accepted = 0

    def _left(self, request: Request) -> int:
        """Tokens that the request still has to generate."""
        most = min(request.sampling.max_tokens, len(self._answers[request].tokens))
        return most - len(request.output_ids)

    def round(self, slower: float) -> None:
        """Run one round of all running requests, ``slower`` times as long as recorded."""
        requests, times, planner = len(self.running), self._times, self._planner
        works = []
        for each in self.running:
            most = 0 if each.is_resting else max(0, min(each.max_drafts, self._left(each) - 1))
            works.append(Work(each, 1, most))
        rows = planner.plan(works)
        outcomes, drafted, steps = [], 0, 0
        for row in rows:
            request, tokens = row.sequence, row.drafts
            answer, written = self._answers[request], len(row.sequence.output_ids)
            accepted = answer.num_accepted(written, tokens)
            count = written + accepted + 1
            counters = Counters(drafted=len(tokens), accepted=accepted)
            outcome = Outcome(request, 0, list(answer.tokens[written:count]), counters=counters)
            if row.ahead and self._left(request) > accepted + 1:
                ahead = answer.after(count, row.ahead, row.ahead_thresholds)
                if ahead.tokens:
                    outcome.ahead = Ahead(
                        request.num_tokens + accepted + 1,
                        answer.tokens[count - 1],
                        ahead.tokens,
                        list(ahead.scores),
                    )
                steps = max(steps, len(ahead.tokens))
            drafted += len(tokens)
            self.accepted += accepted
            outcomes.append(outcome)
        self.drafted += drafted
        is_full = rows[0].route.path is None
        took = times.full(requests) if is_full else times.given(requests, drafted)
        took = slower * (took + steps * times.step(requests))
        if planner.held is not self._held:
            took += times.choosing(requests)
        self._held = planner.held
        is_same = self._last_running == self.running
        planner.learn(rows, outcomes, took if is_same else None)
        self._last_running = self.running
        for outcome in outcomes:
            outcome.sequence.draft.ahead = outcome.ahead
            outcome.sequence.output_ids += outcome.token_ids
        self.seconds += took
        self.running = [each for each in self.running if self._left(each) > 0]
