"""A server in a long run: well-behaved, bad and broken clients, all at once.

python -m bench soak-serve --minutes 30                 half an hour; writes the table
python -m bench soak-serve --minutes 2 --dry-run        checks that it runs; writes nothing

``eecore serve`` runs intent in a process of its own, with few seats, few pages and a short
deadline, so that requests are refused, preempted and late. Each request must be answered, or
refused with a reason; greedy answers must be those of an idle server. At the end no request may
run, wait or hold a page, and memory must not have grown since the warm-up. Exit code 1 if a check
fails. Writes bench/results/soak_serve.json and the table in bench/results.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import httpx

import eecore
from bench.harness.command import parser
from bench.harness.machine import machine
from bench.harness.results import Figures, Report
from bench.harness.rows import Columns, table_of
from bench.serving.crowd import (
    COMPLETIONS,
    EXITS,
    JSON,
    UTTERANCES,
    Ask,
    Finding,
    any_ask,
    completion,
    outcome,
)
from bench.serving.servers import Server, serving

OPTIONS = ["--max-num-seqs", "12", "--max-waiting", "24", "--timeout", "2", "--max-body", "262144"]
OPTIONS += ["--kv-cache-tokens", "1536", "--tool-parser", "hermes"]
HANG_S = 60.0
"""Seconds after which a request counts as hanging."""
SAMPLE_S = 2.0
WARM = 0.2
"""The share of the run that is warm-up, in which memory may grow."""
WARM_MINUTES = 5.0
"""The growth of a shorter run is not judged: it is still warming up."""
MAX_GROWTH_MB = 8.0
"""Allowed growth of resident memory after the warm-up, for the variation of allocators."""
MAX_FINDINGS = 20
GAUGES = ("requests_running", "requests_waiting", "requests_held", "kv_pages_used", "kv_pages")
OUTCOMES = {
    "answered": "answered",
    "refused": "refused, as expected",
    "busy": "429: no seat",
    "late": "504: too late",
    "left": "left by the client",
    "unexpected": "anything else",
}


async def answered(http: httpx.AsyncClient, ask: Ask) -> str:
    """The outcome of a request whose client waits for the end of its answer."""
    method, headers = "GET" if ask.content is None else "POST", {"content-type": ask.content_type}
    async with http.stream(method, ask.path, content=ask.content, headers=headers) as answer:
        parts = []
        async for part in answer.aiter_raw():
            parts.append(part)
            if answer.status_code == 200 and len(parts) == ask.leaves_after:
                return "left"
            if ask.pause:
                await asyncio.sleep(ask.pause)
        return outcome(ask, answer.status_code, b"".join(parts))


async def tried(http: httpx.AsyncClient, ask: Ask, findings: list[str]) -> str:
    """The outcome of a request; ``findings`` gets the reason of one that is unexpected."""
    try:
        return await asyncio.wait_for(answered(http, ask), ask.patience or HANG_S)
    except asyncio.TimeoutError:
        if ask.patience is not None:
            return "left"
        words = f"no answer within {HANG_S:g} s"
    except Finding as finding:
        words = str(finding)
    except httpx.HTTPError as error:
        words = f"no answer: {error!r}"
    if len(findings) < MAX_FINDINGS:
        findings.append(f"{ask.kind}: {words}")
    return "unexpected"


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


async def at_rest(http: httpx.AsyncClient) -> dict[str, float]:
    """The gauges of a server after all clients have disconnected; waits for it to be idle."""
    until = time.monotonic() + HANG_S
    while True:
        lines = (await http.get("/metrics")).text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line[:1] not in ("", "#"))
        state = {name: float(values[f"eecore_{name}"]) for name in GAUGES}
        if not any(state[name] for name in GAUGES[:4]) or time.monotonic() > until:
            return state
        await asyncio.sleep(0.1)


async def soak(server: Server, seconds: float, clients: int, seed: int) -> Figures:
    """Run the clients for some seconds; the figures, with the state of the server at the end."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    findings, samples = list[str](), list[float]()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.address, timeout=None, limits=limits) as http:
        said = {}
        for exit in EXITS:
            for prompt in UTTERANCES:
                body, headers = completion(prompt, exit=exit), {"content-type": JSON}
                answer = await http.post(COMPLETIONS, content=body, headers=headers)
                said[exit, prompt] = answer.raise_for_status().json()["choices"][0]["text"]
        until = time.monotonic() + seconds

        async def client(number: int) -> None:
            chance = random.Random(f"{seed} {number}")
            while time.monotonic() < until:
                ask = any_ask(chance, said)
                counts[ask.kind][await tried(http, ask, findings)] += 1

        async def watch() -> None:
            while True:
                samples.append(tree_rss_mb(server.pid))
                await asyncio.sleep(min(SAMPLE_S, seconds / 20))

        watching = asyncio.create_task(watch())
        began = time.monotonic()
        try:
            await asyncio.gather(*map(client, range(clients)))
        finally:
            watching.cancel()
        took = time.monotonic() - began
        state = await at_rest(http)
    samples.append(tree_rss_mb(server.pid))
    warm = samples[int(WARM * len(samples)) :]
    third = max(len(warm) // 3, 1)
    growth = sum(warm[-third:]) / third - sum(warm[:third]) / third
    return {
        "seconds": round(took, 1),
        "counts": {kind: dict(own) for kind, own in sorted(counts.items())},
        "findings": findings,
        "at_rest": state,
        "rss_mb_warm": round(warm[0], 1),
        "rss_mb_at_the_end": round(samples[-1], 1),
        "rss_growth_mb": round(growth, 2),
        "rss_mb": [round(sample, 1) for sample in samples],
    }


def faults(result: Figures) -> list[str]:
    """Messages of all checks that failed."""
    found = list(result["findings"])
    for name in GAUGES[:4]:
        if result["at_rest"][name]:
            found.append(f"{name}: expected 0 at rest, got {result['at_rest'][name]:g}")
    if result["minutes"] >= WARM_MINUTES and result["rss_growth_mb"] > MAX_GROWTH_MB:
        found.append(
            f"resident memory: expected at most {MAX_GROWTH_MB:g} MB more, got "
            f"{result['rss_growth_mb']:g}"
        )
    return found


def table(result: Figures) -> str:
    """Requests by kind and outcome, and the state of the server at the end."""
    counts = {kind: Counter(row) for kind, row in result["counts"].items()}
    counts["**all**"] = sum(counts.values(), Counter())
    rows = [
        {"kind": kind, "sent": sum(own.values()), **{name: own[name] for name in OUTCOMES}}
        for kind, own in counts.items()
    ]
    columns: Columns = (
        ("requests", "{kind}"),
        ("sent", "{sent:,}"),
        *((head, f"{{{name}:,}}") for name, head in OUTCOMES.items()),
    )
    rest, found = result["at_rest"], faults(result)
    rises = sum(later > earlier for earlier, later in pairwise(result["rss_mb"]))
    return (
        f"{table_of(columns, rows)}\n\n"
        f"{result['clients']} clients for {result['minutes']:g} minutes, each with its next "
        "request as soon as its last has ended, against `eecore serve` (intent, float32, "
        f"`{' '.join(result['options'])}`) on "
        f"{result['cores']} cores of {result['cpu']}. Greedy answers are compared with those of "
        f"the idle server. After the clients disconnected: {rest['requests_running']:g} running, "
        f"{rest['requests_waiting']:g} waiting, {rest['requests_held']:g} held, "
        f"{rest['kv_pages_used']:g} of {rest['kv_pages']:g} pages in use. Resident memory "
        f"{result['rss_mb_warm']:.1f} MB when warm, {result['rss_mb_at_the_end']:.1f} at the end, "
        f"{result['rss_growth_mb']:+.1f} between the first and the last third after the warm-up "
        f"(it rose between {rises} of {len(result['rss_mb']) - 1} samples). "
        f"{'Nothing else was found.' if not found else 'Found: ' + '; '.join(found) + '.'} "
        "`python -m bench soak-serve`"
    )


REPORTS = (Report("soak_serve", {"soak_serve": table}),)


def main(words: Sequence[str]) -> None:
    made = parser("soak-serve", __doc__, threads=1)
    made.add_argument("--minutes", type=float, default=30.0)
    made.add_argument("--clients", type=int, default=16)
    made.add_argument("--seed", type=int, default=0)
    arguments = made.parse_args(words)
    given = [*OPTIONS, "--dtype", "float32"]
    with serving(eecore.default_model(), arguments.threads, given) as server:
        seconds = 60 * arguments.minutes
        found = asyncio.run(soak(server, seconds, arguments.clients, arguments.seed))
    result = {
        **machine(),
        "cores": len(os.sched_getaffinity(0)),
        "minutes": arguments.minutes,
        "clients": arguments.clients,
        "seed": arguments.seed,
        "options": OPTIONS,
        **found,
    }
    REPORTS[0].finish(result, arguments)
    if wrong := faults(result):
        raise SystemExit("\n".join(wrong))
