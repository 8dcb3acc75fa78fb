"""A crowd of clients that ask alike: of an engine in this process, or of servers over HTTP.

Everybody asks for the next prompt as soon as the answer to the one before is there. The HTTP client
does as little as it can, since it shares the processors with the server: one connection a client,
kept open, bodies that are ready beforehand.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import eecore
from eecore.engine.async_engine import AsyncEngine

__all__ = ["Answer", "Connection", "Load", "cpu_seconds", "load_of", "of_engine", "of_server"]


@dataclass
class Answer:
    """What came of one request, in seconds of ``time.perf_counter``."""

    began: float
    arrivals: list[float] = field(default_factory=list)
    """When text or tokens came; of an answer in one piece when it was there."""
    tokens: int = 0


@dataclass
class Load:
    """What came of all requests."""

    seconds: float
    answers: list[Answer]

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def firsts(self) -> list[float]:
        """Seconds from each request to the first that came of it."""
        return [answer.arrivals[0] - answer.began for answer in self.answers if answer.arrivals]

    @property
    def gaps(self) -> list[float]:
        """Seconds between what came, over all answers."""
        times = [answer.arrivals for answer in self.answers]
        return [later - earlier for each in times for earlier, later in pairwise(each)]


Ask = Callable[[Any], Awaitable[Answer]]


async def load_of(clients: Sequence[Ask], requests: Sequence[Any]) -> Load:
    """All requests, each by the client that is free first."""
    left: Iterator[Any] = iter(requests)
    answers: list[Answer] = []

    async def work(ask: Ask) -> None:
        for request in left:
            answers.append(await ask(request))

    began = time.perf_counter()
    await asyncio.gather(*map(work, clients))
    return Load(time.perf_counter() - began, answers)


def cpu_seconds(pid: int) -> float | None:
    """Processor time of a process and its children so far; None where the system does not tell."""
    seconds: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            behind = path.read_text().rpartition(")")[2].split()
            number = int(path.parent.name)
            if pid in (number, int(behind[1])):
                spent = int(behind[11]) + int(behind[12])
                seconds[number] = spent / os.sysconf("SC_CLK_TCK")
    return sum(seconds.values()) if pid in seconds else None


def of_engine(engine: AsyncEngine, policy: eecore.Exit, streams: bool) -> Ask:
    """A client that asks the engine for what a prompt's ids and its sampling say."""

    async def ask(request: tuple[list[int], eecore.SamplingParams]) -> Answer:
        prompt, sampling = request
        answer = Answer(time.perf_counter())
        if streams:
            async for step in engine.stream(prompt, exit=policy, sampling=sampling):
                if step.text:
                    answer.arrivals.append(time.perf_counter())
                answer.tokens += len(step.token_ids)
        else:
            output = await engine.generate(prompt, exit=policy, sampling=sampling)
            answer.arrivals.append(time.perf_counter())
            answer.tokens = len(output.token_ids)
        return answer

    return ask


def of_server(connection: Connection) -> Ask:
    """A client that sends bodies to /v1/completions."""

    async def ask(body: bytes) -> Answer:
        answer = Answer(time.perf_counter())
        rest, chunks = b"", 0
        async for data in connection.post("/v1/completions", body):
            now = time.perf_counter()
            *events, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
            said = [event.removeprefix(b"data:").lstrip() for event in events]
            found = [json.loads(each) for each in said if each.startswith(b"{")]
            told = [event for event in found if _has_text(event)]
            chunks += len(told)
            if told:
                answer.arrivals.append(now)
            for event in found:
                answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)
        if rest.strip():  # an answer in one piece
            answer.arrivals.append(time.perf_counter())
            answer.tokens = json.loads(rest)["usage"]["completion_tokens"]
        answer.tokens = answer.tokens or chunks  # of a server that does not tell
        return answer

    return ask


def _has_text(event: Any) -> bool:
    if "error" in event:
        raise ConnectionError(event["error"])
    return any(choice.get("text") for choice in event.get("choices", ()))


class Connection:
    """One to a server, over which one request follows the other.

    Args:
        address: of the server, http://HOST:PORT.
    """

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"address: expected http://HOST:PORT, got {address!r}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """The body of the answer, as it comes.

        Raises:
            ConnectionError: the answer is another than 200.
        """
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        try:
            reader, said = await self._asked(head.encode() + body)
        except (asyncio.IncompleteReadError, ConnectionResetError):  # closed since the last one
            self.close()
            reader, said = await self._asked(head.encode() + body)
        lines = said.decode("latin-1").lower().split("\r\n")
        status = lines[0].split()[1]
        headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        answer = self._answer(reader, headers)
        if status != "200":
            text = b"".join([part async for part in answer]).decode(errors="replace")
            raise ConnectionError(f"{path}: expected 200, got {status}: {text[:500]}")
        async for part in answer:
            yield part
        if headers.get("connection") == "close":
            self.close()

    async def _asked(self, request: bytes) -> tuple[asyncio.StreamReader, bytes]:
        """Where the answer's body comes from, and its head."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(request)
        return reader, await reader.readuntil(b"\r\n\r\n")

    async def _answer(
        self, reader: asyncio.StreamReader, headers: dict[str, str]
    ) -> AsyncIterator[bytes]:
        if headers.get("transfer-encoding") != "chunked":
            yield await reader.readexactly(int(headers["content-length"]))
            return
        while size := int((await reader.readline()).partition(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readline()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
