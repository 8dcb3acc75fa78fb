"""Load by many equal clients: on an engine in this process, or on servers over HTTP.

Every client sends its next prompt as soon as its last answer is complete. The HTTP client does as
little as possible, since it shares the processors with the server: each client keeps one connection
open, and bodies are made beforehand.
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
    """The times of one request, in seconds of ``time.perf_counter``."""

    began: float
    arrivals: list[float] = field(default_factory=list)
    """When parts of the answer arrived; for an answer in one piece, when it was complete."""
    tokens: int = 0


@dataclass
class Load:
    """The answers to all requests, and their time together."""

    seconds: float
    answers: list[Answer]

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def firsts(self) -> list[float]:
        """Seconds from each request to the first part of its answer."""
        return [answer.arrivals[0] - answer.began for answer in self.answers if answer.arrivals]

    @property
    def gaps(self) -> list[float]:
        """Seconds between parts of an answer, over all answers."""
        times = [answer.arrivals for answer in self.answers]
        return [later - earlier for each in times for earlier, later in pairwise(each)]


Ask = Callable[[Any], Awaitable[Answer]]


async def load_of(clients: Sequence[Ask], requests: Sequence[Any]) -> Load:
    """Send all requests, each by the client that is free first."""
    left: Iterator[Any] = iter(requests)
    answers: list[Answer] = []

    async def work(ask: Ask) -> None:
        for request in left:
            answers.append(await ask(request))

    began = time.perf_counter()
    await asyncio.gather(*map(work, clients))
    return Load(time.perf_counter() - began, answers)


def cpu_seconds(pid: int) -> float | None:
    """Processor seconds of a process and its children; None if the system does not tell."""
    seconds: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            stat = path.read_text().rpartition(")")[2].split()
            number = int(path.parent.name)
            if pid in (number, int(stat[1])):
                spent = int(stat[11]) + int(stat[12])
                seconds[number] = spent / os.sysconf("SC_CLK_TCK")
    return sum(seconds.values()) if pid in seconds else None


def of_engine(engine: AsyncEngine, policy: eecore.Exit, streams: bool) -> Ask:
    """A client of the engine; its requests are (token ids, sampling)."""

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
    """A client of /v1/completions; its requests are bodies."""

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
        answer.tokens = answer.tokens or chunks  # for a server that does not report usage
        return answer

    return ask


def _has_text(event: Any) -> bool:
    if "error" in event:
        raise ConnectionError(event["error"])
    return any(choice.get("text") for choice in event.get("choices", ()))


class Connection:
    """A connection to a server for one request after the other.

    Args:
        address: the server's address, http://HOST:PORT.
    """

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"address: expected http://HOST:PORT, got {address!r}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """The body of the answer, in parts as they arrive.

        Raises:
            ConnectionError: the status is not 200.
        """
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        try:
            reader, said = await self._asked(head.encode() + body)
        except (asyncio.IncompleteReadError, ConnectionResetError):  # closed since the last answer
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
        """Send a request; the reader of the answer's body, and the answer's head."""
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
