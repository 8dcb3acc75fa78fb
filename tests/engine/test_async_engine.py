"""Async streams share a batch; a stream that is closed or fails ends no other."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import anyio
import pytest

import eecore
from eecore import (
    AsyncEngine,
    ConfidentExit,
    EngineConfig,
    Full,
    RequestError,
    SamplingParams,
    SelfSpeculative,
)
from eecore.decoding.iterate import Iterations
from eecore.engine import worker
from eecore.engine.callers import READ_AHEAD
from eecore.errors import EngineClosedError
from tiny_models import random_prompts
from tripwire import Fault
from workloads import until

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts(3, 12, 1, 7, seed=9)
POLICIES = [Full(), SelfSpeculative(2, 3), ConfidentExit(0.3), Full()]
SAMPLING = SamplingParams(max_tokens=14, ignore_eos=True)
LONG = SamplingParams(max_tokens=480, ignore_eos=True)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, timeout=120))


def assert_idle(engine: AsyncEngine) -> None:
    """No request or page is left once the running step is done."""
    inner = engine.engine
    assert isinstance(inner, eecore.Engine)
    until(lambda: not (inner.has_unfinished or engine.num_streams))
    assert not inner.has_unfinished
    assert engine.num_streams == 0
    assert engine._worker.num_unfinished == 0
    assert not engine._worker._names
    assert inner.pages.num_free == inner.pages.num_pages


@pytest.fixture(scope="module")
def expected(agreeing: eecore.Model) -> list[eecore.Output]:
    return eecore.generate(agreeing, PROMPTS, exit=POLICIES, sampling=SAMPLING)


def test_concurrent_streams(
    agreeing: eecore.Model, expected: list[eecore.Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = agreeing.async_engine(EngineConfig(kv_cache_tokens=64, page_size=4))
    batches: list[int] = []
    step = eecore.Engine.step

    def watched(inner: eecore.Engine) -> Any:
        if not batches:
            until(lambda: engine.num_streams == 4)
        batches.append(inner.num_running)
        return step(inner)

    monkeypatch.setattr(eecore.Engine, "step", watched)

    async def consume(index: int) -> tuple[list[int], str, eecore.Output | None]:
        tokens, text, output = [], "", None
        async for step in engine.stream(PROMPTS[index], exit=POLICIES[index], sampling=SAMPLING):
            tokens += step.token_ids
            text += step.text
            output = step.output
        return tokens, text, output

    async def main() -> list[Any]:
        return await asyncio.gather(*(consume(i) for i in range(4)))

    for (tokens, text, output), wanted in zip(run(main()), expected, strict=True):
        assert tokens == output.token_ids == wanted.token_ids
        assert text == output.text == wanted.text
    assert max(batches) > 1
    assert_idle(engine)


def test_a_request_that_was_prepared_in_another_thread(
    agreeing: eecore.Model, expected: list[eecore.Output]
) -> None:
    engine = agreeing.async_engine()
    sampling = SamplingParams(max_tokens=14, ignore_eos=True, logprobs=2)

    async def main() -> tuple[list[eecore.StepOutput], eecore.Output]:
        prepared = [
            await asyncio.to_thread(engine.prepare, PROMPTS[1], exit=POLICIES[1], sampling=sampling)
            for _ in range(2)
        ]
        steps = [step async for step in engine.stream(prepared[0])]
        return steps, await engine.generate(prepared[1])

    steps, output = run(main())
    assert output.token_ids == expected[1].token_ids
    assert [token for step in steps for token in step.token_ids] == output.token_ids
    # The steps add up to the output.
    assert [value for step in steps for value in step.logprobs] == output.logprobs
    assert [tops for step in steps for tops in step.top_logprobs] == output.top_logprobs
    with pytest.raises(RequestError, match="expected at least one token"):
        engine.prepare([])
    assert_idle(engine)


def test_a_refused_request_leaves_the_others_alone(
    agreeing: eecore.Model, expected: list[eecore.Output]
) -> None:
    engine = agreeing.async_engine()

    async def main() -> list[Any]:
        return await asyncio.gather(
            engine.generate(PROMPTS[0], sampling=SAMPLING),
            engine.generate([]),
            engine.generate("x" * 600),
            return_exceptions=True,
        )

    good, empty, too_long = run(main())
    assert good.token_ids == expected[0].token_ids
    assert isinstance(empty, RequestError)
    assert isinstance(too_long, RequestError)
    assert_idle(engine)


def test_a_failing_step_reaches_every_consumer_and_the_engine_lives_on(
    agreeing: eecore.Model, expected: list[eecore.Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = agreeing.async_engine()
    iterate = Iterations.iterate

    def broken(*_: Any, **__: Any) -> Any:
        raise Fault("broken")

    async def main() -> list[Any]:
        monkeypatch.setattr(Iterations, "iterate", broken)
        failed = await asyncio.gather(
            *(engine.generate(prompt, sampling=SAMPLING) for prompt in PROMPTS[:2]),
            return_exceptions=True,
        )
        monkeypatch.setattr(Iterations, "iterate", iterate)
        return [*failed, await engine.generate(PROMPTS[0], sampling=SAMPLING)]

    first, second, good = run(main())
    assert [str(first), str(second)] == ["Fault: broken"] * 2
    assert good.token_ids == expected[0].token_ids
    assert_idle(engine)


def test_a_request_id_is_in_use_until_its_stream_has_ended(
    agreeing: eecore.Model, expected: list[eecore.Output]
) -> None:
    engine = agreeing.async_engine()

    async def consume(name: str) -> list[int]:
        tokens = []
        async for step in engine.stream(PROMPTS[0], sampling=SAMPLING, request_id=name):
            tokens += step.token_ids
        return tokens

    async def main() -> None:
        first = engine.stream(PROMPTS[0], sampling=SAMPLING, request_id="a")
        async for step in first:
            if step.finished:
                break  # the engine is done with it, its consumer is not
        with pytest.raises(RequestError, match="request_id: 'a' is in use"):
            await consume("a")
        await first.aclose()
        assert await consume("a") == expected[0].token_ids

    run(main())
    assert_idle(engine)


# Callers that stop, and how


@pytest.fixture
def engine(agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncEngine]:
    """An engine that has to be idle at the end of the test."""
    monkeypatch.setattr(worker, "LOOK_S", 30.0)  # no caller has to be looked for
    engine = agreeing.async_engine()
    yield engine
    assert_idle(engine)


async def collect(stream: AsyncIterator[eecore.StepOutput]) -> list[int]:
    return [token async for step in stream for token in step.token_ids]


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.005])
def test_scopes_that_cancel_again_and_again(engine: AsyncEngine, seconds: float) -> None:
    """Scopes of anyio also cancel what a task awaits in its clean-up."""

    async def main() -> None:
        for _ in range(30):
            with anyio.move_on_after(seconds):
                await collect(engine.stream(PROMPTS[0], sampling=LONG))
            with anyio.move_on_after(seconds):
                await engine.generate(PROMPTS[1], sampling=LONG)
        async with anyio.create_task_group() as group:
            for prompt in PROMPTS * 4:
                group.start_soon(collect, engine.stream(prompt, sampling=LONG))
            await anyio.sleep(seconds)
            group.cancel_scope.cancel()

    run(main())


@pytest.mark.parametrize("leave", ["break", "drop", "collect", "fail", "timeout"])
def test_a_caller_that_stops_reading_cancels(
    engine: AsyncEngine, expected: list[eecore.Output], leave: str
) -> None:
    async def leaves() -> None:
        stream = engine.stream(PROMPTS[0], sampling=LONG)
        if leave == "break":
            async for _ in stream:
                break
            return
        if leave == "timeout":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(collect(stream), 0.01)
            return
        await anext(stream)
        if leave == "fail":
            with suppress(ZeroDivisionError):
                async for _ in stream:
                    1 / 0  # noqa: B018
            return
        if leave == "collect":
            cycle: list[Any] = [stream]
            cycle.append(cycle)
            del cycle
        del stream
        gc.collect()

    async def main() -> list[int]:
        stays, *_ = await asyncio.gather(
            collect(engine.stream(PROMPTS[1], exit=POLICIES[1], sampling=SAMPLING)),
            *(leaves() for _ in range(3)),
        )
        # The loop goes on, and holds nothing.
        while engine._worker.num_unfinished:
            await asyncio.sleep(0.001)
        return stays

    assert run(main()) == expected[1].token_ids


def test_a_closed_loop_with_its_task_and_stream_still_there(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LOOK_S", 0.05)  # a stream on hold is looked at now and then
    for whole in (False, True):
        loop = asyncio.new_event_loop()
        stream = engine.stream(PROMPTS[0], sampling=LONG)
        slow = engine.stream(PROMPTS[1], sampling=LONG)

        async def main() -> asyncio.Task[Any]:
            what = engine.generate(PROMPTS[2], sampling=LONG) if whole else collect(stream)  # noqa: B023
            task = asyncio.create_task(what)
            await anext(slow)  # noqa: B023
            return task

        task = loop.run_until_complete(main())
        loop.close()
        assert_idle(engine)
        with pytest.raises(RuntimeError, match="event loop that read it was closed in the middle"):
            run(collect(slow))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        stream.close()
        del task
        gc.collect()  # a task and the future that it waits for hold each other


@pytest.mark.parametrize("when", ["prepare", "open"])
def test_the_engine_closed_where_a_stream_begins(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    owner = engine.engine if when == "prepare" else engine._worker
    begin = getattr(owner, when)

    def closing(*args: Any, **settings: Any) -> Any:
        engine.close()
        return begin(*args, **settings)

    monkeypatch.setattr(owner, when, closing)
    with pytest.raises(EngineClosedError):
        run(collect(engine.stream(PROMPTS[0], sampling=LONG)))
    assert_idle(engine)


def test_tasks_and_threads_share_one_engine(
    agreeing: eecore.Model, engine: AsyncEngine, expected: list[eecore.Output]
) -> None:
    def one(index: int) -> list[int]:
        if index % 2:
            return asyncio.run(
                collect(engine.stream(PROMPTS[index], exit=POLICIES[index], sampling=SAMPLING))
            )
        outputs = eecore.generate(
            agreeing, [PROMPTS[index]], exit=POLICIES[index], sampling=SAMPLING
        )
        return outputs[0].token_ids

    assert engine.engine is agreeing.shared_engine().engine
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(one, range(4))) == [output.token_ids for output in expected]


# Slow callers


def test_a_slow_reader_holds_up_itself_alone(engine: AsyncEngine) -> None:
    async def main() -> tuple[list[int], list[int]]:
        slow = engine.stream(PROMPTS[0], sampling=LONG)
        got = (await anext(slow)).token_ids
        others = [await collect(engine.stream(PROMPTS[1], sampling=LONG)) for _ in range(2)]
        assert engine.engine.num_held == 1
        async for step in slow:
            got += step.token_ids
            assert len(slow._unread) <= READ_AHEAD
        assert others[0] == others[1]
        return got, others[0]

    slow, fast = run(main())
    outputs = eecore.generate(agreeing_of(engine), PROMPTS[:2], sampling=LONG)
    assert [slow, fast] == [output.token_ids for output in outputs]


def agreeing_of(engine: AsyncEngine) -> eecore.Model:
    """A model that generates with the same engine."""
    inner = engine.engine
    model = eecore.Model(inner.network, inner.tokenizer, inner.config)
    model._shared[os.getpid()] = engine._worker
    return model


def test_steps_that_are_there_can_be_taken_without_waiting(
    agreeing: eecore.Model, expected: list[eecore.Output]
) -> None:
    async def main(engine: AsyncEngine) -> tuple[list[int], int]:
        stream = engine.stream(PROMPTS[0], exit=POLICIES[0], sampling=SAMPLING)
        assert stream.take() is None  # it has not begun
        tokens, taken = [], 0
        async for step in stream:
            tokens += step.token_ids
            while not stream._unread and engine.engine.has_unfinished:
                await asyncio.sleep(0)
            while (more := stream.take()) is not None:
                tokens += more.token_ids
                taken += 1
        assert stream.take() is None
        closed = engine.stream(PROMPTS[0], sampling=LONG)
        await anext(closed)
        closed.close()
        assert closed.take() is None
        return tokens, taken

    engine = agreeing.async_engine(EngineConfig(kv_cache_tokens=512, page_size=4))
    tokens, taken = run(main(engine))
    assert tokens == expected[0].token_ids
    assert taken > 0
    assert_idle(engine)


def test_one_reader_at_a_time(engine: AsyncEngine) -> None:
    async def main() -> None:
        stream = engine.stream(PROMPTS[0], sampling=LONG)
        count, first = 0, None
        while first is None or first.done():  # until its token is not there yet
            count, first = count + 1, asyncio.create_task(anext(stream))  # type: ignore[arg-type]
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="expected one reader at a time, got two"):
            await anext(stream)
        await first
        assert len(await collect(stream)) == 480 - count

    run(main())


# Closing


def test_closing_the_engine_ends_its_streams_and_no_others(
    agreeing: eecore.Model, expected: list[eecore.Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LOOK_S", 0.02)
    stays = agreeing.async_engine()

    async def main() -> list[int]:
        other = stays.stream(PROMPTS[1], exit=POLICIES[1], sampling=SAMPLING)
        got = (await anext(other)).token_ids
        async with agreeing.async_engine() as engine:
            waits = asyncio.create_task(collect(engine.stream(PROMPTS[0], sampling=LONG)))
            unread = engine.stream(PROMPTS[0], sampling=LONG)
            await anext(unread)
        for ended in (waits, anext(unread), engine.generate(PROMPTS[0])):
            with pytest.raises(EngineClosedError, match="expected an open one"):
                await ended
        engine.close()
        assert engine.num_streams == 0
        return got + await collect(other)

    assert run(main()) == expected[1].token_ids
    stays.close()
    assert_idle(stays)


def test_a_closed_engine_of_its_own_has_no_thread(agreeing: eecore.Model) -> None:
    before = set(threading.enumerate())

    def workers() -> int:
        new = set(threading.enumerate()) - before  # others may linger, and end meanwhile
        return sum(thread.name == "eecore" for thread in new)

    async def main() -> None:
        async with agreeing.async_engine(EngineConfig(kv_cache_tokens=64)) as engine:
            await engine.generate(PROMPTS[0], sampling=SAMPLING)
            assert workers() == 1

    run(main())
    until = time.monotonic() + 60
    while workers() and time.monotonic() < until:
        time.sleep(0.001)
    assert workers() == 0
