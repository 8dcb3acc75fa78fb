"""Answerers of requests: the engine in this process, and servers in other processes."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import eecore
from bench.harness import peers
from bench.serving.load import Ask, Connection, Load, cpu_seconds, load_of, of_engine, of_server
from eecore.exit_text import Policies

KV_CACHE_TOKENS = 8192
START_TIMEOUT_S = 120


@dataclass
class Case:
    """Clients that send prompts to a model under one policy.

    Args:
        model: the model's name.
        exit: the policy, as the request's field has it.
        clients: the number of clients.
        prompts: texts, each a request.
        max_tokens: tokens of an answer at most.
        ignore_eos: whether each answer has exactly ``max_tokens``.
    """

    model: str
    exit: str
    clients: int
    prompts: list[str]
    max_tokens: int
    ignore_eos: bool

    def body(self, streams: bool, **fields: Any) -> dict[str, Any]:
        """The body of a request, without the prompt."""
        body: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": 0, **fields}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


@dataclass
class Turns:
    """The rounds of one case by one answerer."""

    who: str
    streams: bool
    loads: list[Load] = field(default_factory=list)
    cpu: list[float | None] = field(default_factory=list)
    """Processor seconds of the answerer's process, by round."""

    def speed(self, number: int) -> float:
        return self.loads[number].tokens / self.loads[number].seconds

    def row(self, case: Case, engine: Turns) -> dict[str, Any]:
        """A row of figures: medians over rounds; percentiles and CPU time over all requests."""
        rounds = range(len(self.loads))
        ratios = [self.speed(i) / engine.speed(i) for i in rounds]
        tokens = sum(load.tokens for load in self.loads)
        known = [seconds for seconds in self.cpu if seconds is not None]
        row: dict[str, Any] = {
            "model": case.model,
            "exit": case.exit,
            "clients": case.clients,
            "who": self.who,
            "streams": self.streams,
            "requests": sum(len(load.answers) for load in self.loads),
            "tokens": tokens,
            "tokens_per_s": statistics.median(map(self.speed, rounds)),
            "of_engine": statistics.median(ratios),
            "cpu_us_per_token": 1e6 * sum(known) / tokens if known else None,
        }
        kinds = {"first": [s for load in self.loads for s in load.firsts]}
        kinds["gap"] = [s for load in self.loads for s in load.gaps]
        for kind, seconds in kinds.items():
            shown = seconds if self.streams else []
            row[f"{kind}_ms"] = [1e3 * percentile(shown, p) for p in (50, 99)] if shown else None
        return row


def percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that ``share`` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(-(-len(ordered) * share // 100), 1) - 1]


class EngineAlone:
    """Answers with the engine in this process."""

    def __init__(self, model: eecore.Model, directory: Path) -> None:
        self._model, self._policies = model, Policies(directory)

    def turn(self, case: Case, streams: bool, turns: Turns) -> None:
        """All requests of a case once."""
        tokenizer = self._model.tokenizer
        assert tokenizer is not None
        sampling = eecore.SamplingParams(max_tokens=case.max_tokens, ignore_eos=case.ignore_eos)
        requests = [(tokenizer.encode(prompt), sampling) for prompt in case.prompts]
        policy = self._policies.of(case.exit)

        async def run() -> Load:
            async with self._model.async_engine() as engine:
                return await load_of([of_engine(engine, policy, streams)] * case.clients, requests)

        before = time.process_time()
        turns.loads.append(asyncio.run(run()))
        turns.cpu.append(time.process_time() - before)


class Server:
    """Answers with a running server.

    Args:
        address: http://HOST:PORT.
        pid: the process id of the server, if known.
        says_exit: whether the server has the field ``exit``.
    """

    def __init__(self, address: str, pid: int | None, says_exit: bool) -> None:
        self.address, self.pid, self._says_exit = address, pid, says_exit
        with urlopen(f"{address}/v1/models", timeout=30) as answer:
            self._model = json.load(answer)["data"][0]["id"]

    def turn(self, case: Case, streams: bool, turns: Turns) -> None:
        """All requests of a case once."""
        # cache_prompt is llama.cpp's field.
        own = {"exit": case.exit} if self._says_exit else {"cache_prompt": False}
        body = case.body(streams, model=self._model, **own)
        requests = [json.dumps({**body, "prompt": prompt}).encode() for prompt in case.prompts]

        async def run() -> Load:
            connections = [Connection(self.address) for _ in range(case.clients)]
            try:
                clients: list[Ask] = [of_server(connection) for connection in connections]
                return await load_of(clients, requests)
            finally:
                for connection in connections:
                    connection.close()

        before = None if self.pid is None else cpu_seconds(self.pid)
        turns.loads.append(asyncio.run(run()))
        after = None if self.pid is None else cpu_seconds(self.pid)
        turns.cpu.append(None if before is None or after is None else after - before)


@contextmanager
def serving(
    path: Path, dtype: str | None, threads: int, options: Sequence[str] = ("--no-prefix-cache",)
) -> Iterator[Server]:
    """``eecore serve`` in a process of its own.

    Without a prefix cache each round computes its prompts again.
    """
    command = [sys.executable, "-m", "eecore", "serve", str(path), "--port", "0"]
    command += ["--kv-cache-tokens", str(KV_CACHE_TOKENS), "--threads", str(threads), *options]
    with subprocess.Popen(
        command + (["--dtype", dtype] if dtype else []),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            said: list[str] = []
            for line in process.stderr:
                said.append(line)
                if found := re.search(r"http://[\d.]+:\d+", line):
                    break
            else:
                raise SystemExit(f"eecore serve: expected an address, got:\n{''.join(said)}")
            drain = threading.Thread(target=deque, args=(process.stderr, 0), daemon=True)
            drain.start()
            yield Server(found[0], process.pid, says_exit=True)
        finally:
            process.terminate()


@contextmanager
def llama_server(file: Path, slots: int, threads: int) -> Iterator[str]:
    """The address of llama.cpp's server on a file, as ``python -m bench peers`` builds it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(peers.llama_cpp_program("llama-server")), "-m", str(file), "-t", str(threads)]
    command += ["-tb", str(threads), "-np", str(slots), "-c", str(KV_CACHE_TOKENS)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            for _ in range(START_TIMEOUT_S):
                if process.poll() is not None:
                    raise SystemExit(f"llama-server: expected it to serve, got {process.poll()}")
                with suppress(OSError), urlopen(f"{address}/health", timeout=1):
                    break
                time.sleep(1)
            yield address
        finally:
            process.terminate()
