"""Servers for tests, in memory or on a socket."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from eecore.generation import Model
from eecore.output import Output, Piece, RequestFailedError, StepOutput
from eecore.serving.answering import Service
from eecore.serving.app import create_app
from eecore.serving.server import listen
from eecore.serving.settings import ServerSettings, service_of
from workloads import until

LONG = 60_000
"""The tokens of a request that runs for longer than any test waits."""


@dataclass
class Asker:
    """A client of an application in memory."""

    service: Service
    app: Any

    def run(self, asks: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
        """The result of a coroutine that has a client."""

        async def main() -> Any:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await asyncio.wait_for(asks(client), 120)

        return asyncio.run(main())

    def post(self, path: str, json: Any = None, **settings: Any) -> httpx.Response:
        if json is not None:
            settings["json"] = json
        answer: httpx.Response = self.run(lambda client: client.post(path, **settings))
        return answer

    def get(self, path: str, **settings: Any) -> httpx.Response:
        answer: httpx.Response = self.run(lambda client: client.get(path, **settings))
        return answer


def asker(model: Model, keys: tuple[str, ...] = (), **settings: Any) -> Asker:
    service = service_of(model, ServerSettings(**settings))
    return Asker(service, create_app(service, keys))


@contextmanager
def listening(service: Service) -> Iterator[str]:
    """Run a real server; yields its address."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(service), log_level="error"))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and its address."""
    with subprocess.Popen(
        [sys.executable, "-m", "eecore", "serve", "--no-warm-up", *arguments, "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        try:
            assert process.stderr is not None
            said = ""
            while not (found := re.search(r"http://[\d.]+:\d+", said)):
                line = process.stderr.readline()
                assert line, said
                said += line
            assert said.startswith("loading ")
            assert ("warming up" in said) == ("--warm-up" in arguments)
            yield process, found[0]
        finally:
            process.kill()


def events(text: str) -> list[Any]:
    """The JSON of server-sent events; the last one has to be the end mark."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def assert_idle(service: Service) -> None:
    """No request has a place, and all pages are free."""
    engine = service.served.engine
    assert until(lambda: not (engine.num_streams or service.admission.taken))
    assert until(lambda: not (engine.engine.has_unfinished or engine.engine.num_used_pages))


def script(
    service: Service, output: Output, pieces: Sequence[str | Piece], *, ready: bool = False
) -> None:
    """Give a server's engine scripted answers.

    Args:
        service: the server's service.
        output: the output of every request.
        pieces: pieces of its text, one per step, or with their thoughts.
        ready: whether all steps are available with the first.
    """
    engine: Any = Scripted(service.served.engine, output, pieces, ready)
    service.served.engine = engine


@dataclass
class Scripted:
    """An engine with scripted answers."""

    wrapped: Any
    output: Output
    pieces: Sequence[str | Piece]
    ready: bool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    async def generate(self, _prepared: Any) -> Output:
        return self.output

    def stream(self, _prepared: Any) -> ScriptedStream:
        return ScriptedStream(self.output, list(self.pieces), self.ready)


@dataclass
class ScriptedStream:
    output: Output
    left: list[str | Piece]
    ready: bool

    async def __aiter__(self) -> AsyncIterator[StepOutput]:
        while self.left:
            yield self._next()

    def take(self) -> StepOutput | None:
        return self._next() if self.ready and self.left else None

    def close(self) -> None:
        pass

    def _next(self) -> StepOutput:
        said = self.left.pop(0)
        piece = Piece(said) if isinstance(said, str) else said
        output = None if self.left else self.output
        if output is not None and output.finish_reason == "error":
            raise RequestFailedError(output)
        return StepOutput("r", [5], [3], [0.5], output, piece=lambda: piece)
