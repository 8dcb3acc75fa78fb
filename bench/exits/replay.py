"""The choices of ``Auto`` on recorded drafts and times, without the noise of a machine.

python -m bench replay [--weights file int8] [--batches 1 4 8]

For each kind of prompt the benchmark records the drafts of SmolLM2's draft head after every token
of its greedy answers, and the times of rounds by their requests and drafts. Then ``Auto`` decides
round after round, in random batches of these prompts, with a clock that the recorded times move;
it starts without knowledge of the model. It is compared with the best constant policy, found by
trying: a number of steps of the head, a threshold, and drafts that are looked up by long n-grams
or not at all. The replay leaves out the time that a machine loses when kinds of rounds alternate.
Writes bench/results/replay.json and its table in bench/results.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch

import eecore
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.prompts import KINDS, prompts_of
from bench.harness.replay import Answer, RoundTimes, new_planner, play
from bench.harness.results import Figures, Report
from bench.harness.smollm2 import LONGEST_PROMPT, chat, loaded, smollm2_file
from eecore.lab.evaluation.tables import markdown_table
from eecore.planning.auto import FULL, Choice, Chooser
from eecore.planning.costs import Costs
from eecore.planning.draft_state import DraftState
from eecore.planning.ngrams import MATCH_SCORES
from eecore.planning.planner import Planner
from eecore.planning.proposal import MAX_AHEAD, NOTHING, Proposal

REQUESTS = (1, 2, 4, 8)
"""Numbers of requests of the rounds that are timed."""
DRAFTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of drafts that these rounds verify, over all requests."""
STEPS = 3
"""Steps of the head after timed rounds that verify nothing."""
TURNS = 8
"""Rounds of each sort."""
FIRST_TURNS = 2
"""The first of these rounds, which do not count."""
STEPS_TRIED, THRESHOLDS = (1, 2, 3, 4), (0.3, 0.5, 0.7, 0.9)
LOOKUPS = ((0, 0), (4, 3), (8, 8))
"""Lookups of the constant policies: (the shortest n-gram, the maximum draft length)."""
NOISE = 0.03  # standard deviation of the logarithm of a round's time
PLAYS = 4  # replays of each kind and batch


class Told(Chooser):
    """A chooser with prescribed choices, which ignores costs."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers, None, (0.5,))

    def choose(self, drafts: Sequence[DraftState], *_: Any, **__: Any) -> Choice:
        return self.told(len(drafts))

    def pick(
        self, drafts: Sequence[DraftState], given: Sequence[Sequence[Proposal]], **_: Any
    ) -> tuple[list[Proposal], float]:
        return [self.taken(draft, its) for draft, its in zip(drafts, given, strict=True)], 0.0

    def told(self, requests: int) -> Choice:
        """The prescribed choice for so many requests."""
        raise NotImplementedError

    def taken(self, draft: DraftState, given: Sequence[Proposal]) -> Proposal:
        """The proposal for a request, made from ``given``, the proposals of its sources."""
        raise NotImplementedError


class Recorder(Told):
    """Records a head's longest drafts after each token; no draft is verified."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.drafts: dict[int, list[Proposal]] = {}
        """The head's proposals of each request, by the id of its draft state, in order."""
        self._kept: list[DraftState] = []  # keeps the ids unique

    def told(self, requests: int) -> Choice:
        del requests
        return Choice(asks=True, ahead=MAX_AHEAD, thresholds=(0.0,) * MAX_AHEAD, rounds=1)

    def choose(
        self, drafts: Sequence[DraftState], *_: Any, given: Sequence[Sequence[Proposal]], **__: Any
    ) -> Choice:
        for draft, its in zip(drafts, given, strict=True):
            self._kept.append(draft)
            headed = next((proposal for proposal in its if proposal.source == "head"), NOTHING)
            self.drafts.setdefault(id(draft), []).append(headed)
        return self.told(len(drafts))

    def taken(self, draft: DraftState, given: Sequence[Proposal]) -> Proposal:
        del draft, given
        return NOTHING


class Times:
    """Seconds of rounds, by sort and count."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, int], list[float]] = defaultdict(list)

    def note(self, sort: str, count: int, seconds: float) -> None:
        self._seconds[sort, count].append(seconds)

    def median(self, sort: str, count: int = 0) -> float | None:
        """Median seconds of a sort and count; None without rounds."""
        found = self._seconds.get((sort, count))
        return statistics.median(found) if found else None


class NotedCosts(Costs):
    """Costs that also report the rounds of full depth that they learn."""

    def __init__(self, note: Callable[[str, int, float], None]) -> None:
        super().__init__()
        self._note = note

    def learn_full(self, requests: int, seconds: float) -> None:
        self._note("full", 0, seconds)
        super().learn_full(requests, seconds)


class Timer(Told):
    """Times rounds of each sort in turns, with wrong drafts."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.times = Times()
        """Seconds of rounds of full depth, of rounds with drafts, and of steps of a head."""
        self._turns = self._sorts()
        self._now = ("full", 0)
        self._left = self._seen = 0
        self.costs = NotedCosts(self.note)

    def _sorts(self) -> Iterator[tuple[str, int]]:
        while True:
            yield "full", 0
            yield "steps", STEPS  # before the many others, which an answer may be too short for
            yield from (("given", drafts) for drafts in DRAFTS)

    def told(self, requests: int) -> Choice:
        del requests
        self._now = sort, count = next(self._turns)
        self._left, self._seen = count, 0
        if sort == "full":
            return FULL._replace(rounds=2 * TURNS)
        steps = count if sort == "steps" else 0
        return Choice(asks=True, ahead=steps, thresholds=(0.0,) * MAX_AHEAD, rounds=TURNS)

    def pick(
        self, drafts: Sequence[DraftState], given: Sequence[Sequence[Proposal]], **_: Any
    ) -> tuple[list[Proposal], float]:
        del given
        rows, left = len(drafts), self._left if self._now[0] == "given" else 0
        counts = [left // rows + (i < left % rows) for i in range(rows)]
        return [Proposal([0] * own, "text", (0.5,) * own) for own in counts], 0.0

    def learn_given(self, requests: int, verified: int, steps: int, seconds: float) -> None:
        super().learn_given(requests, verified, steps, seconds)
        self.note("steps" if steps else "given", verified or steps, seconds)

    def note(self, sort: str, count: int, seconds: float) -> None:
        """Record the seconds of a round if it was of the prescribed sort and count."""
        if (sort, count) == self._now:
            self._seen += 1
            if self._seen > FIRST_TURNS:
                self.times.note(sort, count, seconds)


class Choosing(Chooser):
    """A chooser that records the seconds of its choices."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers, None, (0.5,))
        self.times = Times()

    def choose(self, *given: Any, **more: Any) -> Choice:
        began = time.perf_counter()
        choice = super().choose(*given, **more)
        self.times.note("choosing", 0, time.perf_counter() - began)
        return choice


class Same(Told):
    """A constant policy: steps of the head, a threshold, and drafts of long n-grams."""

    def __init__(
        self, num_layers: int, steps: int, threshold: float, lookups: tuple[int, int]
    ) -> None:
        super().__init__(num_layers)
        self._ahead, self._threshold, self._lookups = steps, threshold, lookups

    def told(self, requests: int) -> Choice:
        del requests
        thresholds = (self._threshold,) * MAX_AHEAD
        return Choice(asks=True, ahead=self._ahead, thresholds=thresholds)

    def taken(self, draft: DraftState, given: Sequence[Proposal]) -> Proposal:
        del draft
        shortest, most = self._lookups
        taken = NOTHING
        for proposal in given:
            if proposal.source == "head":
                sure = [score for score in proposal.scores if score >= self._threshold]
                taken = proposal.first(len(sure))
            elif most and proposal.scores[0] >= MATCH_SCORES[shortest]:
                taken = proposal.first(most)
        return taken


def use(model: eecore.Model, auto: Chooser) -> None:
    """Let a chooser decide for the model's ``Auto`` requests from now on."""
    network = model.network
    network.learnt[torch.get_num_threads(), network.draft_head] = auto


def answers_of(model: eecore.Model, prompts: Sequence[list[int]], tokens: int) -> list[Answer]:
    """Greedy answers, and the head's drafts after each of their tokens."""
    found = []
    for i in range(0, len(prompts), 8):
        group = list(prompts[i : i + 8])
        recorder = Recorder(model.config.num_layers)
        use(model, recorder)
        outputs = eecore.generate(
            model, group, exit=eecore.Auto(), max_tokens=tokens, ignore_eos=True
        )
        drafts = list(recorder.drafts.values())
        for prompt, output, its in zip(group, outputs, drafts, strict=True):
            found.append(Answer(prompt, output.token_ids, its))
    return found


def times_of(model: eecore.Model, prompts: Sequence[list[int]]) -> RoundTimes:
    """Times of rounds after these prompts, by number of requests."""
    full: dict[int, float] = {}
    given: dict[int, dict[int, float]] = {}
    step: dict[int, float] = {}
    choosing: dict[int, float] = {}
    rounds = TURNS * (len(DRAFTS) + 3) + 8
    for requests in REQUESTS:
        timer, auto = Timer(model.config.num_layers), Choosing(model.config.num_layers)
        for first in range(0, max(2 * requests, 4), requests):
            group = [prompts[(first + i) % len(prompts)] for i in range(requests)]
            use(model, timer)
            policy = eecore.Auto(max(DRAFTS))
            eecore.generate(model, group, exit=policy, max_tokens=rounds + 40, ignore_eos=True)
            use(model, auto)
            eecore.generate(model, group, exit=eecore.Auto(), max_tokens=64, ignore_eos=True)
        known = {drafts: timer.times.median("given", drafts) for drafts in DRAFTS}
        given[requests] = {drafts: t for drafts, t in known.items() if t is not None}
        full[requests] = timer.times.median("full", 0) or 0.0
        steps = timer.times.median("steps", STEPS) or 0.0
        given[requests].setdefault(0, full[requests])
        step[requests] = max(steps - given[requests][0], 0.0) / STEPS
        choosing[requests] = auto.times.median("choosing") or 0.0
    return RoundTimes(full, given, step, choosing)


def played(
    planner: Planner,
    answers: Sequence[Answer],
    times: RoundTimes,
    batch: int,
    tokens: int,
    chance: random.Random,
) -> float:
    """Speed-up of a planner over full depth, for all answers in batches."""
    order = list(answers)
    chance.shuffle(order)
    full = other = 0.0
    for i in range(0, len(order) - batch + 1, batch):
        its = play(
            *(planner, order[i : i + batch], times),
            max_tokens=tokens,
            noise=NOISE,
            chance=chance,
        )
        full, other = full + its.full, other + its.auto
    return full / other


def best_same(
    answers: Sequence[Answer], times: RoundTimes, batch: int, tokens: int, num_layers: int
) -> tuple[float, str]:
    """The best constant policy: (its speed-up, its description)."""
    best = 0.0, ""
    for steps, threshold, lookups in product(STEPS_TRIED, THRESHOLDS, LOOKUPS):
        same = Same(num_layers, steps, threshold, lookups)
        planner = new_planner(num_layers, (), same)
        speedup = played(planner, answers, times, batch, tokens, random.Random(1))
        what = f"{steps} @ {threshold}" + (f", {lookups[0]}-grams" if lookups[1] else "")
        best = max(best, (speedup, what))
    return best


def rows_of(
    model: eecore.Model, weights: str, recorded: dict[str, list[Answer]], arguments: Any
) -> list[dict[str, Any]]:
    """Rows of all kinds of prompts in all batches, with one kind of weights."""
    head = model.network.draft_head
    assert head is not None
    num_layers, agreement = model.config.num_layers, head.agreement
    times = {}
    for kind, answers in recorded.items():
        say(f"{weights}, {kind}: times")
        times[kind] = times_of(model, [list(answer.prompt) for answer in answers])
    rows = []
    for batch in arguments.batches:
        autos: dict[str, list[float]] = {kind: [] for kind in recorded}
        for number in range(PLAYS):
            chance, planner = random.Random(number), new_planner(num_layers, agreement)
            for kind, answers in recorded.items():  # the planner keeps what it learnt
                speedup = played(planner, answers, times[kind], batch, arguments.tokens, chance)
                autos[kind].append(speedup)
        for kind, answers in recorded.items():
            same, what = best_same(answers, times[kind], batch, arguments.tokens, num_layers)
            auto = math.exp(statistics.mean(map(math.log, autos[kind])))
            row = {"weights": weights, "kind": kind, "batch": batch, "prompts": len(answers)}
            row |= {"auto": auto, "same": same, "what": what}
            row["full_ms"] = 1e3 * times[kind].full(batch)
            row["draft"] = (times[kind].given(batch, batch) / times[kind].full(batch) - 1.0) / batch
            rows.append(row)
            say(row)
    return rows


def table(figures: Figures) -> str:
    head = ["weights", "prompts", "batch", "full, ms a round", "a draft more", "auto"]
    head += ["always the same", "what"]
    rows = [
        [
            row["weights"],
            f"{row['kind']} ({row['prompts']})",
            str(row["batch"]),
            f"{row['full_ms']:.1f}",
            f"{row['draft']:.1%}",
            f"{row['auto']:.2f}x",
            f"{row['same']:.2f}x",
            row["what"],
        ]
        for row in figures["rows"]
    ]
    return (
        markdown_table(head, rows, text_columns=2)
        + f"\n\n{figures['model']}, greedy, at most {figures['tokens']} tokens an answer. A draft"
        " more: the time that one draft for each request adds, as a share of a round of full depth,"
        " divided by the requests. Always the same: steps of the head until a draft is below the"
        " threshold, and drafts of n-grams of at least that length. "
        f"{figures['threads']} thread(s), {in_words(figures['machine'])}. `python -m bench replay`"
    )


REPORT = Report("replay", {"replay": table}, {"rows": ("weights", "kind", "batch")})
REPORTS = [REPORT]


def main(words: Sequence[str]) -> None:
    command = parser("replay", __doc__, batches=(1, 4, 8), threads=1)
    command.add_argument("--weights", nargs="+", default=["file", "int8"])
    command.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    command.add_argument("--prompts", type=int, default=16, help="of each kind")
    command.add_argument("--tokens", type=int, default=64, help="tokens of an answer, at most")
    arguments = command.parse_args(words)
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    with smollm2_file() as file:
        recorded: dict[str, list[Answer]] = {}
        for weights in arguments.weights:
            model = loaded(file, weights, kv_cache_tokens=16384)
            for kind in arguments.kinds if not recorded else ():
                prompts = [chat(model, text) for text in prompts_of(kind, arguments.prompts)]
                prompts = [ids for ids in prompts if len(ids) <= LONGEST_PROMPT]
                recorded[kind] = answers_of(model, prompts, arguments.tokens + MAX_AHEAD)
            rows += rows_of(model, weights, recorded, arguments)
    figures: Figures = {
        "model": "SmolLM2-135M-Instruct",
        "rows": rows,
        "tokens": arguments.tokens,
        "threads": arguments.threads,
        "machine": machine(),
    }
    REPORT.finish(figures, arguments)
