"""/v1/responses, asked with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import openai
import pytest
from openai.types import responses as of_openai
from pydantic import BaseModel, TypeAdapter

import eecore
from chat_templates import TEMPLATES
from eecore.serving.responses import read_response
from servers import Asker, asker, assert_idle, listening, script

PATH = "/v1/responses"
SAID = "lock the front door"
MEANT = "[HassTurnOn [name front door]]"
LOCK = {
    "type": "function",
    "name": "lock",
    "description": "Locks a door.",
    "parameters": {
        "type": "object",
        "properties": {"door": {"enum": ["front", "back"]}},
        "required": ["door"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "lock", "arguments": {"door": "back"}}\n</tool_call>'
PIECES = ["I'll ", "see.", CALL[:20], CALL[20:], " Or", " not."]
EVENTS: TypeAdapter[Any] = TypeAdapter(of_openai.ResponseStreamEvent)


class Door(BaseModel):
    door: Literal["front", "back"]


@pytest.fixture(scope="module")
def caller(intent: eecore.Model) -> Asker:
    """A server of a model that is said to call tools; the guides make it."""
    return asker(intent, tool_parser="hermes")


@contextmanager
def client_of(server: Asker) -> Iterator[openai.OpenAI]:
    with listening(server.service) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    assert_idle(server.service)


@pytest.fixture(scope="module")
def client(caller: Asker) -> Iterator[openai.OpenAI]:
    with client_of(caller) as client:
        yield client


def saying(intent: eecore.Model, pieces: Sequence[str], reason: str = "stop") -> Asker:
    """A server with scripted answers."""
    server = asker(intent, tool_parser="hermes")
    (output,) = eecore.generate(intent, SAID, max_tokens=64)
    output = replace(output, text="".join(pieces), finish_reason=reason, error="by accident")
    script(server.service, output, pieces)
    return server


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each has to name its kind twice and have its number."""
    found = []
    for block in text.split("\n\n")[:-1]:
        kind, data = block.split("\n", 1)
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_an_answer(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="intent", input=SAID, metadata={"of": "test"}, extra_body={"exit": "fixed:12"}
    )
    assert answer.output_text == MEANT
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.model, answer.metadata, answer.object) == ("intent", {"of": "test"}, "response")
    assert answer.id.startswith("resp_")
    usage = answer.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (5, 8, 13)
    assert (usage.model_extra or {})["eecore"]["contract"].startswith("fixed exit after layer 12")
    assert answer.temperature == 0
    of_openai.Response.model_validate(answer.model_dump())  # no field is of another kind


@pytest.mark.parametrize("asked", [{"model": "intent:fixed-6"}, {"metadata": {"exit": "fixed:6"}}])
def test_how_deep_it_may_go(caller: Asker, asked: dict[str, Any]) -> None:
    body = {"input": SAID, "return_exit_layers": True, "max_output_tokens": 4, **asked}
    whole = caller.post(PATH, body).json()
    events = events_of(caller.post(PATH, {**body, "stream": True}).text)
    ended = events[-1]["response"]
    assert whole["exit_layers"] == ended["exit_layers"]
    assert whole["exit_layers"][1:] == [6, 6, 6]
    deltas = [event for event in events if event["type"].endswith("text.delta")]
    for name in ("token_ids", "tokens", "exit_layers", "confidences"):
        assert [value for delta in deltas for value in delta[name]] == whole[name]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_items_and_events_say_the_same(intent: eecore.Model, reason: str) -> None:
    server = saying(intent, PIECES, reason)
    body = {"input": "a", "tools": [LOCK]}
    whole = server.post(PATH, body).json()
    text = server.post(PATH, {**body, "stream": True}).text
    events = events_of(text)
    for event in events:
        EVENTS.validate_python(event)
    ended = events[-1]["response"]
    assert events[-1]["type"] == f"response.{ended['status']}"
    assert ended["status"] == {"stop": "completed", "length": "incomplete"}[reason]
    cut = {"stop": None, "length": {"reason": "max_output_tokens"}}[reason]
    assert ended["incomplete_details"] == whole["incomplete_details"] == cut
    done = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert done == ended["output"]
    names = ("type", "status", "name", "arguments")
    for items in (ended["output"], whole["output"]):
        said = [[each.get(name) for name in names] for each in items]
        assert said == [
            ["message", "completed", None, None],
            ["function_call", "completed", "lock", '{"door": "back"}'],
            ["message", ended["status"], None, None],
        ]
        texts = [part["text"] for item in items for part in item.get("content", ())]
        assert texts == ["I'll see.", " Or not."]
    for index, item in enumerate(done):
        own = [event for event in events if event.get("item_id") == item["id"]]
        assert {event["output_index"] for event in own} == {index}
        delta = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert delta == item.get("arguments", item.get("content", [{}])[0].get("text"))


def test_an_answer_of_nothing_is_an_empty_message(intent: eecore.Model) -> None:
    server = saying(intent, [""])
    whole = server.post(PATH, {"input": "a"}).json()
    ended = events_of(server.post(PATH, {"input": "a", "stream": True}).text)[-1]["response"]
    for response in (whole, ended):
        (item,) = response["output"]
        assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_a_stream_that_fails(intent: eecore.Model) -> None:
    server = saying(intent, PIECES[:2], "error")
    with client_of(server) as client, client.responses.stream(model="intent", input="a") as stream:
        *before, last = list[Any](stream)
    numbers = [event.sequence_number for event in (*before, last)]
    assert numbers == list(range(len(numbers)))
    assert last.type == "response.failed"
    assert (last.response.status, last.response.error.message) == ("failed", "by accident")
    (item,) = last.response.output
    assert (item.content[0].text, item.status) == ("I'll ", "incomplete")


def test_an_agent_of_three_turns(client: openai.OpenAI) -> None:
    """Each answer goes back as it is, with the results of its calls."""
    tools: Any = [LOCK]
    items: list[Any] = [{"role": "user", "content": SAID}]
    asked: Any = {"model": "intent", "instructions": "Be brief.", "tools": tools}
    for turn in range(2):
        if turn:
            with client.responses.stream(**asked, input=items, tool_choice="required") as stream:
                kinds = [event.type for event in stream]
                answer: Any = stream.get_final_response()
            assert "response.function_call_arguments.done" in kinds
        else:
            choice: Any = {"type": "function", "name": "lock"}
            answer = client.responses.create(**asked, input=items, tool_choice=choice)
        (call,) = answer.output
        assert (call.type, call.name, call.status) == ("function_call", "lock", "completed")
        Door.model_validate_json(call.arguments)
        items += answer.output
        said = {"type": "function_call_output", "call_id": call.call_id, "output": SAID}
        items.append(said)
    last = client.responses.create(**asked, input=items, tool_choice="none")
    assert last.output_text == MEANT
    assert [tool.to_dict() for tool in last.tools] == [{**tool, "strict": None} for tool in tools]


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_asked_for_is_parsed(client: openai.OpenAI, stream: bool) -> None:
    asked: Any = {"model": "intent", "input": SAID, "text_format": Door}
    if stream:
        with client.responses.stream(**asked) as events:
            parsed = events.get_final_response().output_parsed
    else:
        parsed = client.responses.parse(**asked).output_parsed
    assert isinstance(parsed, Door)


def test_log_probabilities(client: openai.OpenAI) -> None:
    asked: Any = {"model": "intent", "input": SAID, "top_logprobs": 2}
    answer: Any = client.responses.create(**asked, include=["message.output_text.logprobs"])
    (part,) = answer.output[0].content
    assert "".join(entry.token for entry in part.logprobs[:-1]) == MEANT
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2] * 8
    with client.responses.stream(**asked) as stream:
        streamed = [e for each in stream if each.type.endswith("text.delta") for e in each.logprobs]
    assert [e.logprob for e in streamed] == [e.logprob for e in part.logprobs]


def message(*said: Any, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": list(said)}


def call(name: str = "c1", **fields: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": name, "name": "lock", "arguments": "{}"}
    return {**call, **fields}


def gave(name: str = "c1", output: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": output}


USER = {"role": "user", "content": "a"}
THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "so"}],
}


def chat_call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "lock", "arguments": "{}"}}


CONVERSATIONS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "text": ({"input": "a"}, [USER]),
    "instructions": (
        {"input": "a", "instructions": "b"},
        [{"role": "system", "content": "b"}, USER],
    ),
    "several system messages": (
        {
            "instructions": "b",
            "input": [
                {"role": "developer", "content": "c"},
                {"role": "system", "content": [{"type": "input_text", "text": "d"}]},
                USER,
                {"role": "developer", "content": "e"},
            ],
        },
        [
            {"role": "system", "content": ["b", "c", {"type": "input_text", "text": "d"}]},
            USER,
            {"role": "developer", "content": "e"},
        ],
    ),
    "two calls and their outputs": (
        {
            "input": [
                USER,
                THOUGHT,
                {**message({"type": "output_text", "text": "b"}, role="assistant"), "id": "msg_1"},
                call("c1", id="fc_1", status="completed"),
                call("c2", arguments=None),
                gave("c2", [{"type": "input_text", "text": "d"}]),
                gave("c1"),
            ]
        },
        [
            USER,
            {
                "role": "assistant",
                "reasoning_content": "so",
                "content": [{"type": "output_text", "text": "b"}],
                "tool_calls": [
                    chat_call("c1"),
                    {**chat_call("c2"), "function": {"name": "lock", "arguments": ""}},
                ],
            },
            {
                "role": "tool",
                "tool_call_id": "c2",
                "content": [{"type": "input_text", "text": "d"}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
        ],
    ),
    "text after a call": (
        {"input": [call(), {"role": "assistant", "content": "b"}, gave(), call("c2"), gave("c2")]},
        [
            {"role": "assistant", "tool_calls": [chat_call("c1")], "content": "b"},
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
            {"role": "assistant", "tool_calls": [chat_call("c2")]},
            {"role": "tool", "tool_call_id": "c2", "content": "done"},
        ],
    ),
    "two answers": (
        {"input": [THOUGHT, *({"role": "assistant", "content": each} for each in "ab")]},
        [
            {"role": "assistant", "reasoning_content": "so", "content": "a"},
            {"role": "assistant", "content": "b"},
        ],
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_items_are_messages_of_a_chat(name: str) -> None:
    body, messages = CONVERSATIONS[name]
    chat = read_response(json.dumps(body).encode())
    assert chat.messages == messages
    assert len(chat.sources) == len(messages)


def test_a_template_gets_what_it_would_of_a_chat(endless: eecore.Model) -> None:
    tokenizer = endless.tokenizer
    assert tokenizer is not None
    before, tokenizer.chat_template = tokenizer.chat_template, TEMPLATES["thoughts"]
    server = asker(endless)
    function = {name: value for name, value in LOCK.items() if name != "type"}
    chat = {
        "messages": CONVERSATIONS["two calls and their outputs"][1],
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 4,
        "temperature": 0,
    }
    items = {**CONVERSATIONS["two calls and their outputs"][0], "temperature": 0}
    try:
        one = server.post("/v1/chat/completions", chat).json()
        other = server.post(PATH, {**items, "tools": [LOCK], "max_output_tokens": 4}).json()
    finally:
        tokenizer.chat_template = before
    assert other["usage"]["input_tokens"] == one["usage"]["prompt_tokens"]
    assert other["output"][0]["content"][0]["text"] == one["choices"][0]["message"]["content"]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "input: Field required"),
    ({"input": []}, "input", "input: expected text or at least one item, got none"),
    ({"input": 3}, "input", "input"),
    ({"input": [message({"type": "input_image"})]}, "input", "input[0].content: expected text"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input", "input[0].role: expected one of user"),
    ({"input": [USER, {"role": "user"}]}, "input", "input[1].content: expected text or a list"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "input[0].type: expected"),
    ({"input": [{"type": ["message"]}]}, "input", "input[0].type: expected"),
    ({"input": [gave()]}, "input", "input[0].call_id: expected that of a function_call before it"),
    ({"input": [call(), gave(output=3)]}, "input", "input[1].output: expected text or a list"),
    ({"input": [call(name="")]}, "input", "input[0].call_id: expected text, got ''"),
    ({"input": [call(arguments={})]}, "input", "input[0].arguments: expected JSON as text"),
    ({"input": [{"type": "reasoning", "content": "a"}]}, "input", "input[0].content: expected a"),
    (
        {"input": "a", "instructions": "b", "max_output_tokens": 9999},
        "",
        "and max_output_tokens=9999: expected at most 256",
    ),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "greater than"),
    (
        {"input": "a", "tools": [{"type": "web_search"}]},
        "tools",
        "tools[0].type: expected function",
    ),
    ({"input": "a", "tools": [{"type": "function"}]}, "tools", "tools[0].name: expected text"),
    ({"input": "a", "tool_choice": "required"}, "tool_choice", "expected a tool of []"),
    ({"input": "a", "tool_choice": {"type": "mcp"}}, "tool_choice", "expected a tool of"),
    ({"input": "a", "text": {"format": "json"}}, "text", "text.format: expected text, json_object"),
    ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text", "text.format.schema"),
    (
        {"input": "a", "text": {"format": {"type": "json_schema", "schema": {"enum": []}}}},
        "text",
        "text.format: expected a json that can be compiled",
    ),
    ({"input": "a", "text": {"verbosity": 3}}, "text", "text.verbosity: expected text, got 3"),
    ({"input": "a", "reasoning": {"effort": "high"}}, "reasoning", "reasoning.effort: expected a"),
    ({"input": "a", "include": ["all"]}, "include", "include.0: Input should be"),
    ({"input": "a", "top_logprobs": 21}, "top_logprobs", "less than"),
    ({"input": "a", "background": True}, "background", "is not supported"),
    ({"input": "a", "truncation": "auto"}, "truncation", "is not supported"),
    ({"input": "a", "conversation": "c"}, "conversation", "is not supported"),
    ({"input": "a", "prompt": {"id": "p"}}, "prompt", "is not supported"),
    ({"input": "a", "messages": [USER]}, "messages", "is not supported"),
    ({"input": "a", "max_tokens": 3}, "max_tokens", "expected max_output_tokens"),
    ({"input": "a", "temperature": -1}, "temperature", "expected 0 or"),
    ({"input": "a", "exit": "deep"}, "exit", "expected full, fixed"),
    ({"input": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
]


@pytest.mark.parametrize(("body", "param", "words"), WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(
    caller: Asker, body: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    if stream and "stream_options" not in body:
        body = {**body, "stream": True}
    answer = caller.post(PATH, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in error["message"]
    assert (error["param"] or "") == param


@pytest.mark.parametrize("field", ["metadata", "text", "reasoning"])
@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_numbers_that_no_answer_can_have(caller: Asker, field: str, number: str) -> None:
    body = f'{{"input": "a", "{field}": {{"a": {number}}}}}'.encode()
    answer = caller.post(PATH, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert f"{field}: expected finite numbers" in answer.text


def test_nothing_is_stored(client: openai.OpenAI) -> None:
    first = client.responses.create(model="intent", input=SAID, store=True)
    assert (first.model_extra or {})["store"] is False
    with pytest.raises(openai.BadRequestError, match="the whole conversation in input") as caught:
        client.responses.create(model="intent", input="b", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-4", input=SAID)
