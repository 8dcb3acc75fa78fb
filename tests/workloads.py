"""Requests served with faults in between, and the invariants that have to hold.

A driver plays a client that calls again whatever raised: a call that does may end requests with
an error, but no page is lost, and nothing is done twice.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import eecore
from eecore import (
    Auto,
    ConfidentExit,
    DraftAndVerify,
    Engine,
    EngineConfig,
    ExitClassifier,
    FixedExit,
    Full,
    HeadDrafts,
    Output,
    PromptLookup,
    SamplingParams,
    SelfSpeculative,
)
from eecore.exits import Exit
from eecore.output import StepOutput
from eecore.scheduling.sequence import Sequence, SequenceStatus
from tripwire import Fault, Interrupt, Tripwire

T = TypeVar("T")


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether something comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def python_calls(engine: Engine, steps: int = 8) -> float:
    """The mean number of Python calls of the next steps."""
    calls = 0

    def counts(_frame: Any, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    gc.collect()  # what is left of other engines calls back when it is collected
    gc.disable()
    sys.setprofile(counts)
    try:
        for _ in range(steps):
            engine.step()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls / steps


# Few pages, pages of one position, chunks, and batches cut short by the budget.
SMALL_CACHES = [
    EngineConfig(kv_cache_tokens=32, page_size=4, max_num_seqs=4, max_prefill_chunk=5),
    EngineConfig(kv_cache_tokens=36, page_size=1, max_batch_tokens=9, max_num_seqs=4),
    EngineConfig(kv_cache_tokens=48, page_size=16, max_num_seqs=4),
]


def policies(classifier: ExitClassifier) -> list[Exit]:
    """Policies of every kind, for a model of three layers that has a draft head."""
    return [
        Full(),
        FixedExit(1),
        ConfidentExit(0.35, decay_tau=1.0),
        ConfidentExit(0.96, measure="state", exit_points=(1, 2)),
        ConfidentExit(0.5, measure="classifier", classifier=classifier, min_exit_layer=2),
        ConfidentExit(0.0, batch="all", min_exit_layer=2),
        SelfSpeculative(2, 4),
        SelfSpeculative(1, 2, draft_threshold=0.2),
        DraftAndVerify({2}, {1, 2}),
        PromptLookup(3, min_ngram=1),
        HeadDrafts(3, 0.01),
        Auto(3, exit_layers=(2,)),
    ]


# For a model of five layers.
LOSSLESS: list[Exit] = [
    SelfSpeculative(1, 4),
    SelfSpeculative(3, 7),
    DraftAndVerify({1, 3}, {2}),
    PromptLookup(6, min_ngram=1),
    Auto(),
]


@dataclass(frozen=True)
class Request:
    """A client's request."""

    prompt: list[int]
    exit: Exit
    sampling: SamplingParams


def check_books(engine: Engine) -> None:
    """No page or request may be lost, held twice or half done."""
    unfinished = engine.requests.values()
    held = Counter(page for s in unfinished for page in (*s.pages, *s.input_pages))
    pages = engine.pages
    assert pages._owners == held
    assert pages.num_free == pages.num_pages - len(held), "a page is lost"
    assert sorted([*held, *pages._free, *pages._kept]) == list(range(pages.num_pages))
    assert pages._approximate <= set(held)
    check_sharing(engine, held)
    check_states(engine)
    scheduler = engine.scheduler
    queues = (scheduler.waiting, scheduler.running, scheduler.held)
    queued = Counter(s.request_id for queue in queues for s in queue)
    assert queued == Counter(list(engine.requests))
    for queue in (scheduler.waiting, scheduler.running):
        assert [s.arrival for s in queue] == sorted(s.arrival for s in queue)
    for sequence in unfinished:
        check_sequence(sequence, pages.page_size)


def check_states(engine: Engine) -> None:
    """No state of a text may be lost or held twice, and all with pages have one."""
    states = engine.pages.states
    if states is None:
        return
    owned = [s.state for s in engine.requests.values() if s.state]
    every = sorted([*owned, *states._free, *states._kept.values()])
    assert every == list(range(1, engine._num_states + 1))
    for sequence in engine.requests.values():
        assert (sequence.state > 0) == sequence.has_pages


def check_sharing(engine: Engine, held: Counter[int]) -> None:
    """Shared pages are full, exact and found; no request is about to write into one."""
    pages = engine.pages
    cache = pages._cache
    if cache is None:
        assert not pages._kept
        assert set(held.values()) <= {1}, "a page belongs to two requests"
        return
    assert cache._keys == {page: key for key, page in cache._pages.items()}
    assert len(cache._keys) == len(cache._pages), "a page holds two things"
    assert set(pages._kept) == {page for page in cache._keys if page not in held}
    assert not pages._approximate & set(cache._keys)
    for sequence in engine.requests.values():
        own = sequence.pages[sequence.num_computed // pages.page_size :]
        assert not any(page in cache.contents or held[page] > 1 for page in own)
        for page, key in zip(sequence.pages, sequence.page_keys, strict=False):
            assert cache._keys.get(page, key) == key


def check_sequence(sequence: Sequence, page_size: int) -> None:
    """The fields of a request have to agree."""
    count = len(sequence.output_ids)
    assert sequence.status is not SequenceStatus.FINISHED
    assert len(sequence.exit_layers) == len(sequence.confidences) == len(sequence.output_ids)
    assert len(sequence.kv_exit_layers) == max(count - 1, 0)
    assert sequence.num_computed <= max(sequence.num_tokens - 1, sequence.num_prompt_tokens)
    asked = sequence.sampling.prompt_logprobs is not None
    most = sequence.num_prompt_tokens - 1
    assert min(sequence.num_computed, most) * asked <= len(sequence.prompt_logprobs) <= most * asked
    assert len(sequence.pages) * page_size >= sequence.num_computed
    if sequence.status is SequenceStatus.WAITING:
        assert not sequence.pages
        assert not sequence.input_pages
        assert sequence.num_computed == 0


@dataclass
class Driver:
    """A client of one engine.

    Args:
        engine: the engine to drive.
        faults: for each call the line at which it raises and what, or None; calls after its end
            go undisturbed.
    """

    engine: Engine
    faults: Iterator[tuple[int, type[BaseException]] | None] = field(
        default_factory=lambda: iter(())
    )
    outputs: dict[str, Output] = field(default_factory=dict)
    given: dict[str, list[int]] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    thoughts: dict[str, str] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    """Requests that may have ended without an output, in a call that raised."""
    tripped: int = 0

    def add(self, request: Request, request_id: str) -> None:
        """Add a request, which is not there if the call raises."""

        def call() -> str:
            assert request_id not in self.engine.requests
            return self.engine.add_request(
                request.prompt, exit=request.exit, sampling=request.sampling, request_id=request_id
            )

        assert self._called(call) == request_id
        assert request_id in self.engine.requests
        self.given[request_id], self.text[request_id], self.thoughts[request_id] = [], "", ""

    def step(self) -> None:
        """Run a step; the requests' earlier tokens are not lost if the call raises."""
        for step in self._called(self.engine.step):
            self._take(step)

    def cancel(self, request_id: str) -> Output | None:
        """Cancel a request; returns its output unless the call raises."""
        self.cancelled.add(request_id)
        output = self._called(lambda: self.engine.cancel(request_id))
        assert request_id not in self.engine.requests
        if output is not None:
            assert request_id not in self.outputs
            self.outputs[request_id] = output
        return output

    def hold(self, request_id: str) -> None:
        """Hold a request."""
        self._called(lambda: self.engine.hold(request_id))

    def resume(self, request_id: str) -> None:
        """Resume a request."""
        self._called(lambda: self.engine.resume(request_id))

    def finish(self) -> None:
        """Step until no request is left; then the engine has to be idle."""
        while self._called(lambda: self.engine.has_unfinished):
            self.step()
        check_books(self.engine)
        assert self.engine.pages.num_free == self.engine.pages.num_pages
        assert set(self.outputs) | self.cancelled == set(self.given) | self.cancelled

    def _called(self, call: Callable[[], T]) -> T:
        """The result of a call, which is repeated while it raises."""
        while True:
            fault = next(self.faults, None)
            if fault is None:
                return call()
            wire = Tripwire(*fault)
            try:
                with wire:
                    return call()
            except (Fault, Interrupt):
                check_books(self.engine)
            finally:
                self.tripped += wire.tripped

    def _take(self, step: StepOutput) -> None:
        name = step.request_id
        assert name not in self.outputs, "tokens after the end"
        self.given[name] += step.token_ids
        self.text[name] += self._called(lambda: step.text)
        self.thoughts[name] += self._called(lambda: step.thought)
        assert len(step.token_ids) == len(step.exit_layers) == len(step.confidences)
        if step.prompt_logprobs is not None:
            assert name not in self.scores, "a prompt was scored twice"
            self.scores[name] = step.prompt_logprobs
        if step.output is not None and step.output.finish_reason == "error":
            given = self.given[name]  # a call that raised may have kept back some more
            assert step.output.token_ids[: len(given)] == given
            self.outputs[name] = step.output
        elif step.output is not None:
            assert step.output.token_ids == self.given[name], "a token is lost, or came twice"
            assert (step.output.text or "") == self.text[name]
            assert (step.output.thought or "") == self.thoughts[name]
            assert step.output.prompt_logprobs == self.scores.get(name)
            self.outputs[name] = step.output


def same(output: Output, expected: Output) -> bool:
    """Whether outputs are equal, except for the drafted tokens, which depend on free pages."""
    drafts = output.stats.drafted or expected.stats.drafted
    layers = bool(drafts) or output.exit_layers == expected.exit_layers
    return (
        output.token_ids == expected.token_ids
        and output.text == expected.text
        and output.thought == expected.thought
        and output.finish_reason == expected.finish_reason
        and output.prompt_logprobs == expected.prompt_logprobs
        and layers
    )


def serve(engine: Engine, requests: Iterable[Request]) -> list[Output]:
    """The undisturbed outputs of requests, in order."""
    driver = Driver(engine)
    names = []
    for number, request in enumerate(requests):
        driver.add(request, str(number))
        names.append(str(number))
    driver.finish()
    return [driver.outputs[name] for name in names]


def tokens_of(outputs: Iterable[Output]) -> list[list[int]]:
    """The tokens of each output."""
    return [output.token_ids for output in outputs]


def check_company(model: eecore.Model, requests: list[Request], few_pages: Engine) -> None:
    """Requests have to give alone what they give together and when preempted.

    Args:
        few_pages: an engine that has not the pages for all of them at once.
    """

    def generated(some: list[Request]) -> list[list[int]]:
        prompts = [request.prompt for request in some]
        exits = [request.exit for request in some]
        sampling = [request.sampling for request in some]
        return tokens_of(eecore.generate(model, prompts, exit=exits, sampling=sampling))

    expected = [tokens for request in requests for tokens in generated([request])]
    assert generated(requests) == expected
    outputs = serve(few_pages, requests)
    assert tokens_of(outputs) == expected
    assert sum(output.stats.preemptions for output in outputs) > 0


def numbers(request_ids: Iterable[str]) -> list[Any]:
    """The numbers that are the ids of requests, sorted."""
    return sorted(map(int, request_ids))
