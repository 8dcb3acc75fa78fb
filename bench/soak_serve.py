"""A server that runs for long: well-behaved clients, bad ones and broken ones, all at once.

python bench/soak_serve.py --minutes 30                 half an hour; writes the table
python bench/soak_serve.py --minutes 2 --dry-run        that it runs: writes nothing
python bench/soak_serve.py --minutes 30 -- OPTION ...   with more options of eecore serve

``eecore serve`` runs intent in a process of its own, with few seats, few pages and a short
deadline, so that requests are refused, preempted and late. Each request has to be answered, or
refused with a reason; what is greedy has to be what an idle server says. In the end nothing may
run, wait or hold a page, and memory has to stay where it was behind the warm-up. Exit code 1 if it
is otherwise. Writes bench/results/soak_serve.json and the table in bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

import eecore
import harness
from bench_serve import serving
from decode_tables import markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "soak_serve.json"
OPTIONS = ("--max-num-seqs", "12", "--max-waiting", "24", "--timeout", "2", "--max-body", "262144")
OPTIONS += ("--kv-cache-tokens", "1536", "--tool-parser", "hermes")
HANG_S = 60.0
"""After which a request counts as one that hangs."""
SAMPLE_S = 2.0
WARM = 0.2
"""The share of the time before memory has to stay where it is."""
MOST_GROWTH_MB = 8.0
"""Of resident memory, over all the rest: what allocators move by themselves."""
MOST_FINDINGS = 20

LOSSLESS = ("full", "auto", "speculative:3,6", "lookup", "lookup:4")
EXITS = (
    *LOSSLESS,
    "fixed:6",
    "fixed:12",
    "confident:0.9",
    "calibrated:softmax",
    "calibrated:state",
)
UTTERANCES = (
    "lock the front door",
    "turn on the kitchen lights",
    "set the thermostat to twenty degrees",
    "what is the temperature in the bedroom",
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
JSON = {"content-type": "application/json"}
PLAIN = {"content-type": "text/plain"}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
WRONG: tuple[tuple[str, bytes, dict[str, str], int], ...] = (
    (COMPLETIONS, b"", JSON, 400),
    (COMPLETIONS, b'{"prompt": "a"', JSON, 400),
    (COMPLETIONS, b'{"prompt": "\xff\xfe"}', JSON, 400),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', JSON, 400),
    (COMPLETIONS, b'{"prompt": "a", "metadata": ' + b"[" * 9000 + b"]" * 9000 + b"}", JSON, 400),
    (COMPLETIONS, b'{"prompt": 3, "max_tokens": "many"}', JSON, 400),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', JSON, 400),
    (COMPLETIONS, b'{"prompt": "a", "exit": "fixed:99"}', JSON, 400),
    (COMPLETIONS, b'{"prompt": "a", "guided_regex": "(a"}', JSON, 400),
    (COMPLETIONS, b'{"prompt": "' + b"door " * 2000 + b'"}', JSON, 400),
    (COMPLETIONS, b'{"prompt": "a", "model": "another"}', JSON, 404),
    (COMPLETIONS, b'{"prompt": "' + b"a" * 300_000 + b'"}', JSON, 413),
    (COMPLETIONS, b"prompt=a", PLAIN, 415),
    (CHATS, b'{"messages": []}', JSON, 400),
    (CHATS, b'{"messages": [{"role": 3}]}', JSON, 400),
    (CHATS, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', JSON, 400),
    ("/v1/embeddings", b"{}", JSON, 404),
    ("/tokenize", b"[]", JSON, 400),
)
# What a server with too much to do says.
BUSY = {429: "too_many_requests", 504: "deadline_exceeded"}


@dataclass(frozen=True)
class Ask:
    """A request.

    Args:
        kind: the row it is counted in.
        path: of the endpoint; a GET where there is no content.
        content: the body.
        headers: of it.
        status: that answers it.
        says: the text that has to come; None: whatever comes.
        leaves_after: parts of the answer after which its client leaves; None: it stays.
        patience: seconds after which its client leaves.
        pause: seconds between parts, of a client that reads slowly.
    """

    kind: str
    path: str
    content: bytes | None = None
    headers: dict[str, str] = field(default_factory=lambda: JSON)
    status: int = 200
    says: str | None = None
    leaves_after: int | None = None
    patience: float | None = None
    pause: float = 0.0


class Finding(Exception):
    """What should not have come."""


# What is asked


def completion(prompt: str, **fields: Any) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": 48, **fields}).encode()


def chat(prompt: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": prompt}]
    return json.dumps({"messages": messages, "max_tokens": 96, **fields}).encode()


class Crowd:
    """Makes requests by chance.

    Args:
        said: what an idle server answers, by exit and utterance.
    """

    def __init__(self, said: dict[tuple[str, str], str]) -> None:
        self._said = said
        self._kinds: list[tuple[int, Callable[[random.Random], Ask]]] = [
            (30, self._whole),
            (20, self._stream),
            (5, self._slow),
            (10, self._sampled),
            (8, self._leaving),
            (6, self._impatient),
            (10, self._wrong),
            (6, self._guided),
            (4, self._tools),
            (1, self._long),
            (5, self._poll),
        ]

    def __call__(self, chance: random.Random) -> Ask:
        weights = [weight for weight, _ in self._kinds]
        (make,) = chance.choices([make for _, make in self._kinds], weights)
        return make(chance)

    def _whole(self, chance: random.Random) -> Ask:
        prompt, exit = chance.choice(UTTERANCES), chance.choice(EXITS)
        body = completion(prompt, exit=exit)
        return Ask("whole answers", COMPLETIONS, body, says=self._said[exit, prompt])

    def _stream(self, chance: random.Random, pause: float = 0.0) -> Ask:
        prompt, exit = chance.choice(UTTERANCES), chance.choice(EXITS)
        body = completion(prompt, exit=exit, stream=True, return_exit_layers=True)
        kind = "streams that are read slowly" if pause else "streams"
        return Ask(kind, COMPLETIONS, body, says=self._said[exit, prompt], pause=pause)

    def _slow(self, chance: random.Random) -> Ask:
        return self._stream(chance, 0.02)

    def _sampled(self, chance: random.Random) -> Ask:
        fields = {"temperature": 1.0, "top_p": 0.9, "seed": chance.randrange(1 << 40)}
        fields |= {"n": chance.randint(1, 4), "stream": chance.random() < 0.5}
        body = chat(chance.choice(UTTERANCES), exit=chance.choice(LOSSLESS), **fields)
        return Ask("sampled, several choices", CHATS, body)

    def _leaving(self, chance: random.Random) -> Ask:
        fields = {"stream": True, "ignore_eos": True, "max_tokens": 200, "n": chance.randint(1, 3)}
        body = completion(chance.choice(UTTERANCES), exit=chance.choice(EXITS), **fields)
        parts = chance.randint(1, 12)
        return Ask("left in the middle", COMPLETIONS, body, leaves_after=parts)

    def _impatient(self, chance: random.Random) -> Ask:
        fields = {"ignore_eos": True, "max_tokens": 200, "stream": chance.random() < 0.5}
        body = completion(chance.choice(UTTERANCES), exit=chance.choice(EXITS), **fields)
        return Ask("tiny deadlines", COMPLETIONS, body, patience=chance.uniform(0.001, 0.1))

    def _wrong(self, chance: random.Random) -> Ask:
        path, content, headers, status = chance.choice(WRONG)
        return Ask("wrong bodies", path, content, headers, status)

    def _guided(self, chance: random.Random) -> Ask:
        fields = {**chance.choice(GUIDES), "stream": chance.random() < 0.3}
        body = completion(chance.choice(UTTERANCES), exit=chance.choice(LOSSLESS), **fields)
        return Ask("guides", COMPLETIONS, body)

    def _tools(self, chance: random.Random) -> Ask:
        fields = {"tools": [TOOL], "tool_choice": "required", "stream": chance.random() < 0.5}
        return Ask("calls of tools", CHATS, chat(chance.choice(UTTERANCES), **fields))

    def _long(self, chance: random.Random) -> Ask:
        fields = {"n": 12, "max_tokens": 230, "ignore_eos": True, "exit": "full"}
        body = completion(chance.choice(UTTERANCES), temperature=1.0, **fields)
        return Ask("too long for the deadline, or nearly", COMPLETIONS, body)

    def _poll(self, chance: random.Random) -> Ask:
        return Ask("health and metrics", chance.choice(("/health", "/metrics", "/v1/models")))


# What comes


def outcome(ask: Ask, status: int, body: bytes) -> str:
    """How a request that was answered ended: answered, refused, busy or late.

    Raises:
        Finding: it should have ended otherwise.
    """
    if status != ask.status or status >= 400:
        error = _reason(body)
        if status == ask.status:
            return "refused"
        if error["code"] == BUSY.get(status, ""):
            return "late" if status == 504 else "busy"
        raise Finding(f"expected {ask.status}, got {status}: {error}")
    if ask.content is None:
        return "answered"
    if not body.startswith(b"data: "):
        choices = _parsed(body)["choices"]
        text = choices[0].get("text")
        ends = [choice["finish_reason"] for choice in choices]
    else:
        events = _events(body)
        if "error" in events[-1]:
            if events[-1]["error"]["code"] == BUSY[504]:
                return "late"
            raise Finding(f"a stream ended with {events[-1]}")
        choices = [choice for event in events for choice in event["choices"]]
        text = "".join(choice.get("text") or "" for choice in choices)
        ended = {each["index"]: each["finish_reason"] for each in choices}  # the last of each
        ends = list(ended.values())
    if not all(end in ("stop", "length", "tool_calls") for end in ends):
        raise Finding(f"expected an end of each choice, got {ends}")
    if ask.says is not None and text != ask.says:
        raise Finding(f"expected {ask.says!r}, got {text!r}")
    return "answered"


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        raise Finding(f"expected JSON, got {body[:200]!r}") from None


def _reason(body: bytes) -> dict[str, Any]:
    error = _parsed(body).get("error")
    if not isinstance(error, dict) or not error.get("message") or "code" not in error:
        raise Finding(f"expected a reason, got {body[:200]!r}")
    return error


def _events(body: bytes) -> list[Any]:
    *events, last, rest = body.split(b"\n\n")
    if last != b"data: [DONE]" or rest or not events:
        raise Finding(f"expected a stream with an end, got {body[-200:]!r}")
    return [_parsed(event.removeprefix(b"data: ")) for event in events]


@dataclass
class Book:
    """What came of all requests.

    Attributes:
        counts: by kind and outcome.
        findings: the first of what should not have come, in words.
    """

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    findings: list[str] = field(default_factory=list)

    def note(self, kind: str, outcome: str) -> None:
        self.counts[kind][outcome] += 1

    def find(self, kind: str, words: str) -> None:
        self.counts[kind]["unexpected"] += 1
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(f"{kind}: {words}")


async def answered(http: httpx.AsyncClient, ask: Ask) -> str:
    """How a request ended whose client has all the time there is."""
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
    """Ask, and note what came."""
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
    """Resident memory of a process and all below it, in 2**20 bytes."""
    parents: dict[int, int] = {}
    pages: dict[int, int] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            stat = (directory / "stat").read_text().rpartition(")")[2].split()
            pages[int(directory.name)] = int((directory / "statm").read_text().split()[1])
            parents[int(directory.name)] = int(stat[1])
        except (OSError, ValueError, IndexError):  # it has ended
            continue
    found, size = {pid}, 0
    while len(found) != size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return sum(pages.get(each, 0) for each in found) * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth_mb(samples: Sequence[float]) -> float:
    """How far memory rose behind the warm-up: between the means of the first and the last third."""
    warm = list(samples[int(WARM * len(samples)) :])
    third = max(len(warm) // 3, 1)
    return sum(warm[-third:]) / third - sum(warm[:third]) / third


GAUGES = ("requests_running", "requests_waiting", "requests_held", "kv_pages_used", "kv_pages")
GAUGES += ("kv_pages_cached",)


def state_of(metrics: str) -> dict[str, float]:
    """What the engine does just now, by the text of /metrics."""
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[:1] not in ("", "#"))
    return {name: float(values[f"eecore_{name}"]) for name in GAUGES}


async def at_rest(http: httpx.AsyncClient) -> dict[str, float]:
    """The state of a server when all clients have gone: soon nothing is to be left of them."""
    until = time.monotonic() + HANG_S
    while True:
        state = state_of((await http.get("/metrics")).text)
        if not any(state[name] for name in GAUGES[:4]) or time.monotonic() > until:
            return state
        await asyncio.sleep(0.1)


async def references(http: httpx.AsyncClient) -> dict[tuple[str, str], str]:
    """What an idle server says."""
    said = {}
    for exit in EXITS:
        for prompt in UTTERANCES:
            body = completion(prompt, exit=exit)
            answer = await http.post(COMPLETIONS, content=body, headers=JSON)
            said[exit, prompt] = answer.raise_for_status().json()["choices"][0]["text"]
    return said


async def soak(address: str, pid: int, seconds: float, clients: int, seed: int) -> dict[str, Any]:
    """So many clients for so long, and how the server is when they have gone."""
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


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    options = [*OPTIONS, *arguments.options]
    with serving(eecore.default_model(), "float32", arguments.threads, options) as server:
        assert server.pid is not None
        seconds = 60 * arguments.minutes
        found = asyncio.run(
            soak(server.address, server.pid, seconds, arguments.clients, arguments.seed)
        )
    return {
        "cpu": harness.cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "minutes": arguments.minutes,
        "clients": arguments.clients,
        "seed": arguments.seed,
        "options": options,
        **found,
    }


def faults(result: dict[str, Any]) -> list[str]:
    """What should be otherwise, in words."""
    found = list(result["findings"])
    for name in GAUGES[:4]:
        if result["at_rest"][name]:
            found.append(f"{name}: expected 0 at rest, got {result['at_rest'][name]:g}")
    if result["rss_growth_mb"] > MOST_GROWTH_MB:
        found.append(
            f"resident memory: expected at most {MOST_GROWTH_MB:g} MB more, got "
            f"{result['rss_growth_mb']:g}"
        )
    return found


# The table

OUTCOMES = {
    "answered": "answered",
    "refused": "refused, as it has to be",
    "busy": "429: no seat",
    "late": "504: too late",
    "left": "left by the client",
    "unexpected": "anything else",
}


def table(result: dict[str, Any]) -> str:
    """From the JSON alone."""
    counts = {kind: Counter(row) for kind, row in result["counts"].items()}
    counts["**all**"] = sum(counts.values(), Counter())
    lines = [
        [kind, f"{sum(row.values()):,}", *(f"{row[name]:,}" for name in OUTCOMES)]
        for kind, row in counts.items()
    ]
    head = ["requests", "sent", *OUTCOMES.values()]
    return f"{markdown(head, lines, text_columns=1)}\n\n{about(result)}"


def about(result: dict[str, Any]) -> str:
    """What was done, and how the server was at the end."""
    rest, found = result["at_rest"], faults(result)
    rises = sum(later > earlier for earlier, later in pairwise(result["rss_mb"]))
    return (
        f"{result['clients']} clients for {result['minutes']:g} minutes, each its next request as "
        "soon as the one before has ended, against `eecore serve` (intent, float32, "
        f"`{' '.join(result['options'])}`) on "
        f"{result['cores']} cores of {result['cpu']}. Greedy answers are compared with those of "
        f"the idle server. When the clients had gone: {rest['requests_running']:g} running, "
        f"{rest['requests_waiting']:g} waiting, {rest['requests_held']:g} held, "
        f"{rest['kv_pages_used']:g} of {rest['kv_pages']:g} pages in use. Resident memory "
        f"{result['rss_mb_warm']:.1f} MB when warm, {result['rss_mb_at_the_end']:.1f} at the end, "
        f"{result['rss_growth_mb']:+.1f} between the first and the last third behind the warm-up "
        f"(it rose between {rises} of {len(result['rss_mb']) - 1} samples). "
        f"{'Nothing else was found.' if not found else 'Found: ' + '; '.join(found) + '.'} "
        "`python bench/soak_serve.py`"
    )


# The command


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--minutes", type=float, default=30.0)
    made.add_argument("--clients", type=int, default=16)
    made.add_argument("--threads", type=int, default=1, help="of the server")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--dry-run", action="store_true", help="print the table, write nothing")
    made.add_argument("--tables", action="store_true", help="write that of the JSON file again")
    made.add_argument("options", nargs="*", help="of eecore serve, behind --")
    return made


def main() -> None:
    arguments = parser().parse_args()
    result = json.loads(RESULTS.read_text()) if arguments.tables else run(arguments)
    print(table(result))
    if not arguments.dry_run:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        harness.insert(ROOT / "bench" / "RESULTS.md", "soak_serve", table(result))
    if found := faults(result):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
