"""A request from its body to the last byte of its answer.

A request has seats from before its body is read until its answer is sent or its client has gone.
However a request ends, its streams end with it, and the engine takes their pages back.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import anyio
from anyio import CapacityLimiter
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from eecore.engine.async_engine import AsyncStream
from eecore.output import Output, StepOutput
from eecore.serving.admission import Admission, Seats
from eecore.serving.asking import Asked, compile_guide
from eecore.serving.bodies import ClientGoneError, gone, read_body
from eecore.serving.guides import has_guide
from eecore.serving.metrics import Metrics
from eecore.serving.protocol import GenerationRequest, Request
from eecore.serving.refusals import ApiError, as_api_error
from eecore.serving.served import ServedModel
from eecore.serving.shapes import Shape, Tokens

LOGGER = logging.getLogger("eecore")
# Threads that read bodies and tokenize.
PREPARING = 2
# Threads that wait for guides to be compiled.
COMPILING = 64
# Seconds after which a guide that is still being compiled marks the server as unhealthy.
STUCK_SECONDS = 30.0
# Seconds for the last event to a client that may not be reading.
FAREWELL_SECONDS = 1.0
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Body = TypeVar("Body", bound=Request)
Asking = TypeVar("Asking", bound=GenerationRequest)
Result = TypeVar("Result")


@dataclass(eq=False)
class Service:
    """The state that all requests to a server share.

    Args:
        max_body: bytes of the largest body.
        timeout: seconds for a request; None for no limit.
    """

    served: ServedModel
    admission: Admission
    metrics: Metrics
    max_body: int
    timeout: float | None
    _preparing: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(PREPARING))
    _compiling: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(COMPILING))
    _waiting: dict[object, float] = field(default_factory=dict)
    """The time at which each request that waits for its guide began to wait."""

    @property
    def is_stuck(self) -> bool:
        """Whether a request has waited for its guide for too long."""
        return time.monotonic() - min(self._waiting.values(), default=math.inf) > STUCK_SECONDS

    async def compiled(self, body: GenerationRequest) -> None:
        """Wait until the guide of a request, if it has one, has been compiled. The wait has threads
        of its own, so that other requests can be prepared meanwhile.
        """
        key = object()
        self._waiting[key] = time.monotonic()
        try:
            work = partial(compile_guide, self.served, body)
            await anyio.to_thread.run_sync(work, limiter=self._compiling)
        finally:
            del self._waiting[key]

    async def beside(self, work: Callable[[], Result]) -> Result:
        """Run slow work in a thread, beside the event loop."""
        return await anyio.to_thread.run_sync(work, limiter=self._preparing)


class Answer(Response, Generic[Body]):
    """The answer to a body, in one piece.

    Args:
        reads: makes a request from the body, in a thread.
        says: makes the answer, in a thread.
    """

    def __init__(
        self,
        service: Service,
        reads: Callable[[bytes], Body],
        says: Callable[[ServedModel, Body], Any],
    ) -> None:
        super().__init__()
        self._service, self._reads, self._says = service, reads, says

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._service.admission.seats() as seats:
                body = await read_body(scope, receive, self._service.max_body)
                await self._answer(body, seats, scope, receive, send)
        except ClientGoneError:
            return
        except Exception as error:
            await self._refuse(error, scope, receive, send)

    async def _answer(
        self,
        body: bytes,
        seats: Seats,  # noqa: ARG002
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        service = self._service

        def answer() -> Any:
            request = self._reads(body)
            return {**self._says(service.served, request), **request.ignored}

        await JSONResponse(await service.beside(answer))(scope, receive, send)

    async def _refuse(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        await refusal(error)(scope, receive, send)


class Generation(Answer[Asking]):
    """The model's answer to a body, whole or as a stream.

    Args:
        ask: makes requests for the engine from it.
    """

    def __init__(
        self,
        service: Service,
        reads: Callable[[bytes], Asking],
        ask: Callable[[ServedModel, Asking], Asked],
        shape: type[Shape],
    ) -> None:
        super().__init__(service, reads, ask)
        self._shape = shape
        self._stream_of: Shape | None = None
        """The shape of an answer that is streamed; None: the answer is whole."""
        self._is_started = False

    async def _answer(
        self, body: bytes, seats: Seats, scope: Scope, receive: Receive, send: Send
    ) -> None:
        async def noted(message: Any) -> None:
            self._is_started = True
            await send(message)

        await _unless_gone(receive, self._served(body, seats, scope, receive, noted))

    async def _served(
        self, body: bytes, seats: Seats, scope: Scope, receive: Receive, send: Send
    ) -> None:
        service = self._service
        said = await service.beside(lambda: self._reads(body))
        if has_guide(said):
            await service.compiled(said)
        asked: Asked = await service.beside(lambda: self._says(service.served, said))
        seats.take(len(asked.choices))
        tally = Tally(service.metrics, asked)
        shape = self._shape(service.served, asked)
        with tally:
            try:
                with anyio.fail_after(service.timeout):
                    if asked.body.stream:
                        self._stream_of = shape
                        await self._stream(asked, shape, tally, send)
                        return
                    outputs = await self._outputs(asked, tally)
            except TimeoutError:
                tally.outcome = "timeout"
                raise ApiError(
                    504,
                    f"expected an answer within {service.timeout:g} s, got none",
                    code="deadline_exceeded",
                ) from None

        def answer() -> Response:
            return JSONResponse(shape.whole(outputs))

        response = await self._said(answer, outputs)
        await response(scope, receive, send)

    async def _said(self, says: Callable[[], Result], tokens: Iterable[Tokens]) -> Result:
        """The answer to some tokens, made in a thread where it covers a prompt's many tokens."""
        is_long = any(each.prompt_logprobs is not None for each in tokens)
        return await self._service.beside(says) if is_long else says()

    async def _outputs(self, asked: Asked, tally: Tally) -> list[Output]:
        engine = self._service.served.engine
        outputs = await _all_of([engine.generate(choice.prepared) for choice in asked.choices])
        for output in outputs:
            tally.ended(output)
        return outputs

    async def _stream(self, asked: Asked, shape: Shape, tally: Tally, send: Send) -> None:
        engine = self._service.served.engine
        streams = [engine.stream(choice.prepared) for choice in asked.choices]
        outputs: dict[int, Output] = {}
        text = ""
        try:
            async with aclosing(_ready(streams)) as ready:
                async for steps in ready:
                    if not self._is_started:  # by now most of what can go wrong has gone right
                        head = {"status": 200, "headers": STREAM_HEADERS}
                        await send({"type": "http.response.start", **head})

                    def events(steps: Steps = steps) -> str:
                        return "".join([shape.events(index, step) for index, step in steps])

                    text = await self._said(events, [step for _, step in steps])
                    for index, step in steps:
                        if step.output is not None:
                            outputs[index] = step.output
                            tally.ended(step.output)
                    if len(outputs) == len(streams):
                        break
                    if text:
                        await _send_text(send, text)
                        text = ""
        finally:
            for stream in streams:
                stream.close()
        text += shape.end([outputs[index] for index in sorted(outputs)])
        await _send_text(send, text, more=False)

    async def _refuse(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        """An error in place of the answer, or at the end of a stream that has begun."""
        if as_api_error(error) is None:
            LOGGER.error("a request failed", exc_info=error)
        if not self._is_started:
            self._service.metrics.refused()
            await refusal(error)(scope, receive, send)
            return
        shape = self._stream_of
        if shape is None:  # a whole answer that was begun has no place for an error
            return
        with suppress(TimeoutError), anyio.fail_after(FAREWELL_SECONDS):
            await _send_text(send, shape.failed(_api_error(error)), more=False)


class Tally:
    """Counts the sequences of a request as they end. Those that have not ended when the request
    does count as cancelled.
    """

    def __init__(self, metrics: Metrics, asked: Asked) -> None:
        self._metrics, self._left = metrics, len(asked.choices)
        self._policy = asked.choices[0].prepared.exit
        self.outcome = "cancelled"

    def ended(self, output: Output) -> None:
        self._left -= 1
        self._metrics.ended(output.finish_reason, output, self._policy)

    def __enter__(self) -> Tally:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: Any) -> None:
        if kind is not None and issubclass(kind, Exception) and self.outcome == "cancelled":
            self.outcome = "error"
        output = getattr(error, "output", None)  # the output of the sequence that failed
        for _ in range(self._left):
            self._metrics.ended(self.outcome, output, self._policy)
            output = None


def refusal(error: Exception) -> Response:
    """The response for an error."""
    known = _api_error(error)
    return JSONResponse(known.body, known.status, headers=known.headers)


def _api_error(error: Exception) -> ApiError:
    return as_api_error(error) or ApiError(
        500, f"the server failed: {type(error).__name__}", code="internal_error"
    )


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; stop it when the client has gone."""
    tasks = [asyncio.create_task(work), asyncio.create_task(gone(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _all_of(works: Sequence[Coroutine[Any, Any, Output]]) -> list[Output]:
    """The results of all of ``works``. Where one fails, or all are cancelled, the others end."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


Steps = list[tuple[int, StepOutput]]


async def _ready(streams: Sequence[AsyncStream]) -> AsyncGenerator[Steps, None]:
    """The steps of all streams as they come, together where several are there. A client that reads
    slowly holds all of them up.
    """
    if len(streams) == 1:
        async for step in streams[0]:
            steps, error = [(0, step)], None
            try:
                while (more := streams[0].take()) is not None:
                    steps.append((0, more))
            except Exception as its:
                error = its
            yield steps
            if error is not None:
                raise error
        return
    queue: asyncio.Queue[tuple[int, StepOutput | Exception]] = asyncio.Queue(len(streams))

    async def pass_on(index: int) -> None:
        try:
            async for step in streams[index]:
                await queue.put((index, step))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(pass_on(index)) for index in range(len(streams))]
    try:
        unfinished = len(streams)
        while unfinished:
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            steps = [(index, item) for index, item in items if isinstance(item, StepOutput)]
            unfinished -= sum(step.finished for _, step in steps)
            if steps:
                yield steps
            for _, item in items:
                if isinstance(item, Exception):
                    raise item
    finally:
        for task in tasks:
            task.cancel()


async def _send_text(send: Send, text: str, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
