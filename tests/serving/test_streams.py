"""Streams, event by event, however many events are sent together."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from typing import Any

import anyio
import pytest

import eecore
from servers import Asker, asker, events, script

PIECES = ['say "', "a\n\\\r\n\n", "", "ü\N{PARTY POPPER}\u2028", "data: [DONE]", "\0\x7f </s>"]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


def saying(intent: eecore.Model, reason: str, *, ready: bool) -> Asker:
    server = asker(intent)
    (output,) = eecore.generate(intent, "lock the front door", max_tokens=64)
    output = replace(output, text="".join(PIECES), finish_reason=reason, error="by accident")
    script(server.service, output, PIECES, ready=ready)
    return server


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_events_are_the_same_however_they_come(
    intent: eecore.Model, path: str, details: bool, count: int
) -> None:
    body = {**PATHS[path], "stream": True, "n": count, "return_exit_layers": details}
    found = []
    for ready in (False, True):
        chunks = events(saying(intent, "stop", ready=ready).post(path, body).text)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        for index in range(count):
            own = [choice for choice in choices if choice["index"] == index]
            found.append([{**choice, "index": 0} for choice in own])
    assert all(each == found[0] for each in found)
    is_chat = "chat" in path
    said = [c["delta"].get("content", "") if is_chat else c["text"] for c in found[0]]
    shown = PIECES if details else [piece for piece in PIECES if piece]
    assert said == ([""] if is_chat else []) + shown + [""]
    for choice in found[0][1:-1]:
        layers = {"exit_layers": [3], "confidences": [0.5], "token_ids": [5]} if details else {}
        expected = {"index": 0, "logprobs": None, "finish_reason": None, **layers}
        assert {**choice, **expected} == choice
        assert details or set(choice) == {*expected, "delta" if is_chat else "text"}


def test_numbers_that_json_has_not(intent: eecore.Model) -> None:
    server = asker(intent)
    (output,) = eecore.generate(intent, "lock the front door", max_tokens=64)
    numbers = {"confidences": [nan, inf, 0.5], "logprobs": [-inf, nan, -0.5]}
    script(server.service, replace(output, token_ids=[5, 5, 5], **numbers), PIECES)
    body = {"prompt": "a", "return_exit_layers": True, "logprobs": 0}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert choice["confidences"] == [None, None, 0.5]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0, -9999.0, -0.5]


@pytest.mark.parametrize("path", PATHS)
def test_what_is_ready_is_sent_at_once(intent: eecore.Model, path: str) -> None:
    app = saying(intent, "stop", ready=True).app
    body = json.dumps({**PATHS[path], "stream": True}).encode()
    messages: list[Any] = [{"type": "http.request", "body": body}]
    sent: list[bytes] = []

    async def receive() -> Any:
        return messages.pop() if messages else await anyio.sleep_forever()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }
    anyio.run(app, scope, receive, send)
    (everything,) = sent
    assert len(events(everything.decode())) >= len(PIECES)


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_what_came_before_an_error_is_sent(intent: eecore.Model, ready: bool, count: int) -> None:
    server = saying(intent, "error", ready=ready)
    answer = server.post("/v1/completions", {"prompt": "a", "stream": True, "n": count})
    *chunks, error = events(answer.text)
    texts = [c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == 0]
    assert "".join(texts) == "".join(PIECES[:-1])
    assert error["error"]["message"] == "by accident"


@pytest.mark.parametrize("path", PATHS)
def test_usage_so_far(server: Asker, path: str) -> None:
    """In vLLM's form: numbers of the chunk's own choice, and at the end of all choices."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**PATHS[path], "stream": True, "n": 2, "max_tokens": 5, "ignore_eos": True}
    *chunks, total = events(server.post(path, {**body, "stream_options": options}).text)
    prompt = total["usage"]["prompt_tokens"]
    assert (total["choices"], total["usage"]["completion_tokens"]) == ([], 10)
    for index in range(2):
        used = [c["usage"] for c in chunks if c["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in used]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0 if "chat" in path else counts[0], 5)
        for usage, count in zip(used, counts, strict=True):
            tokens = {"prompt_tokens": prompt, "completion_tokens": count}
            assert usage == {**tokens, "total_tokens": prompt + count}
    # As in vLLM, the usage is included unless the request says no.
    for options, is_told in (({}, True), ({"include_usage": False}, False)):
        options = {"continuous_usage_stats": True, **options}
        chunks = events(server.post(path, {**body, "stream_options": options}).text)
        assert all(("usage" in chunk) == is_told for chunk in chunks)
