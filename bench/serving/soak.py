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
import json
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

import eecore
from bench.harness.command import parser
from bench.harness.machine import machine
from bench.harness.results import Figures, Report
from bench.harness.rows import Columns, table_of
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
LATE = "deadline_exceeded"
LOSSLESS = ("full", "auto", "speculative:3,6", "lookup", "lookup:4")
EXITS = (*LOSSLESS, "fixed:6", "confident:0.9", "calibrated:softmax", "calibrated:state")
UTTERANCES = (
    "lock the front door",
    "turn on the kitchen lights",
    "set the thermostat to twenty degrees",
    "open the garage door and close the blinds in the living room",
)
SCHEMA = {
    "type": "object",
    "properties": {"room": {"enum": ["kitchen", "hall"]}, "on": {"type": "boolean"}},
    "required": ["room", "on"],
    "additionalProperties": False,
}
GUIDES: tuple[dict[str, Any], ...] = (
    {"guided_json": SCHEMA},
    {"guided_choice": ["on", "off", "neither of them"]},
    {"guided_regex": "[a-c]{3,9}"},
    {"guided_grammar": 'start: "a" | "b" start'},
)
TOOL = {"type": "function", "function": {"name": "switch", "parameters": SCHEMA}}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
# Path, body, and the status of the refusal.
WRONG: tuple[tuple[str, bytes, int], ...] = (
    (COMPLETIONS, b"", 400),
    (COMPLETIONS, b'{"prompt": "\xff\xfe"}', 400),
    (COMPLETIONS, b'{"prompt": "a", "metadata": ' + b"[" * 9000 + b"]" * 9000 + b"}", 400),
    (COMPLETIONS, b'{"prompt": 3, "max_tokens": "many"}', 400),
    (COMPLETIONS, b'{"prompt": "a", "exit": "fixed:99"}', 400),
    (COMPLETIONS, b'{"prompt": "a", "guided_regex": "(a"}', 400),
    (COMPLETIONS, b'{"prompt": "' + b"door " * 2000 + b'"}', 400),
    (COMPLETIONS, b'{"prompt": "a", "model": "another"}', 404),
    (COMPLETIONS, b'{"prompt": "' + b"a" * 300_000 + b'"}', 413),
    (CHATS, b'{"messages": [{"role": 3}]}', 400),
    ("/v1/embeddings", b"{}", 404),
)
# The kinds of requests, which the table counts, and how often each is sent.
KINDS = {
    "whole answers": 30,
    "streams": 20,
    "streams that are read slowly": 5,
    "sampled, several choices": 10,
    "left in the middle": 8,
    "tiny deadlines": 6,
    "wrong bodies": 10,
    "guides": 6,
    "calls of tools": 4,
    "too long for the deadline, or nearly": 1,
    "health and metrics": 5,
}
Said = dict[tuple[str, str], str]
"""The answers of an idle server, by exit and utterance."""


class Ask(NamedTuple):
    """A request, and what its client expects and does."""

    kind: str
    path: str
    content: bytes | None
    """The body; None for a GET."""
    status: int = 200
    says: str | None = None
    """The expected text; None accepts any text."""
    leaves_after: int | None = None
    """Parts of the answer after which the client disconnects; None: never."""
    patience: float | None = None
    """Seconds after which the client disconnects."""
    pause: float = 0.0
    """Seconds between parts, for a client that reads slowly."""


class Finding(Exception):
    """An answer that breaks the server's contract."""


def any_ask(chance: random.Random, said: Said) -> Ask:
    """A random request."""
    (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
    prompt, exit, lossless = map(chance.choice, (UTTERANCES, EXITS, LOSSLESS))
    streams = chance.random() < 0.5

    def completion(**fields: Any) -> tuple[str, str, bytes]:
        body = {"prompt": prompt, "max_tokens": 48, "stream": streams, **fields}
        return kind, COMPLETIONS, json.dumps(body).encode()

    def chat(**fields: Any) -> tuple[str, str, bytes]:
        messages = [{"role": "user", "content": prompt}]
        body = {"messages": messages, "max_tokens": 96, "stream": streams, **fields}
        return kind, CHATS, json.dumps(body).encode()

    endless = {"ignore_eos": True, "max_tokens": 200}
    if kind == "sampled, several choices":
        some = {"temperature": 1.0, "top_p": 0.9, "seed": chance.randrange(1 << 40)}
        return Ask(*chat(n=chance.randint(1, 4), exit=lossless, **some))
    if kind == "left in the middle":
        given = {"exit": exit, "n": chance.randint(1, 3), **endless, "stream": True}
        return Ask(*completion(**given), leaves_after=chance.randint(1, 12))
    if kind == "tiny deadlines":
        return Ask(*completion(exit=exit, **endless), patience=chance.uniform(0.001, 0.1))
    if kind == "wrong bodies":
        return Ask(kind, *chance.choice(WRONG))
    if kind == "guides":
        return Ask(*completion(exit=lossless, **chance.choice(GUIDES)))
    if kind == "calls of tools":
        return Ask(*chat(tools=[TOOL], tool_choice="required"))
    if kind == "health and metrics":
        return Ask(kind, chance.choice(("/health", "/metrics", "/v1/models")), None)
    if kind.startswith("too long"):
        many = {"n": 12, "max_tokens": 230, "ignore_eos": True, "temperature": 1.0}
        return Ask(*completion(exit="full", stream=False, **many))
    pause = 0.02 if kind == "streams that are read slowly" else 0.0
    given = {"stream": kind != "whole answers", "return_exit_layers": True, "exit": exit}
    return Ask(*completion(**given), says=said[exit, prompt], pause=pause)


def outcome(ask: Ask, status: int, body: bytes) -> str:
    """The outcome of an answer: answered, refused, busy or late.

    Raises:
        Finding: the answer is not the expected one.
    """
    if ask.content is None and status == 200:
        return "answered"
    events = body.removesuffix(b"\n\ndata: [DONE]\n\n").split(b"\n\n")
    has_end = not body.startswith(b"data: ") or body.endswith(b"data: [DONE]\n\n")
    try:
        found = [json.loads(event.removeprefix(b"data: ")) for event in events]
    except ValueError:
        found, has_end = [{}], False
    error = found[-1].get("error")
    if error is not None and error.get("message"):
        if status == ask.status and status >= 400:
            return "refused"
        if status == 429 and error["code"] == "too_many_requests":
            return "busy"
        if status in (200, 504) and error["code"] == LATE:
            return "late"
    if status != ask.status or status >= 400 or error is not None or not has_end:
        raise Finding(f"expected {ask.status}, got {status}: {body[-200:]!r}")
    choices = [choice for event in found for choice in event["choices"]]
    ends = {each["index"]: each["finish_reason"] for each in choices}  # the last one counts
    if not set(ends.values()) <= {"stop", "length", "tool_calls"}:
        raise Finding(f"expected an end of each choice, got {ends}")
    text = "".join(choice.get("text") or "" for choice in choices)
    if ask.says is not None and text != ask.says:
        raise Finding(f"expected {ask.says!r}, got {text!r}")
    return "answered"


async def answered(http: httpx.AsyncClient, ask: Ask) -> str:
    """The outcome of a request whose client waits for the end of its answer."""
    method, headers = "GET" if ask.content is None else "POST", {"content-type": "application/json"}
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
    except (Finding, httpx.HTTPError) as error:
        words = repr(error)
    if len(findings) < MAX_FINDINGS:
        findings.append(f"{ask.kind}: {words}")
    return "unexpected"


def tree_rss_mb(pid: int) -> float:
    """Resident memory of a process and its descendants, in 2**20 bytes."""
    with suppress(OSError):  # the process has ended
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task").glob("*/children")
        found = [int(child) for each in children for child in each.read_text().split()]
        return own * os.sysconf("SC_PAGE_SIZE") / 2**20 + sum(map(tree_rss_mb, found))
    return 0.0


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
    findings, samples, said = list[str](), list[float](), Said()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.address, timeout=None, limits=limits) as http:
        for exit in EXITS:
            for prompt in UTTERANCES:
                body = {"prompt": prompt, "exit": exit, "max_tokens": 48}
                answer = (await http.post(COMPLETIONS, json=body)).raise_for_status()
                said[exit, prompt] = answer.json()["choices"][0]["text"]
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
        try:
            await asyncio.gather(*map(client, range(clients)))
        finally:
            watching.cancel()
        state = await at_rest(http)
    samples.append(tree_rss_mb(server.pid))
    warm = samples[int(WARM * len(samples)) :]
    third = max(len(warm) // 3, 1)
    return {
        "counts": {kind: dict(own) for kind, own in sorted(counts.items())},
        "findings": findings,
        "at_rest": state,
        "rss_mb_warm": round(warm[0], 1),
        "rss_mb_at_the_end": round(samples[-1], 1),
        "rss_growth_mb": round((sum(warm[-third:]) - sum(warm[:third])) / third, 2),
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
        f"{result['rss_growth_mb']:+.1f} between the first and the last third after the warm-up. "
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
