"""The soak of the server: its clients, its faults, its table."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

import eecore
from bench.serving import crowd, soak, tables
from bench.serving.crowd import CHATS, Ask, Crowd
from bench.serving.outcomes import Book, Finding, outcome
from servers import asker, assert_idle, listening

ROOT = Path(__file__).resolve().parents[1]
SAID = {(exit, prompt): "x" for exit in crowd.EXITS for prompt in crowd.UTTERANCES}
WHOLE = Ask("whole", crowd.COMPLETIONS, b"{}", says="ab")
REST = dict.fromkeys(tables.GAUGES, 0.0) | {"kv_pages": 96.0}


def refusal(code: str | None) -> bytes:
    error = {"message": "no", "type": "t", "param": None, "code": code}
    return json.dumps({"error": error}).encode()


def answer(text: str, end: str | None = "stop") -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": end}]}).encode()


def stream(*bodies: bytes) -> bytes:
    return b"".join(b"data: " + body + b"\n\n" for body in (*bodies, b"[DONE]"))


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, answer("ab"), "answered"),
        (200, stream(answer("a", None), answer("b")), "answered"),
        (429, refusal("too_many_requests"), "busy"),
        (504, refusal("deadline_exceeded"), "late"),
        (200, stream(answer("a", None), refusal("deadline_exceeded")), "late"),
    ],
)
def test_what_may_come(status: int, body: bytes, expected: str) -> None:
    assert outcome(WHOLE, status, body) == expected


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, answer("ac"), "expected 'ab', got 'ac'"),
        (200, answer("ab", None), "an end of each choice"),
        (200, b"<html>", "expected JSON"),
        (200, stream(answer("ab"))[:-4], "a stream with an end"),
        (200, stream(answer("a", None), refusal("internal_error")), "internal_error"),
        (500, refusal("internal_error"), "expected 200, got 500"),
        (400, refusal(None), "expected 200, got 400"),
        (429, refusal(None), "expected 200, got 429"),
        (503, b'{"error": {}}', "expected a reason"),
    ],
)
def test_what_may_not(status: int, body: bytes, words: str) -> None:
    with pytest.raises(Finding, match=words):
        outcome(WHOLE, status, body)


def test_what_is_wrong_has_to_be_refused() -> None:
    wrong = Ask("wrong", crowd.COMPLETIONS, b"", status=400)
    assert outcome(wrong, 400, refusal(None)) == "refused"
    with pytest.raises(Finding, match="expected a reason"):
        outcome(wrong, 400, b"{}")
    with pytest.raises(Finding, match="expected 400, got 500"):
        outcome(wrong, 500, refusal("internal_error"))


def test_the_crowd_asks_everything() -> None:
    crowd, chance = Crowd(SAID), random.Random(0)
    asked = [crowd(chance) for _ in range(1000)]
    assert len({ask.kind for ask in asked}) == 11
    assert {ask.path for ask in asked} > {"/health", "/metrics", CHATS}
    assert any(ask.leaves_after for ask in asked)
    assert any(ask.patience for ask in asked)


def test_wrong_bodies_are_refused_as_is_written() -> None:
    model = eecore.load(dtype="float32", kv_cache_tokens=1536)
    server = asker(model, max_body=262144, tool_parser="hermes")
    for path, content, headers, status in crowd.WRONG:
        found = server.post(path, content=content, headers=headers)
        assert outcome(Ask("wrong", path, content, status=status), found.status_code, found.content)
    assert_idle(server.service)


def test_clients_that_wait_in_vain_are_findings() -> None:
    async def answers(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        writer.close()

    async def main() -> Book:
        book = Book()
        async with await asyncio.start_server(answers, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                await soak.try_it(http, WHOLE, book)
                hurried = Ask("hurried", "/", b"", patience=0.001)
                await soak.try_it(http, hurried, book)
        return book

    book = asyncio.run(main())
    assert book.counts["whole"] == Counter(unexpected=1)
    assert "no answer" in book.findings[0]
    assert book.counts["hurried"] == Counter(left=1)


def test_faults_are_named() -> None:
    good: dict[str, Any] = {"findings": [], "at_rest": REST, "rss_growth_mb": 1.0}
    assert tables.faults(good) == []
    for name in tables.GAUGES[:4]:
        (fault,) = tables.faults({**good, "at_rest": {**REST, name: 2.0}})
        assert fault == f"{name}: expected 0 at rest, got 2"
    (fault,) = tables.faults({**good, "rss_growth_mb": 100.0})
    assert "expected at most 8 MB more" in fault
    assert tables.faults({**good, "findings": ["it"]}) == ["it"]


def test_growth_is_measured_after_the_warm_up() -> None:
    assert soak.growth_mb([0.0, 50.0] + [100.0] * 8) == 0
    assert soak.growth_mb([float(i) for i in range(10)]) == pytest.approx(6.0)


def test_memory_of_a_tree_has_that_of_the_children() -> None:
    program = "data = bytearray(64 << 20); print('there', flush=True); input()"
    before = soak.tree_rss_mb(os.getpid())
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert soak.tree_rss_mb(os.getpid()) > before + 60
        child.kill()


def test_a_few_seconds_of_it() -> None:
    model = eecore.load(dtype="float32", kv_cache_tokens=1536)
    settings: dict[str, Any] = {"max_num_seqs": 12, "max_waiting": 24, "timeout": 2.0}
    settings |= {"max_body": 262144, "tool_parser": "hermes"}
    with listening(asker(model, **settings).service) as address:
        found = asyncio.run(soak.soak(address, os.getpid(), 3.0, 4, 0))
    assert found["findings"] == []
    assert found["at_rest"] == {**REST, "kv_pages_cached": found["at_rest"]["kv_pages_cached"]}
    assert sum(map(sum, (row.values() for row in found["counts"].values()))) > 10
    result = {**found, "cpu": "it", "cores": 2, "minutes": 0.05, "clients": 4, "options": ["-x"]}
    shown = tables.soak_table({**result, "rss_growth_mb": 0.0})
    assert "Nothing else was found." in shown
    for kind, row in found["counts"].items():
        assert f"| {kind} | {sum(row.values()):,} |" in shown
