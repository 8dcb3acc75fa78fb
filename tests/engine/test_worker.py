"""One engine for all callers of a model: threads, open streams, callers that stop in the middle."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

import eecore
from devices import cpu_only, load
from eecore import (
    ConfidentExit,
    Full,
    RequestError,
    SamplingParams,
    SelfSpeculative,
    generation,
)
from eecore.decoding.iterate import Iterations
from eecore.engine import callers
from eecore.engine import worker as module
from eecore.engine.callers import READ_AHEAD, Client
from eecore.engine.engine import Engine
from eecore.engine.worker import Worker
from eecore.models import KVCache
from eecore.scheduling.pages import PageAllocator
from eecore.scheduling.scheduler import Scheduler
from tiny_models import random_prompts
from tripwire import Fault
from workloads import check_books, until

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts(3, 12, 1, 7, 20, 5, seed=9)
POLICIES = [Full(), SelfSpeculative(2, 3), ConfidentExit(0.3), Full()]
SAMPLING = SamplingParams(max_tokens=14, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture
def model(agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[eecore.Model]:
    """A model whose engine has to be idle at the end of the test."""
    monkeypatch.setattr(module, "LOOK_S", 30.0)  # no caller has to be looked for
    yield agreeing
    assert_idle(agreeing.shared_engine())


def assert_idle(worker: Worker) -> None:
    """No request or page is left once the running step is done."""
    until(lambda: not (worker.engine.has_unfinished or worker.num_unfinished or worker._names))
    assert not worker.engine.requests
    assert not worker.engine.has_unfinished
    check_books(worker.engine)
    assert worker.engine.pages.num_free == worker.engine.pages.num_pages
    assert not worker._names
    assert not worker._served


def alone(model: eecore.Model, index: int, sampling: SamplingParams = SAMPLING) -> list[int]:
    outputs = eecore.generate(model, [PROMPTS[index]], exit=POLICIES[index], sampling=sampling)
    return outputs[0].token_ids


def start(target: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=target)
    thread.start()
    return thread


# One engine


def test_overlapping_calls_share_one_cache(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [alone(model, i) for i in range(4)]
    caches = 0
    allocate = KVCache.allocate

    def counted(*args: Any, **settings: Any) -> KVCache:
        nonlocal caches
        caches += 1
        return allocate(*args, **settings)

    monkeypatch.setattr(KVCache, "allocate", counted)
    streams = [eecore.stream(model, [PROMPTS[4]], sampling=LONG) for _ in range(3)]
    for stream in streams:
        next(stream)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert list(pool.map(lambda i: alone(model, i), range(4))) == expected
    for stream in streams:
        stream.close()
    assert caches == 0


def test_one_refused_prompt_of_many_and_nothing_runs(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = eecore.stream(model, [PROMPTS[1]], sampling=LONG)
    next(other)
    added: list[str] = []
    enqueue = Engine.enqueue

    def watched(engine: Engine, *args: Any) -> str:
        added.append(enqueue(engine, *args))
        return added[-1]

    monkeypatch.setattr(Engine, "enqueue", watched)
    with pytest.raises(RequestError, match="got 999"):
        eecore.generate(model, [PROMPTS[0], PROMPTS[2], [999]])
    assert not added
    next(other)
    other.close()


# Streams that are not read


def test_a_stream_that_is_not_read_is_put_on_hold(model: eecore.Model) -> None:
    expected = eecore.generate(model, PROMPTS[:2], sampling=LONG)
    order: list[str] = []
    unread = eecore.stream(model, PROMPTS[:2], exit="full", sampling=LONG, order=order)
    first = next(unread)
    engine = model.shared_engine().engine
    assert until(lambda: engine.num_held == 2)
    steps = {name: len(sequence.output_ids) for name, sequence in engine.requests.items()}
    assert set(steps.values()) == {READ_AHEAD}
    assert len(alone(model, 3, LONG)) == 400
    got = {name: list[int]() for name in order}
    got[first.request_id] += first.token_ids
    for step in unread:
        got[step.request_id] += step.token_ids
        if not step.finished:
            sequence = engine.requests.get(step.request_id)
            ahead = len(sequence.output_ids) if sequence else 400
            assert ahead <= len(got[step.request_id]) + READ_AHEAD
    assert list(got.values()) == [output.token_ids for output in expected]


def test_pages_of_unread_streams_are_there_for_others(agreeing: eecore.Model) -> None:
    """The cache holds one of them; streams that are read finish, and later the others do too."""
    model = eecore.Model(
        agreeing.network, agreeing.tokenizer, eecore.EngineConfig(64, 4), agreeing.run_program
    )
    sampling = SamplingParams(max_tokens=44, ignore_eos=True)
    expected = [eecore.generate(agreeing, [p], sampling=sampling)[0].token_ids for p in PROMPTS]
    streams = [eecore.stream(model, [p], sampling=sampling) for p in PROMPTS]
    got = [next(stream).token_ids for stream in streams]
    for index, stream in enumerate(streams):
        if index % 2:
            for step in stream:
                got[index] += step.token_ids
    for index, stream in enumerate(streams):
        for step in stream:
            got[index] += step.token_ids
    assert got == expected
    assert_idle(model.shared_engine())


# Callers that stop


def test_closing_dropping_and_collecting_a_stream_cancels_its_requests(
    model: eecore.Model,
) -> None:
    worker = model.shared_engine()
    for leave in ("close", "drop", "collect", "unread"):
        stays = eecore.stream(model, [PROMPTS[0]], sampling=LONG)
        leaves = eecore.stream(model, PROMPTS[1:3], sampling=LONG)
        if leave != "unread":
            next(stays)
            next(leaves)
        if leave == "close":
            leaves.close()
        if leave == "collect":
            cycle: list[Any] = [leaves]
            cycle.append(cycle)
            del cycle
        del leaves
        gc.collect()
        assert until(lambda: worker.num_unfinished <= 1)
        tokens = [token for step in stays for token in step.token_ids]
        assert len(tokens) == (400 if leave == "unread" else 399)
        assert_idle(worker)


def test_a_client_that_is_lost_without_a_close_is_noticed(model: eecore.Model) -> None:
    """An interrupt between two lines may lose it; Python's finaliser reports that."""
    worker = model.shared_engine()
    client = Client(worker)
    client.open([worker.engine.prepare(PROMPTS[0], sampling=LONG)])
    next(iter(client))
    del client
    assert_idle(worker)


@contextmanager
def interrupted(nth: int) -> Iterator[list[bool]]:
    """Raise KeyboardInterrupt where this thread begins the n-th line of the callers' code."""
    files = {callers.__file__, module.__file__, generation.__file__}
    count, hit = 0, list[bool]()

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        count += event == "line"
        if count == nth and not hit:
            hit.append(True)
            raise KeyboardInterrupt
        return trace

    with suppress(KeyboardInterrupt):
        sys.settrace(trace)
        try:
            yield hit
        finally:
            sys.settrace(None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("whole", [False, True], ids=["stream", "generate"])
def test_an_interrupt_at_every_line_of_a_callers_thread(model: eecore.Model, whole: bool) -> None:
    """Requests of other threads go on, and no page is lost."""
    expected = {i: alone(model, i, LONG) for i in (0, 3)}
    got: list[tuple[int, list[int]]] = []
    ends = threading.Event()

    def goes_on(index: int) -> None:
        while not ends.is_set():
            got.append((index, alone(model, index, LONG)))

    others = [start(lambda i=i: goes_on(i)) for i in expected]  # type: ignore[misc]
    is_hit, nth = True, 0
    while is_hit:
        nth += 1
        with interrupted(nth) as hit:
            if whole:
                eecore.generate(model, PROMPTS[1:3], sampling=SHORT)
            else:
                for _ in eecore.stream(model, PROMPTS[1:3], sampling=SHORT):
                    pass
        is_hit = bool(hit)
    ends.set()
    for other in others:
        other.join()
    assert nth > 100
    assert all(tokens == expected[index] for index, tokens in got)
    assert_idle(model.shared_engine())


def test_a_call_from_a_signal_handler(model: eecore.Model) -> None:
    """The handler runs in the middle of another call of the same thread."""
    texts: list[list[int]] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: texts.append(alone(model, 0)))
    try:
        timer = threading.Timer(0.005, signal.raise_signal, [signal.SIGUSR1])
        timer.start()
        assert len(alone(model, 1, LONG)) == 400
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert texts == [alone(model, 0)]


def test_a_call_from_the_thread_that_steps_is_refused(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a call, of a finaliser for one, would wait for itself."""
    refusals: list[RuntimeError] = []
    step = Engine.step

    def calls(engine: Engine) -> Any:
        monkeypatch.setattr(Engine, "step", step)
        try:
            eecore.generate(model, [PROMPTS[0]], sampling=SAMPLING)
        except RuntimeError as error:
            refusals.append(error)
        return step(engine)

    monkeypatch.setattr(Engine, "step", calls)
    assert len(alone(model, 1)) == 14
    (refusal,) = refusals
    assert "got one from inside" in str(refusal)


def test_a_name_goes_on_at_once(model: eecore.Model) -> None:
    """The name is free at once, though its request ends only with the running step."""

    async def main() -> list[int]:
        engine = model.async_engine()
        first = engine.stream(PROMPTS[0], sampling=LONG, request_id="mine")
        await anext(first)
        first.close()
        second = engine.stream(PROMPTS[1], sampling=SAMPLING, request_id="mine")
        return [token async for step in second for token in step.token_ids]

    expected = eecore.generate(model, [PROMPTS[1]], sampling=SAMPLING)[0].token_ids
    assert asyncio.run(main()) == expected


# What fails


def test_a_failing_step_reaches_every_caller(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Barrier(3)

    def broken(*_: Any, **__: Any) -> Any:
        raise Fault("broken")

    def one(index: int) -> str:
        stream = eecore.stream(model, [PROMPTS[index]], sampling=LONG)
        next(stream)
        gate.wait()
        if index == 0:
            monkeypatch.setattr(Iterations, "iterate", broken)
            monkeypatch.setattr(Iterations, "launch", broken)
        gate.wait()
        (*_, last) = stream
        assert last.output is not None
        assert last.output.error == "Fault: broken"
        return last.output.finish_reason

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(one, range(3))) == ["error"] * 3
    monkeypatch.undo()
    assert len(alone(model, 0)) == 14


@pytest.mark.parametrize(("owner", "name"), [(Scheduler, "schedule"), (PageAllocator, "publish")])
def test_an_error_of_no_request_ends_all_of_them_and_the_next_is_served(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    whole, left = getattr(owner, name), [Fault("broken")]

    def broken(*args: Any, **named: Any) -> Any:
        if len(model.shared_engine().engine.requests) == 3 and left:
            raise left.pop()
        return whole(*args, **named)

    streams = [eecore.stream(model, [prompt], sampling=LONG) for prompt in PROMPTS[:3]]
    firsts = [next(stream) for stream in streams]
    monkeypatch.setattr(owner, name, broken)
    for first, stream in zip(firsts, streams, strict=True):
        *_, last = [first, *stream]
        assert last.output is not None
        assert last.output.finish_reason == "error"
        assert last.output.error == "engine: expected no error, got Fault: broken"
    assert len(alone(model, 0)) == 14


# The worker thread


def test_the_worker_ends_when_it_is_not_needed(
    agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0.02)
    threads = set()
    step = Engine.step

    def watched(engine: Engine) -> Any:
        threads.add(threading.current_thread())
        return step(engine)

    monkeypatch.setattr(Engine, "step", watched)
    model = eecore.Model(agreeing.network, agreeing.tokenizer, agreeing.engine_config)
    for rounds in (1, 2):  # the thread starts again
        alone(model, 1)
        assert until(lambda: not any(thread.is_alive() for thread in threads))
        assert len(threads) == rounds
    monkeypatch.setattr(module, "LINGER_S", 1000.0)
    alone(model, 1)
    del model
    gc.collect()  # the thread does not keep an engine alive
    assert until(lambda: not any(thread.is_alive() for thread in threads))


@cpu_only
def test_kernels_run_on_as_many_threads_as_the_caller_says(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps the number per thread, and the worker has a thread of its own."""
    whole, seen = Iterations.iterate, set[int]()

    def watched(*args: Any, **settings: Any) -> Any:
        seen.add(torch.get_num_threads())
        return whole(*args, **settings)

    monkeypatch.setattr(Iterations, "iterate", watched)
    before = torch.get_num_threads()
    try:
        for count in (2, 1, 3):
            torch.set_num_threads(count)
            seen.clear()
            alone(model, 0)
            assert seen == {count}
    finally:
        torch.set_num_threads(before)


SCRIPT = """
import sys, threading
import eecore
model = eecore.load(sys.argv[1], device="cpu", kv_cache_tokens=1024)
sampling = eecore.SamplingParams(max_tokens=400, ignore_eos=True)
streams = [eecore.stream(model, [[1, 2]], sampling=sampling) for _ in range(3)]
for stream in streams:
    next(stream)
{}
print("end")
"""


@pytest.mark.parametrize(
    "then",
    [
        "import asyncio; asyncio.run(anext(model.async_engine().stream([1], sampling=sampling)))",
        """
def serve():
    while True:
        try:
            eecore.generate(model, [[1]], max_tokens=50, ignore_eos=True)
        except BaseException:
            pass
for _ in range(2):
    threading.Thread(target=serve, daemon=True).start()
""",
    ],
)
def test_the_interpreter_ends_with_streams_open(
    agreeing_directory: os.PathLike[str], then: str
) -> None:
    command = [sys.executable, "-c", SCRIPT.format(then), str(agreeing_directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@cpu_only
def test_a_forked_child_has_an_engine_of_its_own(
    agreeing: eecore.Model, agreeing_directory: Any
) -> None:
    model = load(agreeing_directory, kv_cache_tokens=512)
    stream = eecore.stream(model, [PROMPTS[0]], sampling=LONG)
    next(stream)
    expected = alone(model, 1)
    shared = model.shared_engine()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(RuntimeError, match="expected the process that made it, "):
                list(stream)
            if model.shared_engine() is not shared and alone(model, 1) == expected:
                code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    stream.close()
    assert_idle(shared)
    assert agreeing.shared_engine() is not shared


def test_the_requests_of_a_call_arrive_together(model: eecore.Model) -> None:
    """Each step has all of them or none: a policy may look at the whole batch."""
    worker = Worker(model.engine())
    worker._threads[""] = threading.Thread()  # no other one is started
    client = Client(worker)
    requests = [worker.engine.prepare(prompt, sampling=SHORT) for prompt in PROMPTS]
    client.open(requests)
    assert worker.inbox.qsize() == 1
    assert [request.sequence for request in worker.inbox.get()] == requests
    worker._threads.clear()
