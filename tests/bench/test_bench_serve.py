"""The benchmark of the server: its clients, its counting. No timing is judged."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

import eecore
from bench.serving import serve as bench_serve
from bench.serving.answerers import Case, EngineAlone, Server, Turns, percentile
from bench.serving.load import Answer, Connection, Load, cpu_seconds, of_server
from bench.serving.tables import ENGINE, SERVER
from servers import asker, listening

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ["lock the front door", "turn on the kitchen lights", "what time is it"] * 2


@pytest.fixture(scope="module")
def intent() -> eecore.Model:
    return eecore.load(dtype="float32", kv_cache_tokens=4096)


def test_the_engine_and_the_server_say_as_much(intent: eecore.Model) -> None:
    with listening(asker(intent).service) as address:
        answerers = {
            ENGINE: EngineAlone(intent, eecore.default_model()),
            SERVER: Server(address, os.getpid(), says_exit=True),
            "peer": Server(address, None, says_exit=False),
        }
        cases = [
            Case("intent", "full", 4, PROMPTS, 64, ignore_eos=False),
            Case("intent", "speculative:3,6", 2, PROMPTS, 8, ignore_eos=True),
        ]
        rows = bench_serve.measure(cases, answerers, 2)
    full, speculative = rows[:6], rows[6:]
    assert [row["who"] for row in full] == [ENGINE, SERVER, "peer"] * 2
    assert [row["who"] for row in speculative] == [ENGINE, SERVER] * 2  # peers know no exits
    outputs = eecore.generate(intent, PROMPTS, max_tokens=64)
    assert {row["tokens"] for row in full} == {2 * sum(len(o.token_ids) for o in outputs)}
    assert {row["tokens"] for row in speculative} == {2 * 8 * len(PROMPTS)}
    for row in rows:
        assert row["requests"] == 2 * len(PROMPTS)
        assert row["tokens_per_s"] > 0
        assert (row["first_ms"] is None) == (row["gap_ms"] is None) == (not row["streams"])
        assert (row["cpu_us_per_token"] is None) == (row["who"] == "peer")
        if row["who"] == ENGINE:
            assert row["of_engine"] == 1


def test_a_server_that_refuses_ends_the_run(intent: eecore.Model) -> None:
    async def ask(address: str, **body: Any) -> Answer:
        connection = Connection(address)
        try:
            return await of_server(connection)(json.dumps(body).encode())
        finally:
            connection.close()

    refused = pytest.raises(ConnectionError, match=r"expected 200, got 400: .*expected full")
    with listening(asker(intent).service) as address, refused:
        asyncio.run(ask(address, prompt="a", exit="deep"))
    refused = pytest.raises(ConnectionError, match="expected 200, got 504")
    with listening(asker(intent, timeout=1e-9).service) as address, refused:
        asyncio.run(ask(address, prompt="a"))
    with pytest.raises(ValueError, match="expected http://HOST:PORT"):
        Connection("https://somewhere")


def test_other_servers_write_events_otherwise() -> None:
    """Other line ends, comments, events cut in two, no usage, no space after the colon."""
    parts = [
        b'data: {"choices": [{"text": "a"}]}\r\n\r\n: ping\r\n\r',
        b'\ndata:{"choices": [{"te',
        b'xt": "b"}]}\r\n\r\ndata: {"choices": [{"text": ""}], "usage": null}\r\n\r\n',
        b"data: [DONE]\r\n\r\n",
    ]

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in [*parts, b""]:
            writer.write(b"%x;x=1\r\n%s\r\n" % (len(part), part))
            await writer.drain()
        writer.close()

    async def main() -> Answer:
        async with await asyncio.start_server(answers, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await of_server(Connection(f"http://127.0.0.1:{port}"))(b"{}")

    answer = asyncio.run(main())
    assert answer.tokens == len(answer.arrivals) == 2


def test_what_is_counted() -> None:
    answers = [Answer(1.0, [1.5, 2.0, 4.0], 3), Answer(2.0, [2.25], 2)]
    load = Load(2.5, answers)
    assert load.tokens == 5
    assert load.firsts == [0.5, 0.25]
    assert load.gaps == [0.5, 2.0]
    turns, engine = Turns(SERVER, True, [load], [0.001]), Turns(ENGINE, True, [Load(1.0, answers)])
    row = turns.row(Case("m", "full", 2, ["a", "b"], 3, ignore_eos=False), engine)
    assert row["tokens_per_s"] == 2.0
    assert row["of_engine"] == pytest.approx(0.4)
    assert row["cpu_us_per_token"] == pytest.approx(200.0)
    assert row["first_ms"] == [250.0, 500.0]
    assert row["gap_ms"] == [500.0, 2000.0]
    assert (percentile([3, 1, 2], 50), percentile([1], 99)) == (2, 1)
    assert percentile(range(1, 201), 99) == 198


def test_processor_time_of_a_process() -> None:
    assert (cpu_seconds(os.getpid()) or 0.0) > 0.0
    assert cpu_seconds(2**22 + 1) is None


def test_peers_are_named() -> None:
    named = bench_serve.peer("llama.cpp=http://127.0.0.1:8080/v1")
    assert named == ("llama.cpp", "http://127.0.0.1:8080")
    for text in ("http://127.0.0.1:8080", "llama.cpp", "a=ftp://b"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected NAME=http"):
            bench_serve.peer(text)
