"""Answers that have to look like something, asked for as OpenAI's and vLLM's clients do."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import eecore
from eecore import Guide
from servers import Asker, assert_idle, events

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPT = "lock the front door"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "intent": {"enum": ["lock", "unlock"]},
        "name": {"type": "string", "pattern": "^[a-z ]{1,12}$"},
        "level": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["intent", "name", "level"],
    "additionalProperties": False,
}
LARK = 'start: "[" NAME ("," NAME)* "]"\nNAME: /[a-z]{1,6}/'

# What a body asks for, and the guide that it is.
ASKED: list[tuple[dict[str, Any], Guide]] = [
    ({"response_format": {"type": "json_object"}}, Guide.json_object()),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "intent", "strict": True, "schema": SCHEMA},
            }
        },
        Guide.json_schema(SCHEMA),
    ),
    ({"guided_json": SCHEMA}, Guide.json_schema(SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, Guide.json_schema(SCHEMA)),
    ({"guided_regex": "(yes|no), [0-9]{3}"}, Guide.regex("(yes|no), [0-9]{3}")),
    ({"guided_choice": ["front door", "garage"]}, Guide.choice(["front door", "garage"])),
    ({"guided_grammar": LARK}, Guide.grammar(LARK)),
    ({"structured_outputs": {"json": SCHEMA}}, Guide.json_schema(SCHEMA)),
    ({"structured_outputs": {"regex": "[a-c]{4}", "json": None}}, Guide.regex("[a-c]{4}")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Guide.choice(["a", "b"])),
    ({"structured_outputs": {"grammar": LARK}}, Guide.grammar(LARK)),
    ({"structured_outputs": {"json_object": True}}, Guide.json_object()),
]


@pytest.mark.parametrize(("fields", "guide"), ASKED, ids=lambda value: str(value)[:40])
def test_a_completion_follows_its_guide(
    server: Asker, intent: eecore.Model, fields: dict[str, Any], guide: Guide
) -> None:
    settings: dict[str, Any] = {"max_tokens": 40, "temperature": 0.7, "seed": 5}
    (expected,) = eecore.generate(intent, PROMPT, guide=guide, **settings)
    for exit in ("full", "speculative:3,6", "lookup:4", "auto"):
        body = {"prompt": PROMPT, "exit": exit, **settings, **fields}
        (choice,) = server.post(COMPLETIONS, body).json()["choices"]
        assert choice["text"] == expected.text
        assert choice["finish_reason"] == expected.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_json_when_it_ends(server: Asker, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "intent", "schema": SCHEMA}}
    body = {"messages": [{"role": "user", "content": PROMPT}], "response_format": form}
    body |= {"n": 3, "temperature": 1.0, "seed": 1, "stream": stream}
    answer = server.post(CHATS, body)
    if stream:
        chunks = [choice for chunk in events(answer.text) for choice in chunk["choices"]]
        texts = [
            "".join(c["delta"].get("content", "") for c in chunks if c["index"] == i)
            for i in range(3)
        ]
    else:
        texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
    for text in texts:
        value = json.loads(text)
        assert list(value) == ["intent", "name", "level"]
        assert value["intent"] in ("lock", "unlock")
        assert re.fullmatch("[a-z ]{1,12}", value["name"])
        assert 0 <= value["level"] <= 9
    assert_idle(server.service)


def test_what_says_nothing_asks_for_nothing(server: Asker) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 64}
    nothing = {"guided_json": None, "guided_regex": "", "guided_choice": []}
    nothing |= {"structured_outputs": {}, "response_format": {"type": "text"}}
    plain, same = (server.post(COMPLETIONS, each).json() for each in (body, body | nothing))
    assert plain["choices"] == same["choices"]
