"""The engine for asyncio: each request is an async stream, all of them share the batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from eecore.config import SamplingParams
from eecore.engine.callers import Caller, News
from eecore.engine.engine import Engine
from eecore.engine.worker import Worker
from eecore.errors import EngineClosedError
from eecore.exits import Exit
from eecore.guide import Guide
from eecore.output import Output, RequestFailedError, StepOutput
from eecore.scheduling.sequence import Sequence

Prepared = Sequence
"""A request that was checked and can be served, once."""


class AsyncEngine:
    """Streams of an engine for tasks of any event loop, in any thread; a worker thread steps.

    A stream cancels its request when it is closed, dropped or collected, when the task that waits
    for it is cancelled, and when its event loop is closed: none of that waits, and the pages are
    free when the step that is running is done. A stream that is read slowly delays only itself.

    Args:
        engine: the engine, or the worker that steps it.
    """

    def __init__(self, engine: Engine | Worker) -> None:
        self._worker = Worker(engine) if isinstance(engine, Engine) else engine
        self._closed = False

    @property
    def engine(self) -> Engine:
        """The engine itself, for approximate figures only: it must not be stepped."""
        return self._worker.engine

    @property
    def num_streams(self) -> int:
        """Streams that have begun and not ended."""
        return len(self._worker.group(self))

    def prepare(
        self,
        prompt: str | list[int],
        *,
        exit: Exit | str | None = None,
        sampling: SamplingParams | None = None,
    ) -> Prepared:
        """A request for one :meth:`stream`, checked and tokenized in the calling thread.

        Raises:
            RequestError: for a request that cannot be served.
        """
        return self.engine.prepare(prompt, exit=exit, sampling=sampling)

    def compile(self, guide: Guide) -> None:
        """Compile a guide in the calling thread, before a request that follows it.

        Raises:
            GuideError: it cannot be compiled within bounds, or nothing can follow it.
        """
        self.engine.compile(guide)

    def stream(
        self,
        prompt: str | list[int] | Prepared,
        *,
        exit: Exit | str | None = None,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncStream:
        """A stream of what each step adds to the request; the last item has the whole output.

        The request begins when the stream is first read. A request from :meth:`prepare` has its own
        policy and sampling.

        Raises:
            RequestError: when it is first read, for a request that cannot be served or an id that
                is in use.
            RequestFailedError: the request failed while it ran. Other requests go on.
            EngineClosedError: the engine was closed.
        """
        return AsyncStream(self, prompt, exit, sampling, request_id)

    async def generate(
        self,
        prompt: str | list[int] | Prepared,
        *,
        exit: Exit | str | None = None,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> Output:
        """The whole output of one request; it raises what :meth:`stream` raises."""
        stream = AsyncStream(self, prompt, exit, sampling, request_id, whole=True)
        try:
            async for step in stream:
                if step.output is not None:
                    return step.output
        finally:
            stream.close()
        raise RuntimeError("the request ended without an output")

    def reset_prefix_cache(self) -> None:
        """Forget the contents of pages that no unfinished request holds: now, or when the step that
        is running is done.
        """
        self._worker.reset_prefix_cache()

    def close(self) -> None:
        """Cancel all streams of this engine; it takes no more requests."""
        self._closed = True
        for caller in self._worker.group(self):
            stream = caller()
            if stream is not None:
                stream.close(EngineClosedError("engine: expected an open one, got a closing one"))
        self._worker.let_go()

    async def aclose(self) -> None:
        """The same as :meth:`close`."""
        self.close()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("engine: expected an open one, got one that was closed")


@dataclass(frozen=True)
class _ToLoop:
    """Takes the results of an event loop's streams; the loop is woken once for all of a step."""

    loop: asyncio.AbstractEventLoop

    def __call__(self, batch: list[News]) -> None:
        self.loop.call_soon_threadsafe(_hand_out, batch)


def _hand_out(batch: list[News]) -> None:
    for request, item in batch:
        stream: AsyncStream | None = request.caller()
        if stream is not None:
            stream._unread.append(item)
            stream._wake()


class AsyncStream(AsyncIterator[StepOutput]):
    """What the steps add to one request, for one reader at a time; see :class:`AsyncEngine`.

    A stream is read in one event loop, in which it begins.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prompt: str | list[int] | Prepared,
        exit: Exit | str | None,
        sampling: SamplingParams | None,
        request_id: str | None,
        *,
        whole: bool = False,
    ) -> None:
        self._engine, self._worker = engine, engine._worker
        self._request = (prompt, exit, sampling, request_id)
        self._whole = whole
        self._caller: Caller | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unread: deque[StepOutput | Exception] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._is_over = False
        self._is_closed = False
        self._why: Exception | None = None

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> StepOutput:
        if self._waiting is not None:
            raise RuntimeError("stream: expected one reader at a time, got two")
        try:
            if self._loop is None and not self._is_closed:
                self._begin()
            while not self._is_closed:
                if self._unread:
                    return self._given(self._unread.popleft())
                if self._is_over:
                    self.close()
                else:
                    await self._wait()
        except BaseException:
            self.close()
            raise
        raise self._why or StopAsyncIteration

    def take(self) -> StepOutput | None:
        """The next step if it has arrived; None: it has not, or there is none.

        Raises:
            RequestFailedError: the request failed while it ran.
        """
        if self._is_closed or self._waiting is not None or not self._unread:
            return None
        try:
            return self._given(self._unread.popleft())
        except BaseException:
            self.close()
            raise

    def close(self, why: Exception | None = None) -> None:
        """Cancel the request if it is unfinished, without waiting; any thread may call this.

        Args:
            why: the error that later reads raise; None: they end as at the end of a stream.
        """
        if not self._is_closed:
            self._why = why
            self._is_closed = True
        if self._caller is not None:
            self._worker.close(self._caller)
            self._caller = None  # no notice is needed when this is collected
        if self._waiting is not None and self._loop is not None:
            with suppress(RuntimeError):  # its event loop is closed
                self._loop.call_soon_threadsafe(self._wake)

    async def aclose(self) -> None:
        """The same as :meth:`close`."""
        self.close()

    def _begin(self) -> None:
        prompt, exit, sampling, request_id = self._request
        request = prompt
        if not isinstance(request, Sequence):
            request = self._worker.engine.prepare(request, exit=exit, sampling=sampling)
        loop = self._loop = asyncio.get_running_loop()
        caller = self._caller = Caller(
            self,
            self._worker.inbox,
            _ToLoop(loop),
            whole=self._whole,
            is_gone=loop.is_closed,
            group=self._engine,
        )
        self._engine._check_open()
        self._worker.open(caller, [request], request_id)
        self._engine._check_open()  # a close in the meantime may have missed the caller
        if self._is_closed:  # by another thread, in the meantime
            self._worker.close(caller)

    async def _wait(self) -> None:
        """Wait for the next item."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            raise RuntimeError(
                "stream: the event loop that read it was closed in the middle"
                if self._loop is not None and self._loop.is_closed()
                else "stream: expected to be read in the event loop in which it began"
            )
        future = self._waiting = loop.create_future()
        try:
            if not self._is_closed:  # looked at after the above: a later close wakes it
                await future
        finally:
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _given(self, item: StepOutput | Exception) -> StepOutput:
        if isinstance(item, Exception):
            raise item
        if item.output is not None:
            if item.output.finish_reason == "error":
                raise RequestFailedError(item.output)
            self._is_over = True
        elif self._caller is not None:
            self._worker.read(self._caller, item)
        return item
