"""Whether a request's text hangs on its company: requests alone, then again in random company.

Each request runs once alone, then in engines whose limits, threads and other requests are drawn at
random: batches, chunks of prompts, few pages (so that requests are preempted), shared beginnings of
prompts, requests that come late, are cancelled or held, and texts read step by step. A request that
ends as it would must have the tokens, text and log-probabilities of the request alone, bit for bit;
one that is cancelled the beginning of them. In a lossless mode the request alone is one at full
depth: drafts change nothing, either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from random import Random

import torch

from eecore.config import EngineConfig, SamplingParams
from eecore.engine.engine import Engine
from eecore.errors import ExitError
from eecore.exit_text import exit_text
from eecore.exits import (
    Auto,
    ConfidentExit,
    DraftAndVerify,
    Exit,
    FixedExit,
    Full,
    HeadDrafts,
    PromptLookup,
    SelfSpeculative,
)
from eecore.generation import Model
from eecore.output import Output

PAGE_SIZES = (1, 4, 16, 32)
CHUNKS = (7, 33, 128, 512)
COMPANY = (2, 3, 5, 8, 16, 32)
"""The largest numbers of requests that run together."""
CANCELLED, HELD = 0.01, 0.02
"""The chances, at each step, that a request is cancelled, and that one is held for some steps."""
GROUPS = 4
"""Groups of requests for each engine; later ones find the prompts of earlier ones in its cache."""


@dataclass(frozen=True)
class Asked:
    """A request."""

    prompt: list[int]
    exit: Exit
    sampling: SamplingParams

    @property
    def reference(self) -> Asked:
        """The request whose output it must have: at full depth where the mode promises that."""
        is_full = self.exit.samples_as_full or (
            self.sampling.temperature == 0.0 and self.exit.contract.endswith("lossless")
        )
        return replace(self, exit=Full()) if is_full else self


@dataclass(frozen=True)
class Difference:
    """An output that is not that of the request alone."""

    asked: Asked
    company: str
    """The engine's limits and the number of requests that ran with it."""
    expected: Output
    got: Output

    def __str__(self) -> str:
        what = "text"
        for name in ("top_logprobs", "logprobs", "token_ids"):
            pairs = zip_longest(getattr(self.expected, name) or [], getattr(self.got, name) or [])
            for place, (expected, got) in enumerate(pairs):
                if expected != got:
                    what = f"{name}[{place}]: expected {expected}, got {got}"
                    break
        given = asdict(self.asked.sampling).items() - asdict(SamplingParams()).items()
        sampling = ", ".join(f"{name}={value}" for name, value in sorted(given))
        mode = mode_text(self.asked.exit)
        return f"{mode}: {what}; {self.company}; {self.asked.prompt[:8]}, {sampling}"


@dataclass
class Tally:
    """What was compared in one mode."""

    requests: int = 0
    sampled: int = 0
    tokens: int = 0
    drafted: int = 0
    cached: int = 0
    """Tokens of prompts that came from the prefix cache."""
    preempted: int = 0
    cancelled: int = 0
    differ: int = 0


def mode_text(policy: Exit) -> str:
    """A policy as a text, with the measure that its own text leaves out."""
    measure = getattr(policy, "measure", "softmax")
    return exit_text(policy) if measure == "softmax" else f"{exit_text(policy)} {measure}"


def modes_of(model: Model) -> list[Exit]:
    """The policies that are verified on a model: one or two of each mode that it can run."""
    config = model.network.config
    exits = config.exit_layers
    middle = exits[max(len(exits) // 2 - 1, 0)]
    policies: list[Exit] = [
        Full(),
        Auto(),
        PromptLookup(6, min_ngram=1),
        SelfSpeculative(middle, 4),
        DraftAndVerify(frozenset({middle}), frozenset({middle}), 4),
        ConfidentExit(0.5),
        ConfidentExit(0.9, measure="state"),
        FixedExit(middle),
    ]
    if model.network.draft_head is not None:
        policies.append(HeadDrafts(4))
    able = []
    for policy in policies:
        try:
            policy.check(config)
        except ExitError:
            continue
        able.append(policy)
    return able


def requests_of(
    prompts: Sequence[Sequence[int]], modes: Sequence[Exit], max_tokens: int, random: Random
) -> Iterator[Asked]:
    """Endless requests: half of them greedy, half sampled with seeds; prompts are cut at random, so
    that many begin alike.
    """
    while True:
        for mode in modes:
            prompt = list(random.choice(prompts))
            if random.random() < 0.5:
                prompt = prompt[: random.randint(1, len(prompt))]
            is_sampled = random.random() < 0.5
            sampling = SamplingParams(
                max_tokens=random.randint(1, max_tokens),
                temperature=random.choice((0.6, 1.0, 1.4)) if is_sampled else 0.0,
                top_p=random.choice((1.0, 0.9)) if is_sampled else 1.0,
                top_k=random.choice((0, 40)) if is_sampled else 0,
                repetition_penalty=random.choice((1.0, 1.0, 1.1)),
                logprobs=random.choice((0, 0, 3)),
                seed=random.getrandbits(60),
                ignore_eos=random.random() < 0.5,
            )
            yield Asked(prompt, mode, sampling)


def limits_of(model: Model, longest: int, random: Random) -> EngineConfig:
    """Random limits of an engine that can serve requests of ``longest`` tokens, hardly many at
    once.
    """
    page_size, chunk = random.choice(PAGE_SIZES), random.choice(CHUNKS)
    longest += 2 * page_size + 16  # drafts
    return replace(
        model.engine_config,
        kv_cache_tokens=int(longest * random.choice((1.0, 1.0, 1.5, 3.0))),
        page_size=page_size,
        max_num_seqs=random.choice(COMPANY),
        max_prefill_chunk=chunk,
        max_batch_tokens=chunk + random.choice((64, 512)),
        prefix_cache=random.random() < 0.7,
    )


def verify(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    requests: int,
    max_tokens: int = 32,
    seed: int = 0,
    modes: Sequence[Exit] | None = None,
    goes_on: Callable[[int, int], bool] = lambda _done, _found: True,
) -> tuple[dict[str, Tally], list[Difference]]:
    """Compare requests in random company with the same requests alone.

    Args:
        prompts: token ids of prompts to choose from.
        requests: requests to compare, if nothing stops earlier.
        max_tokens: most tokens of an answer.
        seed: of everything that is drawn.
        modes: policies; None: :func:`modes_of`.
        goes_on: called before each group of requests, with the requests compared and the
            differences found so far; False ends the comparison.

    Returns:
        What was compared by mode, and each difference.
    """
    random = Random(seed)
    modes = modes_of(model) if modes is None else modes
    source = requests_of(prompts, modes, max_tokens, random)
    tallies = {mode_text(mode): Tally() for mode in modes}
    differences: list[Difference] = []
    threads, done = torch.get_num_threads(), 0
    alone = model.engine(replace(model.engine_config, prefix_cache=False, max_num_seqs=1))
    longest = max(map(len, prompts)) + max_tokens
    try:
        while done < requests and goes_on(done, len(differences)):
            config = limits_of(model, longest, random)
            engine, own_threads = model.engine(config), random.randint(1, threads)
            for _ in range(GROUPS):
                count = min(random.choice(COMPANY), requests - done)
                group = [next(source) for _ in range(count)]
                torch.set_num_threads(threads)
                expected = [_alone(alone, asked.reference) for asked in group]
                torch.set_num_threads(own_threads)
                company = (
                    f"{count} requests, at most {config.max_num_seqs} at once, {own_threads} "
                    f"threads, {config.num_pages} pages of {config.page_size}, chunks of "
                    f"{config.max_prefill_chunk}"
                )
                got = _in_company(engine, group, random)
                for asked, one, other in zip(group, expected, got, strict=True):
                    tally = tallies[mode_text(asked.exit)]
                    _count(tally, asked, other)
                    if not same(one, other):
                        tally.differ += 1
                        differences.append(Difference(asked, company, one, other))
                done += count
                if done >= requests or not goes_on(done, len(differences)):
                    break
    finally:
        torch.set_num_threads(threads)
    return tallies, differences


def same(expected: Output, got: Output) -> bool:
    """Whether an output is the expected one to the bit, or its beginning if it was cancelled."""
    count = len(got.token_ids)
    if got.finish_reason == "cancelled":
        ends = True
    else:
        ends = (expected.finish_reason, expected.text, len(expected.token_ids)) == (
            got.finish_reason,
            got.text,
            count,
        )
    return (
        ends
        and expected.token_ids[:count] == got.token_ids
        and (expected.logprobs or [])[:count] == (got.logprobs or [])
        and (expected.top_logprobs or [])[:count] == (got.top_logprobs or [])
    )


def _alone(engine: Engine, asked: Asked) -> Output:
    engine.add_request(asked.prompt, exit=asked.exit, sampling=asked.sampling)
    return next(step.output for step in engine.run() if step.output is not None)


def _in_company(engine: Engine, group: Sequence[Asked], random: Random) -> list[Output]:
    """The outputs of requests that come one after the other, while some are cancelled or held."""
    outputs: dict[str, Output] = {}
    texts: dict[str, str] = {}
    waiting, held = list(enumerate(group)), list[str]()
    while waiting or engine.has_unfinished:
        while waiting and random.random() < 0.6:
            number, asked = waiting.pop(0)
            engine.add_request(
                asked.prompt, exit=asked.exit, sampling=asked.sampling, request_id=str(number)
            )
        running = list(engine.requests)
        if running and random.random() < CANCELLED:
            name = random.choice(running)
            output = engine.cancel(name)
            if output is not None:
                outputs[name] = output
        if running and random.random() < HELD:
            held.append(random.choice(running))
            engine.hold(held[-1])
        if held and (random.random() < 0.2 or not engine.has_runnable):
            engine.resume(held.pop())
        for step in engine.step() if engine.has_runnable else ():
            texts[step.request_id] = texts.get(step.request_id, "") + step.text
            if step.output is not None:
                outputs.setdefault(step.request_id, step.output)
    for name, output in outputs.items():
        if output.finish_reason != "cancelled" and output.text is not None:
            outputs[name] = replace(output, text=texts[name])  # as it was streamed
    return [outputs[str(number)] for number in range(len(group))]


def _count(tally: Tally, asked: Asked, got: Output) -> None:
    tally.requests += 1
    tally.tokens += len(got.token_ids)
    tally.sampled += asked.sampling.temperature > 0.0
    tally.cancelled += got.finish_reason == "cancelled"
    tally.preempted += got.stats.preemptions
    tally.cached += got.stats.cached_tokens
    tally.drafted += got.stats.drafted
