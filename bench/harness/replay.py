"""Rounds of ``Auto`` played again: what heads drafted and how long passes took is given.

Everything but the model is as it is: the planner, what it learns, what it chooses.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch

from eecore.config import SamplingParams
from eecore.exits import Auto
from eecore.models import Network
from eecore.planning import planner as plan
from eecore.planning.chooser import Chooser
from eecore.planning.outcome import Outcome
from eecore.planning.planner import Planned, Planner
from eecore.planning.proposal import Ahead, Proposal
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import MAX_DRAFTS, Counters, TokenRecord
from eecore.scheduling.sequence import Sequence as Request

__all__ = ["Answer", "Played", "RoundTimes", "new_planner", "play"]


@dataclass(frozen=True)
class Answer:
    """A prompt's greedy answer, and what a draft head drafts behind each of its tokens."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    drafts: Sequence[Proposal]
    """Behind the first token, the first two, ..."""

    def behind(self, count: int, most: int, thresholds: Sequence[float]) -> Proposal:
        """What is drafted behind so many tokens, as far as each draft is likely enough."""
        drafted = self.drafts[count - 1] if count <= len(self.drafts) else Proposal([])
        size = 0
        for probability in drafted.probabilities[:most]:
            size += 1
            if probability < thresholds[size - 1]:
                break
        return drafted.first(size)

    def stand(self, count: int, drafts: Iterable[int]) -> int:
        """How many of these drafts are the next tokens behind the first ``count``."""
        accepted = 0
        for draft, token in zip(drafts, self.tokens[count:], strict=False):
            if draft != token:
                break
            accepted += 1
        return accepted


class RoundTimes:
    """Seconds of rounds, by their requests and drafts; between those measured a straight line.

    Args:
        full: of full depth, by requests.
        given: by requests, of rounds that verify so many drafts.
        step: of one step of a draft head, by requests.
        look: that choosing and learning take, by requests.
        between: from one round to the next, by requests.
    """

    def __init__(
        self,
        full: dict[int, float],
        given: dict[int, dict[int, float]],
        step: dict[int, float],
        look: dict[int, float],
        between: dict[int, float],
    ) -> None:
        self._full, self._step, self._look, self._between = full, step, look, between
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
        """A round that verifies so many drafts of so many requests, without steps of a head."""
        by_requests = {n: _between(times, drafts) for n, times in self._given.items()}
        return _between(by_requests, requests)

    def step(self, requests: int) -> float:
        return _between(self._step, requests)

    def look(self, requests: int) -> float:
        return _between(self._look, requests)

    def between(self, requests: int) -> float:
        return _between(self._between, requests)


def _between(known: dict[int, float], at: float) -> float:
    """Of a straight line through the two known places around; from the last on, as steep as the
    last half.
    """
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
    """What a batch took until its last answer was there."""

    full: float
    """Seconds at full depth."""
    auto: float
    drafted: int
    accepted: int


class _Clock:
    """What the planner reads instead of the machine's: each pair of readings is half a look."""

    def __init__(self) -> None:
        self.now = self.tick = 0.0

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now


def new_planner(
    num_layers: int, head_agreement: Sequence[float], chooser: Chooser | None = None
) -> Planner:
    """Of a model with a draft head, of which is known nothing else."""

    class Nothing(SimpleNamespace):
        __hash__ = object.__hash__

    head = Nothing(settings=SimpleNamespace(agreement=tuple(head_agreement)))
    head.know = lambda _: None  # what it drafts is known
    learnt = {} if chooser is None else {(torch.get_num_threads(), head): chooser}
    config = SimpleNamespace(num_layers=num_layers)
    model = Nothing(config=config, draft_head=head, source=None, learnt=learnt)
    return Planner(cast(Network, model), torch.get_num_threads())


@contextmanager
def _clock_of_planner() -> Iterator[_Clock]:
    clock, kept = _Clock(), plan.time
    plan.time = cast(Any, clock)
    try:
        yield clock
    finally:
        plan.time = kept


def play(
    planner: Planner,
    answers: Sequence[Answer],
    times: RoundTimes,
    *,
    most_tokens: int,
    noise: float = 0.0,
    chance: random.Random | None = None,
) -> Played:
    """A batch of answers, round by round.

    Args:
        planner: that chooses, and learns.
        answers: of the requests, which all begin and are never joined by others.
        times: that rounds take.
        most_tokens: of an answer.
        noise: of the logarithm of a round's time.
        chance: that it comes from.
    """
    chance = chance or random.Random(0)
    with _clock_of_planner() as clock:
        batch = _Batch(planner, answers, times, most_tokens, clock)
        while batch.running:
            batch.round(math.exp(chance.gauss(0.0, noise)))
    lengths = sorted(min(most_tokens, len(answer.tokens)) - 1 for answer in answers)
    full, before = 0.0, 0
    for ended, length in enumerate(lengths):
        requests = len(answers) - ended
        full += (length - before) * (times.full(requests) + times.between(requests))
        before = length
    return Played(full, batch.seconds, batch.drafted, batch.accepted)


class _Batch:
    """Requests that decode together."""

    def __init__(
        self,
        planner: Planner,
        answers: Sequence[Answer],
        times: RoundTimes,
        most_tokens: int,
        clock: _Clock,
    ) -> None:
        self._planner, self._times, self._clock = planner, times, clock
        self._answers: dict[Request, Answer] = {}
        sampling = SamplingParams(max_tokens=most_tokens, ignore_eos=True)
        for i, answer in enumerate(answers):
            request = Request(str(i), list(answer.prompt), sampling, Auto(), i, frozenset())
            request.output_ids.append(answer.tokens[0])
            self._answers[request] = answer
        self.running = list(self._answers)
        self._last_full: list[Request] | None = None
        self._begun = False
        self.seconds = 0.0
        self.drafted = self.accepted = 0

    def _left(self, request: Request) -> int:
        """Tokens that are still to come."""
        most = min(request.sampling.max_tokens, len(self._answers[request].tokens))
        return most - len(request.output_ids)

    def round(self, slower: float) -> None:
        """One of all that still run, so many times slower than usual."""
        requests, times, planner = len(self.running), self._times, self._planner
        self._clock.tick = times.look(requests) / 2
        works = [
            Work(each, 1, max(0, min(MAX_DRAFTS, self._left(each) - 1))) for each in self.running
        ]
        if self._begun:
            planner.went_between(times.between(requests))
        self._begun = True
        if not planner.chooses(works) and self._last_full == self.running:
            took = slower * times.full(requests)
            planner.went_on(requests, took)
            for each in self.running:
                self._gets(each, 0)
        else:
            planned = planner.plan(works)
            took = slower * self._run(planned)
            if planner.looked:
                took += times.look(requests)
        self.seconds += took + times.between(requests)
        left = [each for each in self.running if self._left(each) > 0]
        if len(left) < requests:
            self._last_full = None
        self.running = left

    def _run(self, planned: list[Planned]) -> float:
        """A round as it was planned, and what is learnt of it; its seconds."""
        requests, outcomes = len(planned), []
        is_full, drafted, steps = planned[0].route.path is None, 0, 0
        for each in planned:
            request, tokens = each.work.sequence, each.given.tokens
            answer = self._answers[request]
            accepted = answer.stand(len(request.output_ids), tokens)
            written = len(request.output_ids)
            self._gets(request, accepted)
            got = [TokenRecord(token, 0, 0.0) for token in request.output_ids[written:]]
            counters = Counters(drafted=len(tokens), accepted=accepted)
            outcome = Outcome(request, 0, got, counters=counters)
            if each.ahead and self._left(request) > 0:
                ahead = answer.behind(len(request.output_ids), each.ahead, each.ahead_thresholds)
                if ahead.tokens:
                    outcome.ahead = Ahead(
                        *(request.num_tokens, request.output_ids[-1]),
                        *(ahead.tokens, list(ahead.probabilities)),
                    )
                steps = max(steps, len(ahead.tokens))
            drafted += len(tokens)
            self.accepted += accepted
            outcomes.append(outcome)
        self.drafted += drafted
        times = self._times
        took = times.full(requests) if is_full else times.given(requests, drafted)
        took += steps * times.step(requests)
        self._planner.learn(planned, outcomes, took, went_on=self._last_full == self.running)
        self._last_full = list(self.running) if is_full else None
        for outcome in outcomes:
            outcome.sequence.ahead = outcome.ahead
        return took

    def _gets(self, request: Request, accepted: int) -> None:
        count = len(request.output_ids)
        request.output_ids += self._answers[request].tokens[count : count + accepted + 1]
