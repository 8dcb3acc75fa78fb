"""The engine for asyncio: each request is an async stream, all of them share the batch."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from types import TracebackType
from weakref import ReferenceType, WeakValueDictionary, ref

from eecore.config import SamplingParams
from eecore.engine.client import Client
from eecore.engine.engine import Engine
from eecore.engine.shared import SharedEngine
from eecore.engine.sharing import EngineView, Sharing
from eecore.errors import EngineClosedError
from eecore.exits import Exit
from eecore.guide import Guide
from eecore.output import Output, RequestFailedError, StepOutput
from eecore.scheduling.sequence import Sequence

__all__ = ["AsyncEngine", "AsyncStream", "Prepared"]

Prepared = Sequence
"""A request that was checked and can be served, once."""


class AsyncEngine:
    """Streams of an engine for tasks of any event loop, in any thread; a worker thread steps.

    A stream cancels its request when it is closed, dropped or collected, when the task that waits
    for it is cancelled, and when its event loop is closed: none of that waits for anything, and the
    pages are back when the step that is running is done. A stream that is read slowly holds up
    itself alone.

    Args:
        engine: the engine, or what shares it among callers.
    """

    def __init__(self, engine: Engine | Sharing) -> None:
        self._shared: Sharing = SharedEngine(engine) if isinstance(engine, Engine) else engine
        self._bells: WeakValueDictionary[int, _Bells] = WeakValueDictionary()  # by event loop
        self._streams: dict[int, ReferenceType[AsyncStream]] = {}
        self._numbers = itertools.count()
        self._closed = False

    @property
    def engine(self) -> EngineView:
        """The engine itself. It may be looked at between steps, and must not be stepped."""
        return self._shared.engine

    @property
    def is_up(self) -> bool:
        """Whether requests are taken just now: not while an engine in another process starts."""
        return self._shared.is_up

    @property
    def num_restarts(self) -> int:
        """How often the engine had to be started again."""
        return self._shared.num_restarts

    @property
    def failure(self) -> Exception | None:
        """Why requests will never be taken again, if that is so."""
        return self._shared.failure

    @property
    def num_streams(self) -> int:
        """Those that have begun and not ended."""
        return len(self._streams)

    def prepare(
        self,
        prompt: str | list[int],
        *,
        exit: Exit | str | None = None,
        sampling: SamplingParams | None = None,
    ) -> Prepared:
        """A request for :meth:`stream`, once: checked and tokenized in the thread that calls.

        Raises:
            RequestError: for a request that cannot be served.
        """
        return self.engine.prepare(prompt, exit=exit, sampling=sampling)

    def compile(self, guide: Guide) -> None:
        """Compile a guide in the thread that calls, before a request that follows it.

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
        """What each step adds to the request; the last item carries the whole output.

        The request begins when the stream is first read. One from :meth:`prepare` has its own
        policy and sampling.

        Raises:
            RequestError: when it is first read, for a request that cannot be served or an id that
                is in use.
            RequestFailedError: the request failed on the way. The others go on.
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
        """Forget what pages hold that no unfinished request has: now, or when the step that is
        running is done.
        """
        self._shared.reset_prefix_cache()

    def close(self) -> None:
        """Cancel all streams of this engine; it takes no more requests."""
        self._closed = True
        for reference in list(self._streams.values()):
            stream = reference()
            if stream is not None:
                stream.close(EngineClosedError("engine: expected an open one, got one that closed"))
        self._shared.let_go()

    async def aclose(self) -> None:
        """As :meth:`close`."""
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

    def _begin(self, stream: AsyncStream, client: Client, request_id: str | None) -> None:
        streams, number = self._streams, stream._number
        streams[number] = ref(stream, lambda _: streams.pop(number, None))
        if self._closed:  # behind the above: one that is closed now closes the stream
            raise EngineClosedError("engine: expected an open one, got one that was closed")
        self._shared.open(client, request_id)

    def _end(self, number: int, client: Client) -> None:
        self._streams.pop(number, None)
        self._shared.close(client)

    def _bells_of(self, loop: asyncio.AbstractEventLoop) -> _Bells:
        return self._bells.get(id(loop)) or self._bells.setdefault(id(loop), _Bells(loop))


class AsyncStream(AsyncIterator[StepOutput]):
    """What the steps add to one request, for one reader at a time; see :class:`AsyncEngine`."""

    # One whose making was interrupted is closed, too.
    _client: Client | None = None
    _is_closed = False

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
        self._engine = engine
        self._request = (prompt, exit, sampling, request_id)
        self._whole = whole
        self._number = next(engine._numbers)
        self._doorbell = _Doorbell(ref(self))
        self._is_finished = False
        self._why: Exception | None = None

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> StepOutput:
        if self._doorbell.is_waited_for:
            raise RuntimeError("stream: expected one reader at a time, got two")
        try:
            if self._client is None and not self._is_closed:
                self._begin()
            client = self._client
            while client is not None and not self._is_closed:
                is_over = not client.unfinished
                step = self._engine._shared.take(client)
                if step is not None:
                    return self._given(step)
                if is_over:
                    break
                bells = self._engine._bells_of(asyncio.get_running_loop())
                await self._doorbell.wait(bells, client)
        except BaseException:
            self.close()
            raise
        return self._last()

    def take(self) -> StepOutput | None:
        """The next step if it is there already; None: not yet, or there is none.

        Raises:
            RequestFailedError: the request failed on the way.
        """
        client = self._client
        if client is None or self._is_closed or self._doorbell.is_waited_for:
            return None
        try:
            step = self._engine._shared.take(client)
            return None if step is None else self._given(step)
        except BaseException:
            self.close()
            raise

    def close(self, why: Exception | None = None) -> None:
        """Cancel the request if it is unfinished; waits for nothing, from any thread.

        Args:
            why: what whoever goes on reading gets.
        """
        if not self._is_closed:
            self._why = why
            self._is_closed = True
        if self._client is not None:
            self._engine._end(self._number, self._client)
            with suppress(RuntimeError):  # its event loop is closed
                self._doorbell.ring()

    async def aclose(self) -> None:
        """As :meth:`close`."""
        self.close()

    def __del__(self) -> None:
        try:
            self.close()
        finally:
            self.close()  # an interrupt may have hit the first

    def _begin(self) -> None:
        prompt, exit, sampling, request_id = self._request
        shared, bell = self._engine._shared, self._doorbell
        request = prompt
        if not isinstance(request, Sequence):
            request = shared.engine.prepare(request, exit=exit, sampling=sampling)
        bell.bells = self._engine._bells_of(asyncio.get_running_loop())
        client = Client([request], whole=self._whole, rings=bell.ring, is_gone=bell.is_gone)
        self._client = client
        self._engine._begin(self, client, request_id)
        if self._is_closed:  # by another thread, which may not have seen the client yet
            self.close()

    def _given(self, step: StepOutput) -> StepOutput:
        self._is_finished = step.finished
        if step.output is not None and step.output.finish_reason == "error":
            raise RequestFailedError(step.output)
        return step

    def _last(self) -> StepOutput:
        """What comes behind the last item."""
        if self._why is None and not self._is_closed and not self._is_finished:
            self._why = RuntimeError("stream: the event loop that read it was closed in the middle")
        self.close(self._why)
        raise self._why or StopAsyncIteration


class _Doorbell:
    """How the thread that steps wakes the task that reads a stream."""

    def __init__(self, stream: ReferenceType[AsyncStream]) -> None:
        self._stream = stream
        self.bells: _Bells | None = None
        """Of the event loop that reads."""
        self._waiting: asyncio.Future[None] | None = None

    @property
    def is_waited_for(self) -> bool:
        return self._waiting is not None and not self._waiting.done()

    def is_gone(self) -> bool:
        """Whether nobody can wait any more. A stream that is collected says so, but an interrupt
        may hit it there.
        """
        return self._stream() is None or (self.bells is not None and self.bells.loop.is_closed())

    def ring(self) -> None:
        """From any thread; a RuntimeError when the event loop is closed."""
        future, self._waiting = self._waiting, None
        if future is not None and self.bells is not None:
            self.bells.ring(future)

    async def wait(self, bells: _Bells, client: Client) -> None:
        """Until it rings; not at all if there is something to read already."""
        self.bells = bells
        future = self._waiting = bells.loop.create_future()
        try:
            if client.unfinished and client.mail.empty() and not client.closed:
                await future
        finally:
            self._waiting = None


class _Bells:
    """All that ring in one event loop: one call wakes it for all of a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._rung: deque[asyncio.Future[None]] = deque()
        self._is_called = False

    def ring(self, future: asyncio.Future[None]) -> None:
        self._rung.append(future)
        if not self._is_called:
            self._is_called = True
            self.loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._is_called = False
        while self._rung:
            future = self._rung.popleft()
            if not future.done():
                future.set_result(None)
