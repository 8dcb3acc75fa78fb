"""One engine for all callers of a model: threads, open streams, those who leave in the middle."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

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
from eecore.engine import shared as module
from eecore.engine.client import READ_AHEAD, Client
from eecore.engine.engine import Engine
from eecore.engine.shared import SharedEngine
from eecore.models import KVCache
from tiny_models import random_prompts
from tripwire import Fault

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts(3, 12, 1, 7, 20, 5, seed=9)
POLICIES = [Full(), SelfSpeculative(2, 3), ConfidentExit(0.3), Full()]
SAMPLING = SamplingParams(max_tokens=14, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture
def model(agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[eecore.Model]:
    """Whatever happens with it, in the end nothing is left."""
    monkeypatch.setattr(module, "LOOK_S", 30.0)  # nobody has to be reminded
    yield agreeing
    assert_idle(agreeing.shared_engine())


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether something comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def assert_idle(shared: SharedEngine) -> None:
    """Nothing is left once the step that may be running is done."""
    until(lambda: not (shared.num_clients or shared._inbox or shared._turn))
    assert not shared.engine.requests
    assert not shared.engine.has_unfinished
    assert shared.engine.pages.num_free == shared.engine.pages.num_pages
    assert not shared._names
    assert not shared._readers
    assert shared.num_clients == shared.num_followers == 0
    assert not shared._turn
    assert not shared._inbox


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


def test_threads_share_the_batch(model: eecore.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []
    step = Engine.step

    def watched(engine: Engine) -> Any:
        batches.append(engine.num_running)
        return step(engine)

    monkeypatch.setattr(Engine, "step", watched)
    gate = threading.Barrier(4)

    def one(index: int) -> list[int]:
        gate.wait()
        return alone(model, index, LONG)

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(one, range(4)))
    assert max(batches) > 1
    assert together == [alone(model, i, LONG) for i in range(4)]


def test_who_is_alone_steps_in_his_own_thread(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    step = Engine.step

    def watched(engine: Engine) -> Any:
        threads.add(threading.get_ident())
        return step(engine)

    monkeypatch.setattr(Engine, "step", watched)
    alone(model, 0)
    for _ in eecore.stream(model, [PROMPTS[0]], sampling=SAMPLING):
        pass
    assert threads == {threading.get_ident()}


def test_a_call_inside_of_a_loop_over_a_stream(model: eecore.Model) -> None:
    expected = [alone(model, i) for i in range(4)]
    got: list[int] = []
    for number, step in enumerate(eecore.stream(model, [PROMPTS[0]], sampling=SAMPLING)):
        got += step.token_ids
        assert alone(model, number % 4) == expected[number % 4]
    assert got == expected[0]


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


def test_names_are_never_used_twice(model: eecore.Model) -> None:
    names: list[str] = []

    def one(_: int) -> None:
        order: list[str] = []
        for _step in eecore.stream(model, PROMPTS[:3], sampling=SAMPLING, order=order):
            pass
        names.extend(order)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(12)))
    assert len(names) == len(set(names)) == 36


# Who does not read


def test_a_stream_that_nobody_reads_is_put_on_hold(model: eecore.Model) -> None:
    expected = eecore.generate(model, PROMPTS[:2], sampling=LONG)
    unread = eecore.stream(model, PROMPTS[:2], sampling=LONG)
    first = next(unread)
    shared = model.shared_engine()
    for _ in range(12):
        alone(model, 3, LONG)
    engine = shared.engine
    assert until(lambda: engine.num_held == 2)
    (client,) = shared._busy
    assert client.mail.qsize() <= 2 * READ_AHEAD + 2
    got = {name: [] for name in client.names}  # type: ignore[var-annotated]
    got[first.request_id] += first.token_ids
    for step in unread:
        got[step.request_id] += step.token_ids
        assert client.mail.qsize() <= 2 * READ_AHEAD + 2
    assert list(got.values()) == [output.token_ids for output in expected]


def test_pages_of_unread_streams_are_there_for_others(agreeing: eecore.Model) -> None:
    """A cache for one of them; those who are read finish, and in the end so do the others."""
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


# Who leaves


def test_closing_dropping_and_collecting_a_stream_cancels_its_requests(
    model: eecore.Model,
) -> None:
    shared = model.shared_engine()
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
        assert until(lambda: shared.num_clients <= 1)
        tokens = [token for step in stays for token in step.token_ids]
        assert len(tokens) == (400 if leave == "unread" else 399)
        assert_idle(shared)


def test_a_thread_that_dies_takes_nobody_along(model: eecore.Model) -> None:
    """Each in turn had the engine step, or waited for those who did."""
    expected = [alone(model, i, LONG) for i in range(4)]

    def dies() -> None:
        for number, _ in enumerate(eecore.stream(model, PROMPTS, sampling=LONG)):
            if number == 10:
                raise ZeroDivisionError

    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            doomed = [pool.submit(dies) for _ in range(4)]
            assert list(pool.map(lambda i: alone(model, i, LONG), range(4))) == expected
            assert all(isinstance(f.exception(), ZeroDivisionError) for f in doomed)


@pytest.mark.parametrize("seconds", [0.0, 0.002, 0.01, 0.03])
def test_an_interrupt_cancels_the_callers_own_requests_alone(
    model: eecore.Model, seconds: float
) -> None:
    expected = alone(model, 1, LONG)
    for _ in range(4):
        got: list[list[int]] = []
        other = start(lambda: got.append(alone(model, 1, LONG)))  # noqa: B023
        timer = threading.Timer(seconds, _thread.interrupt_main)
        try:
            timer.start()
            while True:
                eecore.generate(model, PROMPTS, sampling=LONG)
        except KeyboardInterrupt:
            timer.join()
        other.join()
        assert got == [expected]
        assert_idle(model.shared_engine())


@pytest.mark.parametrize("nth", range(1, 200, 3))
def test_an_interrupt_at_any_line(model: eecore.Model, nth: int) -> None:
    """Between any two lines of the driver, in a thread that steps alone or follows others."""
    count = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            count += 1
            if count == nth:
                raise KeyboardInterrupt
        return trace

    open_stream = eecore.stream(model, [PROMPTS[0]], sampling=LONG) if nth % 2 else None
    if open_stream is not None:
        next(open_stream)
    stream = eecore.stream(model, PROMPTS[1:3], sampling=SAMPLING)
    sys.settrace(trace)
    try:
        for _ in stream:
            pass
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    stream.close()
    if open_stream is not None:
        assert len([token for step in open_stream for token in step.token_ids]) == 399
    assert len(alone(model, 3)) == 14
    assert_idle(model.shared_engine())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("company", [False, True])
def test_an_interrupt_at_every_line_of_a_short_stream(model: eecore.Model, company: bool) -> None:
    """Opened, read and closed; what it was about to do for others is done all the same."""
    files = {module.__file__, generation.__file__}
    is_hit, nth = True, 0
    while is_hit:
        is_hit, count, nth = False, 0, nth + 1

        def trace(frame: Any, event: str, _: object) -> Any:
            nonlocal count, is_hit
            if frame.f_code.co_filename not in files:
                return None
            count += event == "line"
            if count == nth and not is_hit:  # noqa: B023
                is_hit = True
                raise KeyboardInterrupt
            return trace

        others = [eecore.stream(model, [PROMPTS[1]], sampling=SHORT) for _ in range(2 * company)]
        for other in others:
            next(other)
        with suppress(KeyboardInterrupt):
            sys.settrace(trace)
            try:
                for _ in eecore.stream(model, [PROMPTS[0]], sampling=SHORT):
                    break
            finally:
                sys.settrace(None)
        assert [len(list(other)) for other in others] == [2] * len(others)
        assert_idle(model.shared_engine())
    assert nth > 50


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_in_a_finaliser(model: eecore.Model) -> None:
    """The first of the two times that it closes."""
    shared = model.shared_engine()
    close = shared.close
    hit = []

    def interrupted(client: Client) -> None:
        client.closed = True
        shared.__dict__.pop("close")
        hit.append(client)
        raise KeyboardInterrupt

    stream = eecore.stream(model, [PROMPTS[0]], sampling=LONG)
    next(stream)
    shared.close = interrupted  # type: ignore[method-assign]
    del stream
    assert hit
    assert shared.close == close
    assert_idle(shared)


def test_names_are_free_though_their_owner_was_interrupted(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And cannot close again, such as a finaliser."""
    shared = model.shared_engine()

    def interrupted(_: Client) -> None:
        raise KeyboardInterrupt

    client = Client([shared.engine.prepare(PROMPTS[0], sampling=SHORT)])
    shared.open(client, "mine")
    while shared.read(client) is not None:
        pass
    with monkeypatch.context() as patch:
        patch.setattr(shared, "_forget", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shared.close(client)
    assert len(alone(model, 1)) == 14
    assert_idle(shared)


def test_who_follows_too_late_is_not_followed(model: eecore.Model) -> None:
    """Others had its requests finished since it looked."""
    shared = model.shared_engine()
    client = Client([shared.engine.prepare(PROMPTS[0], sampling=SHORT)])
    shared.open(client)
    while client.unfinished:
        assert shared._in_turn(shared._step)
    shared._follow(client)
    assert shared.num_followers == 0
    steps = 0
    while shared.read(client) is not None:
        steps += 1
    assert steps == 3
    shared.close(client)


def test_who_is_closed_before_it_is_opened_leaves_nothing(model: eecore.Model) -> None:
    shared = model.shared_engine()
    client = Client([shared.engine.prepare(PROMPTS[0], sampling=SHORT)])
    shared.close(client)
    shared.open(client, "mine")
    assert_idle(shared)
    assert shared.read(client) is None


def test_a_name_goes_on_at_once(model: eecore.Model) -> None:
    """Though the request that had it leaves when the step that is running is done."""
    shared = model.shared_engine()
    first, second = (
        Client([shared.engine.prepare(PROMPTS[i], sampling=SAMPLING)]) for i in range(2)
    )
    shared.open(first, "mine")
    shared.read(first)

    def meanwhile() -> None:
        shared.close(first)
        shared.open(second, "mine")
        assert list(shared.engine.requests) == ["mine"]

    assert shared._in_turn(meanwhile)
    tokens = []
    while (step := shared.read(second)) is not None:
        tokens += step.token_ids
    shared.close(second)
    assert tokens == eecore.generate(model, [PROMPTS[1]], sampling=SAMPLING)[0].token_ids


def test_nobody_steps_alone_for_two(model: eecore.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who came at the same time as another; an interrupt would lose the other's steps."""
    shared = model.shared_engine()
    one, other = (Client([shared.engine.prepare(p, sampling=SHORT)]) for p in PROMPTS[:2])
    shared.open(one)
    with monkeypatch.context() as patch:
        patch.setattr(shared, "_follow", shared._ask)
        shared.open(other)
    assert not one.follows
    assert not other.follows
    assert shared.read(one) is not None
    assert one.follows
    assert shared.read(other) is not None
    for client in (one, other):
        shared.close(client)


def test_a_call_from_inside_of_a_step_is_refused(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one of a signal handler: it would wait for itself."""
    refusals: list[RuntimeError] = []

    def handler(*_: object) -> None:
        try:
            eecore.generate(model, [PROMPTS[0]], sampling=SAMPLING)
        except RuntimeError as error:
            refusals.append(error)

    step = Engine.step

    def interrupted(engine: Engine) -> Any:
        monkeypatch.setattr(Engine, "step", step)
        signal.raise_signal(signal.SIGUSR1)
        return step(engine)

    before = signal.signal(signal.SIGUSR1, handler)
    monkeypatch.setattr(Engine, "step", interrupted)
    try:
        assert len(alone(model, 1)) == 14
    finally:
        signal.signal(signal.SIGUSR1, before)
    (refusal,) = refusals
    assert "got one from inside of a step" in str(refusal)


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


def test_requests_that_the_engine_has_lost_are_waited_for_by_nobody(model: eecore.Model) -> None:
    streams = [eecore.stream(model, [PROMPTS[i]], sampling=LONG) for i in (0, 1)]
    for stream in streams:
        next(stream)
    shared = model.shared_engine()
    until(lambda: all(client.held for client in shared._busy))
    for name in list(shared.engine.requests):
        shared.engine.cancel(name)
    for stream in streams:
        with pytest.raises(RuntimeError, match="expected requests that can run, got none"):
            list(stream)


# The worker thread


def test_the_worker_ends_when_it_is_not_needed(
    agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    monkeypatch.setattr(module, "LINGER_S", 0.05)
    workers = set()
    step = Engine.step

    def watched(engine: Engine) -> Any:
        if threading.current_thread().name == "eecore":
            workers.add(threading.current_thread())
        return step(engine)

    monkeypatch.setattr(Engine, "step", watched)
    model = eecore.Model(agreeing.network, agreeing.tokenizer, agreeing.engine_config)
    stream = eecore.stream(model, [PROMPTS[0]], sampling=LONG)
    next(stream)
    for rounds in (1, 2):  # it comes back
        alone(model, 1)
        assert until(lambda: not any(worker.is_alive() for worker in workers))
        assert len(workers) == rounds
    monkeypatch.setattr(module, "LINGER_S", 1000.0)
    alone(model, 1)
    del model, stream
    gc.collect()  # nor does it keep an engine alive
    assert until(lambda: not any(worker.is_alive() for worker in workers))


def test_all_workers_end(model: eecore.Model) -> None:
    """Whoever takes the ring of the bell passes it on."""
    shared = model.shared_engine()
    workers = []
    for _ in range(3):
        shared._workers.clear()
        shared._ensure_worker()
        workers += shared._workers
    time.sleep(0.05)  # they wait
    shared._workers.update(dict.fromkeys(workers))
    shared.let_go()
    assert until(lambda: not any(worker.is_alive() for worker in workers))


def test_stopping_waits_for_nobody_who_comes_meanwhile(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = model.shared_engine()
    requests = [shared.engine.prepare(PROMPTS[0], sampling=LONG) for _ in range(2)]
    there, comes = (Client([request], rings=lambda: None) for request in requests)
    let_go = shared.let_go

    def meanwhile() -> None:
        shared.open(comes)
        let_go()

    shared.open(there)
    assert until(lambda: not there.mail.empty())
    with monkeypatch.context() as patch:
        patch.setattr(shared, "let_go", meanwhile)
        shared.stop()
    assert comes.unfinished
    assert not comes.held
    assert not there.unfinished
    while shared.read(comes) is not None:  # nor is it the end
        pass
    shared.close(comes)


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
        "pass",
        "import asyncio; asyncio.run(anext(model.async_engine().stream([1], sampling=sampling)))",
        "threading.Thread(target=eecore.generate, args=(model, [[1]]), kwargs={'max_tokens': 500, "
        "'ignore_eos': True}, daemon=True).start()",
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
    shared._turn[""] = module.Turn()  # as if another thread were stepping
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
    shared._turn.clear()
    stream.close()
    assert_idle(shared)
    assert agreeing.shared_engine() is not shared


def test_a_client_without_requests_has_nothing_to_read(model: eecore.Model) -> None:
    assert eecore.generate(model, []) == []
    shared = model.shared_engine()
    client = Client([])
    shared.open(client)
    assert shared.read(client) is None
    shared.close(client)
