"""A server in a long run: well-behaved, bad and broken clients, all at once.

python -m bench soak-serve --minutes 30                 half an hour; writes the table
python -m bench soak-serve --minutes 2 --dry-run        checks that it runs; writes nothing
python -m bench soak-serve --minutes 30 -- OPTION ...   with more options of eecore serve

``eecore serve`` runs intent in a process of its own, with few seats, few pages and a short
deadline, so that requests are refused, preempted and late. Each request must be answered, or
refused with a reason; greedy answers must be those of an idle server. At the end no request may
run, wait or hold a page, and memory must not have grown since the warm-up. Exit code 1 if a check
fails. Writes bench/results/soak_serve.json and the table in bench/results.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

import eecore
from bench.harness.command import parser
from bench.harness.machine import machine
from bench.harness.results import Figures
from bench.serving.answerers import serving
from bench.serving.crowd import COMPLETIONS, EXITS, JSON, UTTERANCES, Ask, Crowd, completion
from bench.serving.outcomes import Book, Finding, outcome
from bench.serving.tables import GAUGES, SOAK, faults

OPTIONS = ("--max-num-seqs", "12", "--max-waiting", "24", "--timeout", "2", "--max-body", "262144")
OPTIONS += ("--kv-cache-tokens", "1536", "--tool-parser", "hermes")
HANG_S = 60.0
"""Seconds after which a request counts as hanging."""
SAMPLE_S = 2.0
WARM = 0.2
"""The share of the run that is warm-up, in which memory may grow."""


async def answered(http: httpx.AsyncClient, ask: Ask) -> str:
    """The outcome of a request whose client waits for the end of its answer."""
    method = "GET" if ask.content is None else "POST"
    async with http.stream(method, ask.path, content=ask.content, headers=ask.headers) as answer:
        parts = []
        async for part in answer.aiter_raw():
            parts.append(part)
            if answer.status_code == 200 and len(parts) == ask.leaves_after:
                return "left"
            if ask.pause:
                await asyncio.sleep(ask.pause)
        return outcome(ask, answer.status_code, b"".join(parts))


async def try_it(http: httpx.AsyncClient, ask: Ask, book: Book) -> None:
    """Send a request, and record its outcome."""
    try:
        book.note(ask.kind, await asyncio.wait_for(answered(http, ask), ask.patience or HANG_S))
    except asyncio.TimeoutError:
        if ask.patience is None:
            book.find(ask.kind, f"no answer within {HANG_S:g} s")
        else:
            book.note(ask.kind, "left")
    except Finding as finding:
        book.find(ask.kind, str(finding))
    except httpx.HTTPError as error:
        book.find(ask.kind, f"no answer: {error!r}")


# The server


def tree_rss_mb(pid: int) -> float:
    """Resident memory of a process and its descendants, in 2**20 bytes."""
    parents: dict[int, int] = {}
    pages: dict[int, int] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            stat = (directory / "stat").read_text().rpartition(")")[2].split()
            pages[int(directory.name)] = int((directory / "statm").read_text().split()[1])
            parents[int(directory.name)] = int(stat[1])
        except (OSError, ValueError, IndexError):  # the process has ended
            continue
    found, size = {pid}, 0
    while len(found) != size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return sum(pages.get(each, 0) for each in found) * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth_mb(samples: Sequence[float]) -> float:
    """Growth of memory after the warm-up: the mean of the last third less that of the first."""
    warm = list(samples[int(WARM * len(samples)) :])
    third = max(len(warm) // 3, 1)
    return sum(warm[-third:]) / third - sum(warm[:third]) / third


def state_of(metrics: str) -> dict[str, float]:
    """The engine's gauges, from the text of /metrics."""
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[:1] not in ("", "#"))
    return {name: float(values[f"eecore_{name}"]) for name in GAUGES}


async def at_rest(http: httpx.AsyncClient) -> dict[str, float]:
    """The state of a server after all clients have disconnected; waits for it to be idle."""
    until = time.monotonic() + HANG_S
    while True:
        state = state_of((await http.get("/metrics")).text)
        if not any(state[name] for name in GAUGES[:4]) or time.monotonic() > until:
            return state
        await asyncio.sleep(0.1)


async def references(http: httpx.AsyncClient) -> dict[tuple[str, str], str]:
    """The answers of an idle server, by exit and utterance."""
    said = {}
    for exit in EXITS:
        for prompt in UTTERANCES:
            body = completion(prompt, exit=exit)
            answer = await http.post(COMPLETIONS, content=body, headers=JSON)
            said[exit, prompt] = answer.raise_for_status().json()["choices"][0]["text"]
    return said


async def soak(address: str, pid: int, seconds: float, clients: int, seed: int) -> dict[str, Any]:
    """Run the clients for some seconds; the figures, with the state of the server at the end."""
    book, samples = Book(), list[float]()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as http:
        crowd = Crowd(await references(http))
        until = time.monotonic() + seconds

        async def client(number: int) -> None:
            chance = random.Random(f"{seed} {number}")
            while time.monotonic() < until:
                await try_it(http, crowd(chance), book)

        async def watch() -> None:
            while True:
                samples.append(tree_rss_mb(pid))
                await asyncio.sleep(min(SAMPLE_S, seconds / 20))

        watching = asyncio.create_task(watch())
        began = time.monotonic()
        try:
            await asyncio.gather(*map(client, range(clients)))
        finally:
            watching.cancel()
        took = time.monotonic() - began
        state = await at_rest(http)
    samples.append(tree_rss_mb(pid))
    return {
        "seconds": round(took, 1),
        "counts": {kind: dict(counts) for kind, counts in sorted(book.counts.items())},
        "findings": book.findings,
        "at_rest": state,
        "rss_mb_warm": round(samples[int(WARM * len(samples))], 1),
        "rss_mb_at_the_end": round(samples[-1], 1),
        "rss_growth_mb": round(growth_mb(samples), 2),
        "rss_mb": [round(sample, 1) for sample in samples],
    }


def run(arguments: argparse.Namespace) -> Figures:
    """All figures."""
    options = [*OPTIONS, *arguments.options]
    with serving(eecore.default_model(), "float32", arguments.threads, options) as server:
        assert server.pid is not None
        seconds = 60 * arguments.minutes
        found = asyncio.run(
            soak(server.address, server.pid, seconds, arguments.clients, arguments.seed)
        )
    return {
        **machine(),
        "cores": len(os.sched_getaffinity(0)),
        "minutes": arguments.minutes,
        "clients": arguments.clients,
        "seed": arguments.seed,
        "options": options,
        **found,
    }


def main(words: Sequence[str]) -> None:
    made = parser("soak-serve", __doc__, threads=1)
    made.add_argument("--minutes", type=float, default=30.0)
    made.add_argument("--clients", type=int, default=16)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("options", nargs="*", help="options of eecore serve, after --")
    arguments = made.parse_args(words)
    result = run(arguments)
    SOAK.finish(result, arguments)
    if found := faults(result):
        raise SystemExit("\n".join(found))
