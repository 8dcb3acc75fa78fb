"""Async streams share a batch; one that is closed or fails takes nobody else along."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

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
from tiny_models import random_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts(3, 12, 1, 7, seed=9)
POLICIES = [Full(), SelfSpeculative(2, 3), ConfidentExit(0.3), Full()]
SAMPLING = SamplingParams(max_tokens=14, ignore_eos=True)
LONG = SamplingParams(max_tokens=480, ignore_eos=True)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, timeout=60))


def assert_idle(engine: AsyncEngine) -> None:
    """Nothing is left once the step that may be running is done."""
    until = time.monotonic() + 10
    while engine._shared.num_clients and time.monotonic() < until:
        time.sleep(0.001)
    inner = engine.engine
    assert not inner.has_unfinished
    assert engine.num_streams == engine._shared.num_clients == 0
    assert not engine._shared._clients
    assert inner.pages.num_free == inner.pages.num_pages


@pytest.fixture(scope="module")
def expected(agreeing: eecore.Model) -> list[eecore.Output]:
    return eecore.generate(agreeing, PROMPTS, exit=POLICIES, sampling=SAMPLING)


def test_concurrent_streams(agreeing: eecore.Model, expected: list[eecore.Output]) -> None:
    engine = agreeing.async_engine(EngineConfig(kv_cache_tokens=64, page_size=4))
    largest_batch = 0

    async def consume(index: int) -> tuple[list[int], str, eecore.Output | None]:
        nonlocal largest_batch
        tokens, text, output = [], "", None
        async for step in engine.stream(PROMPTS[index], exit=POLICIES[index], sampling=SAMPLING):
            tokens += step.token_ids
            text += step.text
            output = step.output
            largest_batch = max(largest_batch, engine.engine.num_running)
        return tokens, text, output

    async def main() -> list[Any]:
        return await asyncio.gather(*(consume(i) for i in range(4)))

    for (tokens, text, output), wanted in zip(run(main()), expected, strict=True):
        assert tokens == output.token_ids == wanted.token_ids
        assert text == output.text == wanted.text
    assert largest_batch > 1
    assert_idle(engine)


def test_generate_and_a_second_event_loop(
    agreeing: eecore.Model, expected: list[eecore.Output]
) -> None:
    engine = agreeing.async_engine()
    for _ in range(2):
        output = run(engine.generate(PROMPTS[1], exit=POLICIES[1], sampling=SAMPLING))
        assert output.token_ids == expected[1].token_ids
    assert_idle(engine)


def test_closing_a_stream_cancels_its_request_only(
    agreeing: eecore.Model, expected: list[eecore.Output]
) -> None:
    engine = agreeing.async_engine()

    async def leave() -> None:
        stream = engine.stream(PROMPTS[0], sampling=SAMPLING, request_id="leaves")
        async for _ in stream:
            break
        await stream.aclose()
        while "leaves" in engine.engine.requests:  # for the step that is running, at most
            await asyncio.sleep(0)

    async def main() -> eecore.Output:
        stays, _ = await asyncio.gather(
            engine.generate(PROMPTS[1], exit=POLICIES[1], sampling=SAMPLING), leave()
        )
        return stays

    assert run(main()).token_ids == expected[1].token_ids
    assert_idle(engine)


def test_a_cancelled_task_cancels_its_request(
    agreeing: eecore.Model, expected: list[eecore.Output]
) -> None:
    engine = agreeing.async_engine()

    async def main() -> eecore.Output:
        doomed = asyncio.create_task(engine.generate(PROMPTS[0], sampling=LONG))
        stays = asyncio.create_task(
            engine.generate(PROMPTS[2], exit=POLICIES[2], sampling=SAMPLING)
        )
        while not engine.engine.num_running:
            await asyncio.sleep(0.001)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        return await stays

    assert run(main()).token_ids == expected[2].token_ids
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
        raise RuntimeError("broken")

    async def main() -> list[Any]:
        monkeypatch.setattr(Iterations, "iterate", broken)
        failed = await asyncio.gather(
            *(engine.generate(prompt, sampling=SAMPLING) for prompt in PROMPTS[:2]),
            return_exceptions=True,
        )
        monkeypatch.setattr(Iterations, "iterate", iterate)
        return [*failed, await engine.generate(PROMPTS[0], sampling=SAMPLING)]

    first, second, good = run(main())
    assert [str(first), str(second)] == ["broken"] * 2
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


def test_a_loop_that_shuts_down_in_the_middle_leaves_nothing(agreeing: eecore.Model) -> None:
    engine = agreeing.async_engine()

    async def main() -> None:
        engine.stream(PROMPTS[1], sampling=SAMPLING)  # never started: no request
        task = asyncio.create_task(engine.generate(PROMPTS[0], sampling=LONG))
        while not engine.engine.num_running:
            await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(main())
    assert_idle(engine)
    assert run(engine.generate(PROMPTS[0], sampling=SAMPLING)).finish_reason == "length"
