"""Histories that agents send: each means the same as for OpenAI, in every template at hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

import eecore
from chat_templates import CHATML, PARTICULAR, TEMPLATES, TURNS
from eecore.serving.asking import ask_chat
from eecore.serving.conversation import conversation
from eecore.serving.protocol import ChatRequest, TokenizeRequest, read
from eecore.serving.refusals import ApiError
from eecore.serving.served import ServedModel
from eecore.serving.tool_calls import FORMATS, ToolCall
from servers import asker

# Fails where a content is no text, and has no place for more than the calls' arguments.
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m['content'] + '' }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.arguments | tojson }}>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
EVERY = {"plain": PLAIN, **TEMPLATES, **PARTICULAR}
USER = {"role": "user", "content": "t?"}
ANSWER = {"role": "assistant"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("now", "here")
]


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    function = {"name": "now", "arguments": arguments, **fields}
    return {"id": "abcdefgh1", "type": "function", "function": function}


@pytest.fixture
def served(endless: eecore.Model) -> Iterator[ServedModel]:
    """A model whose chat template a test may change."""
    tokenizer = endless.tokenizer
    assert tokenizer is not None
    before, tokenizer.chat_template = tokenizer.chat_template, PLAIN
    yield asker(endless).service.served
    tokenizer.chat_template = before


def text(served: ServedModel, *messages: Any, **fields: Any) -> str:
    body = json.dumps({"messages": messages, **fields}).encode()
    return conversation(served, read(TokenizeRequest, body))


# Messages after the user's, and their text in a template.
HISTORIES: dict[str, tuple[dict[str, Any], str]] = {
    "null": ({**ANSWER, "content": None, "tool_calls": [call("{}")]}, "<{}>"),
    "missing": ({**ANSWER, "tool_calls": [call("{}")]}, "<{}>"),
    "null alone": ({**ANSWER, "content": None}, ""),
    "no part": ({**ANSWER, "content": [], "tool_calls": [call("{}")]}, "<{}>"),
    "parts": (
        {**ANSWER, "content": [{"type": "text", "text": "a"}, "b"], "tool_calls": [call("{}")]},
        "a\nb<{}>",
    ),
    "parts of responses": ({**ANSWER, "content": [{"type": "output_text", "text": "a"}]}, "a"),
    "parts with more": (
        {**ANSWER, "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]},
        "a",
    ),
    "a part refuses": ({**ANSWER, "content": [{"type": "refusal", "refusal": "no"}]}, "no"),
    "text and refusal": (
        {
            **ANSWER,
            "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}],
        },
        "a\nno",
    ),
    "refuses": ({**ANSWER, "content": None, "refusal": "no"}, "no"),
    "refuses, empty": ({**ANSWER, "content": "", "refusal": "no"}, "no"),
    "nulls": (
        {
            **ANSWER,
            "content": "a",
            "refusal": None,
            "tool_calls": None,
            "audio": None,
            "function_call": None,
            "annotations": [],
            "name": None,
        },
        "a",
    ),
    "no calls": ({**ANSWER, "content": "a", "tool_calls": []}, "a"),
    "arguments": ({**ANSWER, "tool_calls": [call('{"a": [1, null]}')]}, '<{"a": [1, null]}>'),
    "an object": ({**ANSWER, "tool_calls": [call({"a": 1})]}, '<{"a": 1}>'),
    "empty": ({**ANSWER, "tool_calls": [call("")]}, "<{}>"),
    "space": ({**ANSWER, "tool_calls": [call(" \n")]}, "<{}>"),
    "null in JSON": ({**ANSWER, "tool_calls": [call("null")]}, "<{}>"),
    "null arguments": ({**ANSWER, "tool_calls": [call(None)]}, "<{}>"),
    "no arguments": ({**ANSWER, "tool_calls": [{"function": {"name": "now"}}]}, "<{}>"),
    "a list": ({**ANSWER, "tool_calls": [call("[1]")]}, "<[1]>"),
    "no JSON": ({**ANSWER, "tool_calls": [call("{oops")]}, '<"{oops">'),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_what_an_answer_in_the_history_means(served: ServedModel, name: str) -> None:
    message, expected = HISTORIES[name]
    assert text(served, USER, message) == f"[user]t?[assistant]{expected}[assistant]"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": None}, r"messages[0].content: expected text or a list"),
        ({"role": "user"}, "messages[0].content: expected text"),
        ({"role": "tool", "tool_call_id": "a", "content": None}, "messages[0].content"),
        ({"role": "user", "content": {"text": "a"}}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "got 'image_url'"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "got 'input_audio'"),
        ({"role": "user", "content": [{"type": ["text"], "text": "a"}]}, "got ['text']"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "refusal", "text": "a"}]}, "messages[0].content"),
        ({**ANSWER, "refusal": 3}, "messages[0].refusal: expected text"),
        ({**ANSWER, "audio": {"id": "a"}}, "messages[0].audio: is not supported"),
        ({**ANSWER, "function_call": {"name": "a", "arguments": ""}}, "messages[0].function_call"),
        ({**ANSWER, "tool_calls": {"a": 1}}, "messages[0].tool_calls: expected a list"),
        ({**ANSWER, "tool_calls": ["now"]}, "messages[0].tool_calls[0]: expected a call"),
        (
            {**ANSWER, "tool_calls": [{"type": "custom", "custom": {"name": "a", "input": "b"}}]},
            "messages[0].tool_calls[0]: expected a call of a function",
        ),
        ({**USER, "tool_calls": [call("{}")]}, "messages[0].tool_calls: expected them in an"),
    ],
)
def test_what_no_history_can_have(served: ServedModel, message: Any, field: str) -> None:
    with pytest.raises(ApiError) as caught:
        text(served, message)
    assert caught.value.param == "messages"
    assert field in str(caught.value)


def test_a_developer_is_the_system(served: ServedModel) -> None:
    said = text(served, {"role": "developer", "content": "x"}, USER)
    assert said == "[system]x[user]t?[assistant]"


def test_thoughts_have_the_names_that_templates_know(served: ServedModel) -> None:
    assert served.tokenizer is not None
    served.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.reasoning_content }}{{ m.reasoning }}{% endfor %}"
    )
    for name in ("reasoning_content", "reasoning"):
        assert text(served, {**ANSWER, "content": "a", name: "hm"}) == "hmhm"


ASSEMBLED = {"index": 0, "parsed_arguments": None}
"""Fields that clients add to a call that they have joined from a stream."""


@pytest.mark.parametrize("template", EVERY)
@pytest.mark.parametrize("parser", FORMATS)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_its_own_answers_can_be_sent_back(
    served: ServedModel, template: str, parser: str, count: int
) -> None:
    """Sent as they are, as openai's client holds them, and as joined from a stream."""
    served.tokenizer.chat_template = EVERY[template]
    made = [ToolCall(FORMATS[parser].new_id(), "now", f'{{"at": {i}}}').whole() for i in range(2)]
    for content in ("", None, "I see."):
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if count:
            message["tool_calls"] = made[:count]
        clients = ChatCompletionMessage.model_validate(message).model_dump()
        streamed = {**clients, "parsed": None}
        if count:
            streamed["tool_calls"] = [
                {**each, "index": i, "function": {**each["function"], **ASSEMBLED}}
                for i, each in enumerate(message["tool_calls"])
            ]
        texts = set()
        for each in (message, clients, streamed):
            results = [
                {"role": "tool", "tool_call_id": one["id"], "content": f"result {i}"}
                for i, one in enumerate(made[:count])
            ]
            texts.add(text(served, USER, each, *results, tools=TOOLS))
        (said,) = texts
        for i in range(count):
            own = {"parameters": f"<parameter=at>\n{i}\n", "python": f"now(at={i})"}
            assert own.get(template, f'"at": {i}') in said
            assert f"result {i}" in said
        assert "None" not in said
        assert "parsed" not in said
    assert "I see." in said or (count and template in ("headers", "alternating"))


# Templates without a place for tools or calls.
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
CALLS = {**ANSWER, "content": "Hm.", "tool_calls": [call('{"at": 1}'), call("{}")]}
RESULTS = [{"role": "tool", "tool_call_id": "a", "content": f"result {i}"} for i in range(2)]


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("template", [CHATML, NO_SYSTEM + CHATML, TURNS])
def test_a_template_without_tools_gets_them_as_text(
    served: ServedModel, template: str, system: str | None
) -> None:
    served.tokenizer.chat_template = template
    if system and template.startswith(NO_SYSTEM):
        return
    before = [{"role": "system", "content": system}] if system else []
    history = [*before, USER, CALLS, *RESULTS, {**USER, "content": "and?"}]
    said = text(served, *history, tools=TOOLS)
    listed = "\n".join(map(json.dumps, TOOLS))
    parts = ["You can call", f"<tools>\n{listed}\n</tools>", "<tool_call>\n{", "t?", "Hm.\n"]
    parts += ['<tool_call>\n{"name": "now", "arguments": {"at": 1}}\n</tool_call>\n<tool_call>']
    parts += ['"arguments": {}', "<tool_response>\nresult 0\n</tool_response>\n<tool_response>"]
    parts += ["result 1\n</tool_response>\nand?"]
    parts = [system, *parts] if system else parts
    at = 0
    for part in parts:
        at = said.index(part, at) + len(part)
    without = text(served, *history)
    assert "<tools>" not in without
    assert "result 1" in without
    assert '"at": 1' in without


def test_results_stay_those_of_a_tool_where_a_template_has_them(served: ServedModel) -> None:
    """A template that shows tools but no calls gets the calls as text in the model's own form."""
    served.tokenizer.chat_template = TEMPLATES["listed"]
    served.tool_format = FORMATS["lfm2"]
    said = text(served, USER, CALLS, *RESULTS, tools=TOOLS)
    calls = "assistant\nHm.\n<|tool_call_start|>[now(at=1), now()]<|tool_call_end|><|im_end|>\n"
    results = [
        f"tool\n<|tool_response_start|>result {i}<|tool_response_end|><|im_end|>\n"
        for i in range(2)
    ]
    assert said.endswith("<|im_start|>".join(["", calls, *results, "assistant\n"]))


def test_several_calls_go_one_by_one_where_a_template_takes_one(served: ServedModel) -> None:
    served.tokenizer.chat_template = TEMPLATES["headers"]
    calls = [{**call(f'{{"at": {i}}}'), "id": str(i)} for i in range(3)]
    results = [{"role": "tool", "tool_call_id": str(i), "content": f"r{i}"} for i in (2, 0)]
    said = text(served, USER, {**ANSWER, "tool_calls": calls}, *results, USER)
    places = [said.index(each) for each in ('"at": 0', '"r0"', '"at": 1', '"at": 2', '"r2"')]
    assert places == sorted(places)


def test_a_message_goes_on_where_it_ends(served: ServedModel) -> None:
    begun = {**ANSWER, "content": "It is"}
    expected = "[user]t?[assistant]It is"
    for fields in ({}, {"add_generation_prompt": False}):
        assert text(served, USER, begun, continue_final_message=True, **fields) == expected
    assert text(served, USER, begun, add_generation_prompt=False) == expected
    parts = {**ANSWER, "content": [{"type": "text", "text": "It is"}]}
    assert text(served, USER, parts, continue_final_message=True) == expected
    served.tokenizer.chat_template = TEMPLATES["thoughts"]
    said = text(served, USER, begun, continue_final_message=True)
    assert said.endswith("\n\nIt is")
    body = {"messages": [USER, begun], "continue_final_message": True, "max_tokens": 2}
    asked = ask_chat(served, read(ChatRequest, json.dumps(body).encode()))
    prompt = asked.choices[0].prepared.prompt_ids
    assert served.tokenizer.decode(prompt, skip_special_tokens=False) == said


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([USER, {**ANSWER, "content": "a"}], {"add_generation_prompt": True}, "got both"),
        ([USER, {**ANSWER, "content": "a", "tool_calls": [call("{}")]}], {}, "without tool_calls"),
        ([USER, {**ANSWER, "tool_calls": [call("{}")]}], {}, "without tool_calls"),
    ],
)
def test_what_cannot_go_on(served: ServedModel, messages: Any, fields: Any, param: str) -> None:
    with pytest.raises(ApiError, match=f"continue_final_message: .*{param}") as caught:
        text(served, *messages, continue_final_message=True, **fields)
    assert caught.value.param == "continue_final_message"


def test_a_template_that_cuts_the_last_message_cannot_go_on(served: ServedModel) -> None:
    served.tokenizer.chat_template = "{% for m in messages %}{{ m.content[:9] }}{% endfor %}"
    with pytest.raises(ApiError, match="writes the last message whole"):
        text(served, USER, {**ANSWER, "content": "It is"}, continue_final_message=True)


def test_fields_for_templates_are_honoured_or_refused(served: ServedModel) -> None:
    named = "{{ reasoning_effort }},{{ verbosity }},{{ documents[0].text }},{{ enable_thinking }}"
    fields: dict[str, Any] = {"reasoning_effort": "low", "verbosity": "high"}
    more = {"documents": [{"text": "d"}], "chat_template_kwargs": {"enable_thinking": False}}
    assert text(served, USER, verbosity="medium", **more) == text(served, USER)
    for name, value in fields.items():
        with pytest.raises(ApiError, match=f"{name}: expected a chat template") as caught:
            text(served, USER, **{name: value})
        assert caught.value.param == name
    for name in ("messages", "add_generation_prompt", "continue_final_message", "chat_template"):
        with pytest.raises(ApiError, match=f"chat_template_kwargs: .* got {name}"):
            text(served, USER, chat_template_kwargs={name: True})
    served.tokenizer.chat_template = named
    assert text(served, USER, **fields, **more) == "low,high,d,False"
