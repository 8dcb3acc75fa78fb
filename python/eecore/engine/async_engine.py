"""The engine for asyncio: each request is an async stream, all of them share the batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

from eecore.config import SamplingParams
from eecore.engine.engine import Engine
from eecore.errors import RequestError
from eecore.exits import Exit
from eecore.output import Output, StepOutput

__all__ = ["AsyncEngine"]


class AsyncEngine:
    """Runs an :class:`Engine` in a worker thread; use it from one event loop.

    A consumer that stops reading (its task is cancelled, it breaks out of the loop and closes the
    stream) cancels its request; the others go on.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = asyncio.Lock()  # held while the engine steps or changes
        self._stepping = threading.Lock()  # a step outlives its task when the loop shuts down
        self._queues: dict[str, asyncio.Queue[StepOutput | BaseException]] = {}
        self._stepper: asyncio.Task[None] | None = None

    async def stream(
        self,
        prompt: str | list[int],
        *,
        exit: Exit | None = None,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[StepOutput]:
        """What each step adds to the request; the last item carries the whole output."""
        async with self._lock:
            if request_id in self._queues:
                raise RequestError(f"request_id: {request_id!r} is in use")
            name = self.engine.add_request(
                prompt, exit=exit, sampling=sampling, request_id=request_id
            )
            queue = self._queues[name] = asyncio.Queue()
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.create_task(self._step_until_idle())
        try:
            while True:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.finished:
                    return
        finally:
            async with self._lock:
                self._cancel(name)  # nothing to do when it has finished
                del self._queues[name]

    async def generate(
        self,
        prompt: str | list[int],
        *,
        exit: Exit | None = None,
        sampling: SamplingParams | None = None,
    ) -> Output:
        """The whole output of one request."""
        async for step in self.stream(prompt, exit=exit, sampling=sampling):
            if step.output is not None:
                return step.output
        raise RuntimeError("the request ended without an output")

    def _step(self) -> list[StepOutput]:
        with self._stepping:
            return self.engine.step()

    def _cancel(self, name: str) -> None:
        with self._stepping:
            self.engine.cancel(name)

    async def _step_until_idle(self) -> None:
        while self.engine.has_unfinished:
            try:
                async with self._lock:
                    steps = await asyncio.to_thread(self._step)
            except Exception as error:
                for name, queue in self._queues.items():
                    self._cancel(name)
                    queue.put_nowait(error)
                return
            for step in steps:
                if step.request_id in self._queues:
                    self._queues[step.request_id].put_nowait(step)
            await asyncio.sleep(0)  # let consumers read, add and cancel
