"""Requests as clients of other projects send them, recorded by scripts/clients, are answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

import eecore
from servers import Asker, asker, events

RECORDED = json.loads((Path(__file__).parent / "client_requests.json").read_text())
# Answers are bounded, since this model need not end the text in a schema.
BOUNDS = {"/v1/chat/completions": "max_completion_tokens", "/v1/responses": "max_output_tokens"}


@pytest.fixture(scope="module")
def caller(intent: eecore.Model) -> Asker:
    return asker(intent)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded["client"])
def test_a_recorded_request(caller: Asker, recorded: dict[str, Any]) -> None:
    path, body = recorded["path"], {**recorded["body"], "model": None}
    if not {"max_tokens", "max_completion_tokens", "max_output_tokens"} & body.keys():
        body[BOUNDS[path]] = 100
    answer = caller.post(path, body)
    assert answer.status_code == 200, answer.text
    if path == "/v1/responses":
        found = answer.text.split("data: ")[-1] if body.get("stream") else None
        given = json.loads(found)["response"] if found else answer.json()
        assert Response.model_validate(given, strict=True).status in ("completed", "incomplete")
        return
    if body.get("stream"):
        check_stream(body, events(answer.text))
        return
    (choice,) = ChatCompletion.model_validate(answer.json(), strict=True).choices
    if body.get("logprobs"):
        assert choice.logprobs is not None
        assert choice.logprobs.content
    if body.get("tool_choice"):
        called = choice.finish_reason == "tool_calls"
        name = json.dumps(body["tools"][0]["function"]["name"])
        assert called or f'<tool_call>\n{{"name": {name}' in (choice.message.content or "")
        assert called == bool(choice.message.tool_calls)
    elif body.get("response_format") and choice.finish_reason == "stop":
        wanted = body["response_format"]["json_schema"]["schema"]["required"]
        assert list(json.loads(choice.message.content or "")) == wanted


def check_stream(body: dict[str, Any], given: list[Any]) -> None:
    """What parsers of streams rely on: the role first, one reason at the end, then the usage."""
    chunks = [ChatCompletionChunk.model_validate(each, strict=True) for each in given]
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert [reason is not None for reason in reasons] == [False] * (len(reasons) - 1) + [True]
    usages = [chunk.usage is not None for chunk in chunks]
    options = body.get("stream_options") or {}
    assert not any(usages[:-1])
    assert usages[-1] == bool(options.get("include_usage"))
    assert (not chunks[-1].choices) == bool(options.get("include_usage"))
