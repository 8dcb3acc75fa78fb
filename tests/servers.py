"""Servers that tests ask in memory or over a socket."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

import eecore
from eecore.serving.answering import Service
from eecore.serving.app import create_app
from eecore.serving.server import listen
from eecore.serving.settings import ServerSettings, service_of

LONG = 20_000
"""Tokens of a request that still runs when a test has long made its point."""


@dataclass
class Asker:
    """Asks an application in memory."""

    service: Service
    app: Any

    def run(self, asks: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
        """What a coroutine with a client returns."""

        async def main() -> Any:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await asyncio.wait_for(asks(client), 60)

        return asyncio.run(main())

    def post(self, path: str, json: Any = None, **settings: Any) -> httpx.Response:
        if json is not None:
            settings["json"] = json
        answer: httpx.Response = self.run(lambda client: client.post(path, **settings))
        return answer

    def get(self, path: str, **settings: Any) -> httpx.Response:
        answer: httpx.Response = self.run(lambda client: client.get(path, **settings))
        return answer


def asker(model: eecore.Model, keys: tuple[str, ...] = (), **settings: Any) -> Asker:
    service = service_of(model, ServerSettings(**settings))
    return Asker(service, create_app(service, keys))


@contextmanager
def listening(service: Service) -> Iterator[str]:
    """A real server; its address."""
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


def events(text: str) -> list[Any]:
    """The JSON of server-sent events, the last of which ends them."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def assert_idle(service: Service) -> None:
    """Nobody has a seat, and all pages are back."""
    engine = service.served.engine
    until = time.monotonic() + 10
    while (engine.num_streams or service.admission.taken) and time.monotonic() < until:
        time.sleep(0.002)
    while engine.engine.has_unfinished and time.monotonic() < until:
        time.sleep(0.002)
    assert not engine.num_streams
    assert not service.admission.taken
    assert not engine.engine.num_used_pages
