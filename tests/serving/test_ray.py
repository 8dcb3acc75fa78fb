"""The server on Ray Serve: two replicas, one of which is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from eecore.errors import EngineClosedError, RequestError
from servers import Asker, events

ray = pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
serve = pytest.importorskip("ray.serve", reason="ray has no serve: pip install '.[ray]'")

from eecore.serving import ray as on_ray  # noqa: E402
from eecore.serving.ray import Arguments, Engine, app, autoscale  # noqa: E402
from eecore.serving.server import listen  # noqa: E402

NAME = f"eecore-test-{os.getpid()}"
LOCK = {"messages": [{"role": "user", "content": "lock the front door"}], "exit": "full"}
LONG = {"prompt": "turn on the lights in the kitchen", "max_tokens": 200, "ignore_eos": True}
WITHIN_S = 120.0


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with listen("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        configure_logging=False,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        built = app({"num_replicas": "2", "kv_cache_tokens": "4096", "exit": "full"})
        serve.run(built, name=NAME, route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def replicas() -> list[int]:
    """The processes of engines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes()
        except OSError:  # it has ended
            continue
        if title.startswith(f"ray::ServeReplica:{NAME}:engine".encode()):
            found.append(int(path.parent.name))
    return found


def run(asks: Any) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(asks(), WITHIN_S)

    return asyncio.run(main())


def test_replicas_answer_as_one_server_does(address: str, server: Asker) -> None:
    expected = server.post("/v1/chat/completions", LOCK).json()["choices"]
    answer = httpx.post(f"{address}/v1/chat/completions", json=LOCK)
    assert answer.json()["choices"] == expected
    streamed = httpx.post(f"{address}/v1/chat/completions", json={**LOCK, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    choices = [chunk["choices"][0] for chunk in events(streamed.text)]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert text == expected[0]["message"]["content"]
    assert choices[-1]["finish_reason"] == "stop"


def test_refusals_come_through(address: str) -> None:
    assert httpx.post(f"{address}/v1/completions", json={"prompt": 3}).status_code == 400
    text = {"content": b"{}", "headers": {"content-type": "text/plain"}}
    assert httpx.post(f"{address}/v1/completions", **text).status_code == 415
    assert httpx.get(f"{address}/nothing").status_code == 404
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}


def test_streams_come_piece_by_piece(address: str) -> None:
    with httpx.stream("POST", f"{address}/v1/completions", json={**LONG, "stream": True}) as answer:
        parts = list(answer.iter_raw())
    assert len(parts) > 10


def test_requests_that_begin_alike_go_to_the_replica_that_has_the_beginning(address: str) -> None:
    cached = []
    for number in range(6):
        prompt = "turn on all the lights in the kitchen and the hall and lock the doors, please, "
        body = {"prompt": f"{prompt * 2}{number}", "max_tokens": 2}
        usage = httpx.post(f"{address}/v1/completions", json=body).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert min(cached[1:]) > 0


def test_a_client_that_leaves_ends_its_request(address: str) -> None:
    body = {**LONG, "stream": True, "n": 32}
    with httpx.stream("POST", f"{address}/v1/completions", json=body) as answer:
        next(answer.iter_raw())
    until = time.monotonic() + WITHIN_S
    while time.monotonic() < until:
        texts = [httpx.get(f"{address}/metrics").text for _ in range(8)]
        if all("eecore_requests_running 0.0" in text for text in texts):
            return
        time.sleep(0.1)
    pytest.fail("the request goes on")


def test_when_a_replica_is_killed_the_other_answers(address: str) -> None:
    """Requests that had not begun are answered, running ones end with an error, none hangs."""
    before = replicas()
    assert len(before) == 2

    async def asks() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=WITHIN_S, limits=limits) as client:
            bodies = [{**LONG, "seed": i, "stream": i % 2 == 1} for i in range(48)]
            posts = [client.post(f"{address}/v1/completions", json=body) for body in bodies]
            tasks = [asyncio.create_task(post) for post in posts]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            os.kill(before[0], signal.SIGKILL)
            return await asyncio.gather(*tasks)

    answers = run(asks)
    assert {answer.status_code for answer in answers} == {200}
    for answer in answers[::2]:
        assert answer.json()["usage"]["completion_tokens"] == LONG["max_tokens"]
    ends = [events(answer.text)[-1] for answer in answers[1::2]]
    for end in ends:
        if "error" in end:
            assert end["error"]["code"] == "replica_lost"
        else:
            assert end["choices"][0]["finish_reason"] == "length"
    until = time.monotonic() + WITHIN_S
    while len(replicas()) < 2 and time.monotonic() < until:  # another one takes its place
        time.sleep(0.2)
    after = replicas()
    assert len(after) == 2
    assert before[0] not in after


def test_arguments_come_as_text_too() -> None:
    arguments = Arguments.of({"num_replicas": "3", "prefix_cache": "false", "timeout": "1.5"})
    assert (arguments.num_replicas, arguments.prefix_cache, arguments.timeout) == (3, False, 1.5)
    with pytest.raises(RequestError, match=r"num_replicas: .*got 'many'"):
        Arguments.of({"num_replicas": "many"})
    with pytest.raises(RequestError, match=r"replicas: .*got 2"):
        Arguments.of({"replicas": 2})


def test_the_autoscaler_hears_what_runs_and_how_full_caches_are() -> None:
    def wanted(requests: dict[str, float], shares: dict[str, float], queued: float = 0.0) -> float:
        context: Any = SimpleNamespace(
            aggregated_metrics={"requests": requests, "kv_share": shares},
            target_num_replicas=2,
            total_queued_requests=queued,
            config=SimpleNamespace(get_target_ongoing_requests=lambda: 4.0),
        )
        return autoscale(context)[0]

    assert wanted({}, {}) == 2
    assert wanted({"a": 4.0, "b": 8.0}, {"a": 0.1, "b": 0.1}) == 3
    assert wanted({"a": 4.0, "b": 8.0}, {"a": 0.1, "b": 0.1}, queued=4.0) == 4
    assert wanted({"a": 1.0, "b": 1.0}, {"a": 0.9, "b": 0.9}) == 2


def test_a_replica_is_ill_when_its_requests_get_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Engine(Arguments(kv_cache_tokens=1024), [])
    engine = replica._service.served.engine.engine
    asyncio.run(replica.check_health())  # nothing to do
    engine.add_request([5, 6, 7])  # no thread steps for it
    asyncio.run(replica.check_health())
    asyncio.run(replica.check_health())  # not for long
    assert replica.record_autoscaling_stats()["requests"] == 1
    monkeypatch.setattr(on_ray, "STUCK_SECONDS", 0.0)
    with pytest.raises(EngineClosedError, match="expected progress within 0 s, got none for 1"):
        asyncio.run(replica.check_health())
    engine.step()
    asyncio.run(replica.check_health())
    assert replica.record_autoscaling_stats()["kv_share"] > 0
