"""Load by many equal clients: on an engine in this process, or on servers over HTTP.

Every client sends its next prompt as soon as its last answer is complete. The HTTP client does as
little as possible, since it shares the processors with the server; bodies are made beforehand.
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


@dataclass
class Answer:
    """The times of one request, in seconds of ``time.perf_counter``."""

    began: float = field(default_factory=time.perf_counter)
    arrivals: list[float] = field(default_factory=list)
    """When parts of the answer arrived; for an answer in one piece, when it was complete."""
    tokens: int = 0

    def arrive(self) -> None:
        self.arrivals.append(time.perf_counter())


@dataclass
class Load:
    """The answers to all requests, their time together, and the answerer's processor time."""

    seconds: float
    answers: list[Answer]
    cpu: float | None = None

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
        return [b - a for answer in self.answers for a, b in pairwise(answer.arrivals)]


Ask = Callable[[Any], Awaitable[Answer]]


async def load_of(ask: Ask, clients: int, requests: Sequence[Any]) -> Load:
    """Send all requests, each by the client that is free first."""
    left: Iterator[Any] = iter(requests)
    answers: list[Answer] = []

    async def work() -> None:
        for request in left:
            answers.append(await ask(request))

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(clients)))
    return Load(time.perf_counter() - began, answers)


def cpu_seconds(pid: int) -> float | None:
    """Processor seconds of a process and its children; None if the system does not tell."""
    seconds: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            stat = path.read_text().rpartition(")")[2].split()
            number = int(path.parent.name)
            if pid in (number, int(stat[1])):
                seconds[number] = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    return sum(seconds.values()) if pid in seconds else None


def of_engine(engine: AsyncEngine, policy: eecore.Exit, streams: bool) -> Ask:
    """A client of the engine; its requests are (token ids, sampling)."""

    async def ask(request: tuple[list[int], eecore.SamplingParams]) -> Answer:
        (prompt, sampling), answer = request, Answer()
        if streams:
            async for step in engine.stream(prompt, exit=policy, sampling=sampling):
                if step.text:
                    answer.arrive()
                answer.tokens += len(step.token_ids)
        else:
            output = await engine.generate(prompt, exit=policy, sampling=sampling)
            answer.arrive()
            answer.tokens = len(output.token_ids)
        return answer

    return ask


def of_server(address: str) -> Ask:
    """A client of /v1/completions; its requests are bodies."""

    async def ask(body: bytes) -> Answer:
        answer, rest = Answer(), b""
        async for data in post(address, "/v1/completions", body):
            *events, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
            said = [event.removeprefix(b"data:").lstrip() for event in events]
            found = [json.loads(each) for each in said if each.startswith(b"{")]
            if any(choice.get("text") for event in found for choice in event.get("choices", ())):
                answer.arrive()
            for event in found:
                if "error" in event:
                    raise ConnectionError(event["error"])
                answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)
        if rest.strip():  # an answer in one piece
            answer.arrive()
            answer.tokens = json.loads(rest)["usage"]["completion_tokens"]
        return answer

    return ask


async def post(address: str, path: str, body: bytes) -> AsyncIterator[bytes]:
    """The body of the answer, in parts as they arrive.

    Raises:
        ConnectionError: the status is not 200.
    """
    parts = urlsplit(address)
    head = f"POST {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(head.encode() + body)
        first, *lines = (
            (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        )
        if first.split()[1] != "200":
            text = (await reader.read()).decode(errors="replace")
            raise ConnectionError(f"{path}: expected 200, got {first}: {text[:500]}")
        if "transfer-encoding: chunked" not in lines:
            yield await reader.read()
            return
        while size := int((await reader.readline()).partition(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    finally:
        writer.close()
