"""Callers of one model, tasks and threads, that read, pause and stop in every way there is.

In between there are bad requests, steps that fail, event loops that are closed in the middle, and
interrupts at any line of the driver. Afterwards no request, page, queue or thread is left, and each
caller that stayed has the text that its request has alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import anyio
import torch

import eecore
from eecore import (
    AsyncEngine,
    ConfidentExit,
    DraftAndVerify,
    EecoreError,
    EngineConfig,
    FixedExit,
    Full,
    SamplingParams,
    SelfSpeculative,
    StepOutput,
    generation,
)
from eecore.engine import async_engine
from eecore.engine import callers as reach
from eecore.engine import worker as driver
from eecore.errors import EngineClosedError
from eecore.exits import Exit
from eecore.output import Output, RequestFailedError
from eecore.scheduling.scheduler import Scheduler, Work
from tiny_models import random_prompts, scale_layers, write_model
from tripwire import Fault, nothing_done_again
from workloads import until

SHARE = 60
LIMIT_S = 60.0

POLICIES: list[Exit] = [
    Full(),
    FixedExit(1),
    ConfidentExit(0.35, decay_tau=1.0),
    SelfSpeculative(2, 4),
    SelfSpeculative(1, 2, draft_threshold=0.2),
    DraftAndVerify({2}, {1, 2}),
]
CONFIGS = [
    EngineConfig(kv_cache_tokens=64, page_size=4, max_num_seqs=3, max_prefill_chunk=5),
    EngineConfig(kv_cache_tokens=64, page_size=1, max_batch_tokens=9),
    EngineConfig(kv_cache_tokens=1024),
]
NUM_REQUESTS = 40
INTERRUPTED = {module.__file__ for module in (reach, driver, async_engine, generation)}


class Request:
    """A request, and its output when it runs alone."""

    def __init__(self, model: eecore.Model, prompt: list[int], random: Random, seed: int) -> None:
        self.prompt = prompt
        self.exit = random.choice(POLICIES)
        self.sampling = SamplingParams(
            max_tokens=random.choice((1, 2, 5, 9, 20)),
            ignore_eos=True,
            temperature=random.choice((0.0, 0.8)),
            stop_token_ids=tuple(random.sample(range(320), 6)),
            seed=seed,
        )
        settings: dict[str, Any] = {"exit": self.exit, "sampling": self.sampling}
        (output,) = eecore.generate(model, [prompt], **settings)
        self.tokens, self.text = output.token_ids, output.text


REQUESTS: list[Request] = []
MODELS: list[eecore.Model] = []


def prepare() -> None:
    """A model with each of the configurations, and the requests."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(Path(folder), num_hidden_layers=3, seed=8)
        scale_layers(directory, {1: 0.3, 2: 0.3})
        model = eecore.load(directory, device="cpu", kv_cache_tokens=1024)
    random = Random(5)
    lengths = [random.choice((1, 2, 5, 9, 17)) for _ in range(NUM_REQUESTS)]
    for seed, prompt in enumerate(random_prompts(*lengths)):
        REQUESTS.append(Request(model, prompt, random, seed))
    MODELS.extend(eecore.Model(model.network, model.tokenizer, config) for config in CONFIGS)
    gc.collect()
    gc.freeze()  # permanent objects need not be traversed after every input


class Left(BaseException):
    """The exception by which a caller stops reading."""


class Caller:
    """One caller: its requests, how it reads, and how it stops."""

    def __init__(self, random: Random) -> None:
        self.requests = random.choices(REQUESTS, k=random.choice((1, 1, 1, 3)))
        self.leaves_after = random.choice((None, None, 0, 1, 3, 17))
        self.pause_s = random.choice((0.0, 0.0, 0.0, 0.0003, 0.002))
        self.delay_s = random.choice((0.0, 0.0, 0.0005, 0.003))
        self.is_bad = random.random() < 0.1
        self.how = random.choice(("close", "drop", "cycle", "raise"))
        self.whole = random.random() < 0.3
        self.is_async = random.random() < 0.5
        self.cancels = random.choice((0, 0, 1, 5))
        self.interrupted_at = random.choice((None, None, random.randrange(1, 120)))
        self.is_scoped = True
        self.error: BaseException | None = None
        self.refused = 0
        self.served = 0

    def __repr__(self) -> str:
        return f"Caller({ {k: v for k, v in vars(self).items() if k != 'requests'} })"

    @property
    def stays(self) -> bool:
        """Whether the caller reads to the end."""
        is_stopped = self.cancels if self.is_async else self.interrupted_at
        return not is_stopped and (self.whole or self.leaves_after is None)

    def check(self, request: Request, output: Output) -> None:
        if output.finish_reason == "error":  # of a step that failed for all requests
            assert output.token_ids == request.tokens[: len(output.token_ids)]
            return
        tokens, text = output.token_ids, output.text
        assert tokens == request.tokens, (self, tokens, request.tokens)
        assert text is None or text == request.text, (self, text, request.text)
        self.served += 1

    # On a thread

    def run(self, model: eecore.Model) -> None:
        """The whole life of a thread."""
        time.sleep(self.delay_s)
        try:
            with interrupted(None if self.is_async else self.interrupted_at):
                self._generate(model) if self.whole else self._stream(model)
        except Left:
            pass
        except EecoreError:
            self.refused += 1
            if not self.is_bad:
                raise
        except BaseException as error:
            self.error = error

    def _asked(self, model: eecore.Model) -> dict[str, Any]:
        prompts = [request.prompt for request in self.requests]
        if self.is_bad:
            prompts.append([999])
        return {
            "model": model,
            "prompts": prompts,
            "exit": [r.exit for r in self.requests] + [Full()] * self.is_bad,
            "sampling": [r.sampling for r in self.requests] + [SamplingParams()] * self.is_bad,
        }

    def _generate(self, model: eecore.Model) -> None:
        for request, output in zip(
            self.requests, eecore.generate(**self._asked(model)), strict=True
        ):
            self.check(request, output)

    def _stream(self, model: eecore.Model) -> None:
        order: list[str] = []
        stream = eecore.stream(order=order, **self._asked(model))
        if self.how == "cycle":
            cycle: list[Any] = [stream]
            cycle.append(cycle)
        got: dict[str, list[StepOutput]] = {}
        for count, step in enumerate(stream):
            got.setdefault(step.request_id, []).append(step)
            if count == self.leaves_after:
                if self.how == "close":
                    stream.close()  # type: ignore[attr-defined]
                if self.how == "raise":
                    raise Left
                return
            if count < 3:
                time.sleep(self.pause_s)
        for request, name in zip(self.requests, order, strict=True):
            self._check_steps(request, got[name])

    def _check_steps(self, request: Request, steps: list[StepOutput]) -> None:
        output = steps[-1].output
        assert output is not None
        if output.finish_reason != "error":
            assert output.token_ids == [token for step in steps for token in step.token_ids]
            assert output.text == "".join(step.text for step in steps)
        self.check(request, output)

    # As tasks

    async def run_async(self, engine: AsyncEngine) -> None:
        """The whole life of a task, which starts one for each of its requests."""
        await asyncio.sleep(self.delay_s)
        try:
            tasks = [asyncio.ensure_future(self._one(engine, r)) for r in self.requests]
            if self.is_bad:
                tasks.append(asyncio.ensure_future(engine.generate([999])))
            for _ in range(self.cancels):
                await asyncio.sleep(self.delay_s)
                for task in tasks:
                    task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, EngineClosedError):
                    continue
                if isinstance(result, EecoreError):
                    self.refused += 1
                elif isinstance(result, BaseException) and not isinstance(
                    result, (Left, RequestFailedError, asyncio.CancelledError)
                ):
                    raise result
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            self.error = error

    async def _one(self, engine: AsyncEngine, request: Request) -> None:
        settings: dict[str, Any] = {"exit": request.exit, "sampling": request.sampling}
        if self.whole:
            output = await engine.generate(request.prompt, **settings)
            self.check(request, output)
            return
        stream = engine.stream(request.prompt, **settings)
        if self.how == "cycle":
            cycle: list[Any] = [stream]
            cycle.append(cycle)
        steps: list[StepOutput] = []
        # anyio keeps a scope of a loop that was closed, and what it was about, for good.
        scope: Any = anyio.CancelScope() if self.is_scoped else contextlib.nullcontext()
        with scope:
            async for step in stream:
                steps.append(step)
                if len(steps) - 1 == self.leaves_after:
                    if self.how == "close":
                        await stream.aclose()
                    if self.how == "raise" and self.is_scoped:
                        scope.cancel()
                        await anyio.sleep(1.0)
                    return
                await asyncio.sleep(self.pause_s if len(steps) < 3 else 0.0)
        if not (self.is_scoped and scope.cancelled_caught):
            self._check_steps(request, steps)


@contextlib.contextmanager
def interrupted(nth: int | None, error: type[BaseException] = Left) -> Iterator[None]:
    """Raise at the n-th line of the driver that this thread reaches, once."""
    if nth is None:
        yield
        return
    count = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in INTERRUPTED:
            return None
        if frame.f_code.co_name == "__del__":  # Python itself would drop the error
            return None
        if event == "line":
            count += 1
            if count == nth:
                raise error
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


@contextlib.contextmanager
def broken(engine: eecore.Engine, nth: int | None) -> Iterator[None]:
    """Fail the n-th step, for all requests."""
    whole, count = Scheduler.schedule, 0

    def counted(scheduler: Scheduler) -> list[Work]:
        nonlocal count
        count += scheduler is engine.scheduler
        if count == nth:
            count += 1
            raise Fault
        return whole(scheduler)

    Scheduler.schedule = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Scheduler.schedule = whole  # type: ignore[method-assign]


def run_loop(
    engine: AsyncEngine, callers: list[Caller], stop_s: float | None, nth: int | None
) -> None:
    """Serve tasks in an event loop of this thread. It is closed as it is after ``stop_s``, or at
    the ``nth`` line of the driver, by an interrupt.
    """

    async def main() -> None:
        tasks = [asyncio.ensure_future(caller.run_async(engine)) for caller in callers]
        everybody = asyncio.gather(*tasks)
        if stop_s is None:
            await everybody
        else:
            await asyncio.sleep(stop_s)

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # of tasks that are destroyed while they wait
    try:
        with interrupted(nth, KeyboardInterrupt), contextlib.suppress(KeyboardInterrupt):
            loop.run_until_complete(main())
    finally:
        loop.close()


def check_idle(model: eecore.Model, engines: list[AsyncEngine]) -> None:
    """No request, page, queue or thread is left."""
    worker = model.shared_engine()
    engine = worker.engine
    for _ in range(2):  # streams in cycles, then tasks of closed loops
        gc.collect()
        eecore.generate(model, [[1]], max_tokens=1)  # then all that was said has been heard
        until(lambda: not (engine.has_unfinished or worker._names or worker.num_unfinished))
    worker.let_go()
    assert until(lambda: not worker._threads)
    assert not engine.requests, list(engine.requests)
    assert not engine.has_unfinished
    assert engine.pages.num_free == engine.pages.num_pages
    assert not worker._names, worker._names
    assert not worker._requests, worker._requests
    assert not any(engine.num_streams for engine in engines)


@nothing_done_again()
def one(random: Random) -> bool:
    """Try one crowd of callers."""
    try:
        return _one(random)
    except BaseException:
        for model in MODELS:  # what is left is no finding of the next input
            model._shared.clear()
        raise


def _one(random: Random) -> bool:
    model = random.choice(MODELS)
    shared = model.shared_engine()
    reach.READ_AHEAD = driver.READ_AHEAD = random.choice((2, 4, 16))
    driver.LINGER_S = random.choice((0.0, 5.0))
    driver.LOOK_S = random.choice((0.005, 1.0))
    callers = [Caller(random) for _ in range(random.choice((1, 2, 3, 4)))]
    own_loops = random.random() < 0.3  # else all tasks are in one
    stop_s = random.choice((None, None, None, 0.0, 0.002))
    stops_at = random.choice((None, None, None, random.randrange(1, 400)))
    is_cut = stop_s is not None or stops_at is not None
    fails_at = random.choice((None, None, None, random.randrange(1, 40)))
    is_closed = random.random() < 0.1
    if is_cut:
        driver.LOOK_S = 0.005  # only this look finds streams on hold in a closed loop
    engines = [model.async_engine(), model.async_engine()]
    for caller in callers:
        caller.is_scoped = not is_cut
    groups: list[list[Caller]] = [[c] for c in callers if c.is_async]
    if groups and not own_loops:
        groups = [[caller for group in groups for caller in group]]
    jobs: list[tuple[Any, ...]] = [(c.run, model) for c in callers if not c.is_async]
    jobs += [(run_loop, engines[i % 2], group, stop_s, stops_at) for i, group in enumerate(groups)]
    threads = [threading.Thread(target=job[0], args=job[1:]) for job in jobs]
    with broken(shared.engine, fails_at):
        for thread in threads:
            thread.start()
        if is_closed:
            engines[0].close()
        for thread in threads:
            thread.join()
        check_idle(model, engines)
    for caller in callers:
        if caller.error is not None:
            raise caller.error
        if caller.stays and fails_at is None and not (caller.is_async and is_cut):
            wanted = 0 if caller.is_bad and not caller.is_async else len(caller.requests)
            if not (is_closed and caller.is_async):
                assert caller.served == wanted, (caller, wanted)
            assert caller.refused == caller.is_bad or (is_closed and caller.is_async), caller
    return not all(caller.is_bad for caller in callers)
