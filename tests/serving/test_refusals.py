"""Refusals in OpenAI's shape, quick, and without effect on other requests."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

import eecore
from eecore import serving
from eecore.decoding.iterate import Iterations
from eecore.engine.async_engine import AsyncEngine
from eecore.serving import bodies
from servers import LONG, Asker, asker, assert_idle, events
from tripwire import Fault

PROMPT = "lock the front door"
JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": PROMPT}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


WRONG: list[tuple[str, dict[str, Any], str | None, str]] = [
    (COMPLETIONS, {}, "prompt", "Field required"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "got an empty string"),
    (COMPLETIONS, {"prompt": []}, "prompt", "at least one token or prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", "at least one token"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "prompt"),
    (COMPLETIONS, {"prompt": [99999]}, "prompt", r"expected token ids 0\.\.2047"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", r"expected token ids 0\.\.2047"),
    (COMPLETIONS, {"prompt": [True]}, "prompt", "prompt"),
    (COMPLETIONS, {"prompt": 3}, "prompt", "prompt"),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 0}, "max_tokens", "at least 1 without"),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": -1}, "max_tokens", "greater than"),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": "9"}, "max_tokens", "valid integer"),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1.5}, "max_tokens", "valid integer"),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1000}, None, "expected at most 256 together"),
    (COMPLETIONS, {"prompt": "door " * 400}, None, "expected at most 256 together"),
    (COMPLETIONS, {"prompt": PROMPT, "temperature": -1}, "temperature", "expected 0 or 1e-10"),
    (COMPLETIONS, {"prompt": PROMPT, "temperature": 2.01}, "temperature", "or equal to 2"),
    (CHATS, {"messages": USER, "temperature": 3}, "temperature", "or equal to 2"),
    ("/v1/responses", {"input": PROMPT, "temperature": 1e99}, "temperature", "or equal to 2"),
    (COMPLETIONS, {"prompt": PROMPT, "top_p": -0.1}, "top_p", "expected above 0"),
    (COMPLETIONS, {"prompt": PROMPT, "top_k": -2}, "top_k", "whole number"),
    (COMPLETIONS, {"prompt": PROMPT, "min_p": 2}, "min_p", r"expected 0\.\.1"),
    (COMPLETIONS, {"prompt": PROMPT, "repetition_penalty": 0}, "repetition_penalty", "expected"),
    (COMPLETIONS, {"prompt": PROMPT, "stop": ["a"] * 65}, "stop", "at most 64 strings"),
    (COMPLETIONS, {"prompt": PROMPT, "stop": [""]}, "stop", "none empty"),
    (COMPLETIONS, {"prompt": PROMPT, "n": 0}, "n", "greater than"),
    (COMPLETIONS, {"prompt": PROMPT, "n": 129}, "n", "less than"),
    (COMPLETIONS, {"prompt": ["a"] * 200}, "n", "at most 128 choices"),
    (COMPLETIONS, {"prompt": PROMPT, "logprobs": 21}, "logprobs", "less than"),
    (COMPLETIONS, {"prompt": PROMPT, "best_of": 2}, "best_of", "as many as n=1"),
    (COMPLETIONS, {"prompt": PROMPT, "suffix": "x"}, "suffix", "not supported"),
    (COMPLETIONS, {"prompt": PROMPT, "logit_bias": {"3": 101}}, "logit_bias", "at most 1024"),
    (COMPLETIONS, {"prompt": PROMPT, "logit_bias": {"a": 1}}, "logit_bias", "token ids, got 'a'"),
    (COMPLETIONS, {"prompt": PROMPT, "logit_bias": {"9" * 9: 1}}, "logit_bias", r"0\.\.2047"),
    (COMPLETIONS, {"prompt": PROMPT, "logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
    (COMPLETIONS, {"prompt": PROMPT, "presence_penalty": 2.1}, "presence_penalty", r"-2\.\.2"),
    (COMPLETIONS, {"prompt": PROMPT, "frequency_penalty": -3}, "frequency_penalty", r"-2\.\.2"),
    (COMPLETIONS, {"prompt": PROMPT, "prompt_logprobs": 21}, "prompt_logprobs", "less than"),
    (COMPLETIONS, {"prompt": PROMPT, "prompt_logprobs": -1}, "prompt_logprobs", "greater than"),
    (COMPLETIONS, {"prompt": PROMPT, "prompt_logprobs": True}, "prompt_logprobs", "valid integer"),
    (
        COMPLETIONS,
        {"prompt": PROMPT, "prompt_logprobs": 1, "stream": True},
        "prompt_logprobs",
        "none in a stream",
    ),
    (COMPLETIONS, {"prompt": "door " * 400, "max_tokens": 0, "echo": True}, None, "at most 256"),
    (COMPLETIONS, {"prompt": PROMPT, "guided_json": {"type": 1}}, "guided_json", "type: .* got 1"),
    (COMPLETIONS, {"prompt": PROMPT, "guided_json": "{"}, "guided_json", "a JSON schema"),
    (COMPLETIONS, {"prompt": PROMPT, "guided_json": [1]}, "guided_json", "an object"),
    (COMPLETIONS, {"prompt": PROMPT, "guided_regex": "(a"}, "guided_regex", "be compiled"),
    (COMPLETIONS, {"prompt": PROMPT, "guided_regex": "a" * 300000}, "guided_regex", "262144"),
    (COMPLETIONS, {"prompt": PROMPT, "guided_choice": [""]}, "guided_choice", "none empty"),
    (COMPLETIONS, {"prompt": PROMPT, "guided_choice": "ab"}, "guided_choice", "valid array"),
    (COMPLETIONS, {"prompt": PROMPT, "guided_grammar": "a b c"}, "guided_grammar", "be compiled"),
    (
        COMPLETIONS,
        {"prompt": PROMPT, "guided_regex": "a", "structured_outputs": {"regex": "b"}},
        "guided_regex",
        "expected at most one of structured_outputs, guided_regex, got 2",
    ),
    (
        COMPLETIONS,
        {"prompt": PROMPT, "structured_outputs": {"structural_tag": "x"}},
        "structured_outputs",
        "expected json, regex, choice, grammar or json_object, got 'structural_tag'",
    ),
    (
        COMPLETIONS,
        {"prompt": PROMPT, "structured_outputs": {"json": {"$ref": "#/a"}}},
        "structured_outputs",
        "Pointer '/a' does not exist",
    ),
    (COMPLETIONS, {"prompt": PROMPT, "exit": "deep"}, "exit", "expected full, fixed"),
    (COMPLETIONS, {"prompt": PROMPT, "exit": 3}, "exit", "exit"),
    (COMPLETIONS, {"prompt": PROMPT, "exit": "fixed:13"}, "exit", r"expected 1\.\.12"),
    (COMPLETIONS, {"prompt": PROMPT, "metadata": {"exit": 3}}, None, "metadata.exit: expected"),
    (CHATS, {}, "messages", "Field required"),
    (CHATS, {"messages": []}, "messages", "at least 1 item"),
    (CHATS, {"messages": "hello"}, "messages", "valid array"),
    (CHATS, {"messages": [{"content": "x"}]}, "messages", "role: expected text"),
    (CHATS, {"messages": [{"role": "user", "content": 3}]}, "messages", "content: expected text"),
    (CHATS, {"messages": USER, "max_tokens": 0, "prompt_logprobs": 1}, "max_tokens", "greater"),
    (
        CHATS,
        {"messages": USER, "prompt_logprobs": 0, "stream": True},
        "prompt_logprobs",
        "none in a stream",
    ),
    (CHATS, {"messages": USER, "top_logprobs": 2}, "top_logprobs", "expected logprobs=true"),
    (CHATS, {"messages": USER, "response_format": {"type": "xml"}}, "response_format", "got 'xml'"),
    (CHATS, {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format", ""),
    (
        CHATS,
        {
            "messages": USER,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"enum": []}},
            },
        },
        "response_format",
        "expected a json that can be compiled",
    ),
    (CHATS, {"messages": USER, "tool_choice": "required"}, "tool_choice", "expected a tool of"),
    (
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "expected text, got 'image_url'",
    ),
    ("/tokenize", {}, "prompt", "got both or none"),
    ("/tokenize", {"messages": []}, "messages", "at least 1 item"),
    ("/detokenize", {"tokens": [10**30]}, "tokens", r"tokens: expected token ids 0\.\.2047"),
    ("/detokenize", {"tokens": [-1]}, "tokens", r"expected token ids 0\.\.2047, got -1"),
    ("/detokenize", {"tokens": [1, 2048]}, "tokens", r"expected token ids 0\.\.2047, got 2048"),
    (CHATS, {"messages": USER, "logprobs": 0}, "logprobs", "valid boolean"),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), WRONG)
def test_wrong_fields(
    server: Asker, path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    error = error_of(server.post(path, body), 400)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    assert re.search(message, error["message"]), error
    assert_idle(server.service)


@pytest.mark.parametrize("template", ["{{ messages[9].role }}", "{{ raise_exception('no') }}"])
def test_what_a_template_says_does_not_tell_where_the_model_is(
    endless: eecore.Model, template: str
) -> None:
    tokenizer = endless.tokenizer
    assert tokenizer is not None
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        error = error_of(asker(endless).post(CHATS, {"messages": USER}), 400)
    finally:
        tokenizer.chat_template = before
    assert error["param"] == "messages"
    assert "chat_template" in error["message"]
    assert "/" not in error["message"]


HOSTILE = {
    "nothing": b"",
    "no JSON": b"{'prompt': 1}",
    "no object": b"[1, 2]",
    "half of it": b'{"prompt": "a',
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep metadata": b'{"prompt": "a", "metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "a huge number": b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
    "a huge exponent": b'{"prompt": "a", "temperature": 1e999999}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "a huge token": b'{"prompt": [' + b"9" * 5_000 + b"]}",
    "many tokens": b'{"prompt": [' + b"1," * 500_000 + b"1]}",
    "many prompts": b'{"prompt": [' + b'"a",' * 500_000 + b'"a"]}',
    "a long word": b'{"prompt": "' + b"a" * 1_000_000 + b'"}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies(server: Asker, name: str) -> None:
    error = error_of(server.post(COMPLETIONS, content=HOSTILE[name], headers=JSON), 400)
    if name in ("nothing", "no JSON", "half of it"):
        assert error["code"] == "invalid_json"
    assert_idle(server.service)


def test_the_roads_that_are_not_there(server: Asker) -> None:
    error = error_of(server.post("/v1/embeddings", {"input": "a"}), 404)
    assert error["type"] == "not_found_error"
    for path in (COMPLETIONS, CHATS, "/v1/responses", "/v1/models", "/tokenize"):
        assert f"{path}," in error["message"]
    error_of(server.get(COMPLETIONS), 405)
    for model in ("gpt-4", "intent:deep", "intent2", ":"):
        error = error_of(server.post(COMPLETIONS, {"prompt": PROMPT, "model": model}), 404)
        assert error["code"] == "model_not_found"
        error_of(server.get(f"/v1/models/{model}"), 404)
    for name in ("fixed-9x", "fixed-99"):
        error = error_of(server.get(f"/v1/models/intent:{name}"), 400)
        assert error["code"] == "exit_not_possible"


@pytest.mark.parametrize(
    ("kind", "more", "status"),
    [
        ("application/json; charset=utf-8", {}, 200),
        ("application/json", {"origin": "https://example.org"}, 200),
        (None, {}, 200),
        ("application/x-www-form-urlencoded", {}, 200),  # what curl says by itself
        ("text/plain", {}, 415),
        ("multipart/form-data", {}, 415),
        # Requests that a browser sends for a page of another site without a preflight.
        (None, {"origin": "https://example.org"}, 415),
        (None, {"origin": "null"}, 415),
        (None, {"sec-fetch-site": "cross-site"}, 415),
        ("application/x-www-form-urlencoded", {"origin": "https://example.org"}, 415),
    ],
)
def test_a_body_need_not_say_that_it_is_json_unless_a_browser_sends_it(
    server: Asker, kind: str | None, more: dict[str, str], status: int
) -> None:
    body = json.dumps({"prompt": PROMPT}).encode()
    headers = {**({} if kind is None else {"content-type": kind}), **more}
    answer = server.post(COMPLETIONS, content=body, headers=headers)
    assert answer.status_code == status
    if status == 415:
        assert "expected application/json" in error_of(answer, 415)["message"]


def test_a_large_body_is_passed_over(intent: eecore.Model) -> None:
    server = asker(intent, max_body=1000)
    body = json.dumps({"prompt": "a" * 2000}).encode()
    assert error_of(server.post(COMPLETIONS, content=body, headers=JSON), 413)

    async def parts(count: int) -> Any:
        for _ in range(count):
            yield b" " * 500

    async def main(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [
            await client.post(COMPLETIONS, content=parts(count), headers=JSON) for count in (3, 100)
        ]

    for answer in server.run(main):
        assert error_of(answer, 413)["code"] == "body_too_large"
        assert answer.headers["connection"] == "close"
    assert_idle(server.service)


def test_a_body_that_does_not_come(intent: eecore.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.02)
    server = asker(intent)

    async def slowly() -> Any:
        yield b"{"
        await asyncio.sleep(5)

    async def main(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(COMPLETIONS, content=slowly(), headers=JSON)

    assert error_of(server.run(main), 408)["type"] == "timeout_error"
    assert_idle(server.service)


def test_keys(intent: eecore.Model) -> None:
    server = asker(intent, keys=("first", "zweiter Schlüssel"))
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "first"},
        {"authorization": "Basic first"},
        {"authorization": "Bearer "},
        {"authorization": b"Bearer \xff\xfe"},
    ):
        error = error_of(server.get("/v1/models", headers=headers), 401)
        assert error["type"] == "authentication_error"
        assert "first" not in error["message"]
        answer = server.post(COMPLETIONS, {"prompt": PROMPT}, headers=headers)
        assert error_of(answer, 401)
        assert answer.headers["www-authenticate"] == "Bearer"
        error_of(server.post("/tokenize", {"prompt": PROMPT}, headers=headers), 401)
    for key in ("first", "zweiter Schlüssel".encode()):
        bearer = b"Bearer " + (key if isinstance(key, bytes) else key.encode())
        assert server.get("/v1/models", headers={"authorization": bearer}).status_code == 200
    assert server.get("/health").status_code == 200


def test_a_full_queue_is_a_429(endless: eecore.Model) -> None:
    server = asker(endless, max_num_seqs=1, max_waiting=1)
    body = {"prompt": "a", "max_tokens": LONG, "ignore_eos": True}

    async def main(client: httpx.AsyncClient) -> list[httpx.Response]:
        first = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for _ in range(2)]
        while server.service.admission.taken < 2:
            await asyncio.sleep(0.001)
        third = await client.post(COMPLETIONS, json=body)
        server.service.admission._seconds = 1000.0
        fourth = await client.post(COMPLETIONS, json=body)
        for task in first:
            task.cancel()
        await asyncio.wait(first)
        two = await client.post(COMPLETIONS, json={**body, "n": 3})
        return [third, fourth, two]

    full, busy, several = server.run(main)
    assert error_of(full, 429)["type"] == "rate_limit_error"
    assert 1 <= int(full.headers["retry-after"]) < int(busy.headers["retry-after"]) == 60
    error_of(several, 400)
    assert_idle(server.service)


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline(endless: eecore.Model, stream: bool) -> None:
    server = asker(endless, timeout=0.5)
    server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2})  # the programs of a pass are there
    body = {"prompt": "a", "max_tokens": LONG, "ignore_eos": True, "stream": stream}
    answer = server.post(COMPLETIONS, body)
    if stream:  # it has begun, and ends with the error
        *_, last = events(answer.text)
        assert last["error"]["code"] == "deadline_exceeded"
    else:
        assert error_of(answer, 504)["code"] == "deadline_exceeded"
    assert_idle(server.service)
    assert 'eecore_requests_total{outcome="timeout"} 1.0' in server.get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_on_the_way(
    intent: eecore.Model, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise Fault("broken")

    server = asker(intent)
    with monkeypatch.context() as patch:
        patch.setattr(Iterations, "iterate", broken)
        answer = server.post(COMPLETIONS, {"prompt": PROMPT, "stream": stream, "n": 2})
    error = error_of(answer, 500)
    assert error["type"] == "server_error"
    assert "broken" in error["message"]
    assert 'eecore_requests_total{outcome="error"} 2.0' in server.get("/metrics").text
    assert server.post(COMPLETIONS, {"prompt": PROMPT}).status_code == 200
    assert_idle(server.service)


def test_unexpected_errors(intent: eecore.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer says no more than the kind of the failure."""

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("secret")

    server = asker(intent)
    with monkeypatch.context() as patch:
        patch.setattr(AsyncEngine, "prepare", broken)
        error = error_of(server.post(COMPLETIONS, {"prompt": PROMPT}), 500)
    assert error["code"] == "internal_error"
    assert error["message"] == "the server failed: ZeroDivisionError"
    assert_idle(server.service)


def test_a_server_that_closes(intent: eecore.Model) -> None:
    server = asker(intent, max_num_seqs=4)
    server.service.admission.is_closing = True
    answer = server.post(COMPLETIONS, {"prompt": PROMPT})
    assert error_of(answer, 503)["code"] == "shutting_down"
    assert answer.headers["retry-after"]
    assert server.get("/health").status_code == 503
    server.service.admission.is_closing = False
    server.service.served.engine.close()
    error_of(server.post(COMPLETIONS, {"prompt": PROMPT}), 503)


def test_the_extra_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "find_spec", lambda name: None if name == "uvicorn" else name)
    with pytest.raises(ImportError, match=r"got no uvicorn: pip install '\.\[serve\]'"):
        serving.require_extra()
