"""Thoughts in answers, as clients of OpenAI's API read them, and in conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage
from openai.types import responses as of_openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

import eecore
from eecore import ThoughtStop
from eecore.calibration_file import ThoughtCalibration
from eecore.output import Piece
from eecore.serving.responses import read_response
from servers import Asker, asker, assert_idle, listening, script
from thinking_models import (
    ALWAYS,
    CALLS,
    CLOSES,
    HYBRID,
    OPENS,
    QUESTION,
    WORDS,
    calibrated,
    write_thinking_model,
)

EVENTS: TypeAdapter[Any] = TypeAdapter(of_openai.ResponseStreamEvent)
PATH = "/v1/chat/completions"
CLOSING = {"logit_bias": {str(CLOSES): 5}, "max_tokens": 24, "temperature": 1.0, "seed": 1}
"""Settings with which the random model thinks for some tokens."""
LOCK = {"name": "lock", "parameters": {"type": "object", "properties": {"door": {}}}}
CALL = '<tool_call>\n{"name": "lock", "arguments": {"door": 1}}\n</tool_call>'
PIECES = [
    Piece(thought="Which "),
    Piece(thought="door?"),
    Piece("On ", ""),
    Piece("it."),
    Piece(CALL),
    Piece(),
]


def server_of(tmp: Any, name: str, template: str, **settings: Any) -> Asker:
    directory = tmp.mktemp("thoughts") / name
    write_thinking_model(directory, template, max_position_embeddings=2048, **settings)
    return asker(eecore.load(directory, kv_cache_tokens=4096), tool_parser="hermes")


@pytest.fixture(scope="module")
def always(tmp_path_factory: pytest.TempPathFactory) -> Asker:
    return server_of(tmp_path_factory, "always", ALWAYS)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Asker:
    return server_of(tmp_path_factory, "hybrid", HYBRID)


@pytest.fixture
def scripted(always: Asker) -> Iterator[Asker]:
    """A server whose answers think, say something and call a tool."""
    engine = always.service.served.engine
    (output,) = eecore.generate(always.service.served.model, [1], max_tokens=6)
    text = "".join(piece.text for piece in PIECES)
    stats = replace(output.stats, thought_tokens=3)
    output = replace(output, text=text, thought="Which door?", finish_reason="stop", stats=stats)
    script(always.service, output, PIECES)
    yield always
    always.service.served.engine = engine


def chat(server: Asker, **fields: Any) -> Any:
    return server.post(PATH, {"messages": QUESTION, **fields})


def test_a_whole_answer_has_its_thought_under_both_names(always: Asker) -> None:
    body = chat(always, **CLOSING).json()
    ChatCompletion.model_validate(body)
    message = body["choices"][0]["message"]
    assert message["content"]
    assert message["reasoning_content"] == message["reasoning"] != ""
    assert "</think>" not in message["reasoning"]
    used = CompletionUsage.model_validate(body["usage"])
    assert used.completion_tokens == 24
    assert used.completion_tokens_details is not None
    assert 1 < (used.completion_tokens_details.reasoning_tokens or 0) < 24


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"return_exit_layers": True},
        {"logprobs": True},
        {"n": 2},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"tools": [{"type": "function", "function": LOCK}]},
    ],
)
def test_a_stream_has_the_same_parts(always: Asker, more: dict[str, Any]) -> None:
    asked = {name: value for name, value in more.items() if name != "stream_options"}
    whole = chat(always, **CLOSING, **asked).json()["choices"]
    with listening(always.service) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        extra = {**CLOSING, **more}
        logprobs = extra.pop("logprobs", None)
        chunks = list(
            client.chat.completions.create(
                model=always.service.served.name,
                messages=QUESTION,
                stream=True,
                logprobs=logprobs,
                extra_body=extra,
            )
        )
    parts = [{"content": "", "reasoning": "", "reasoning_content": ""} for _ in whole]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump())
        for choice in chunk.choices:
            said = {"content": choice.delta.content, **(choice.delta.model_extra or {})}
            assert not (said["content"] and said.get("reasoning"))
            assert not (parts[choice.index]["content"] and said.get("reasoning"))
            for name in parts[choice.index]:
                parts[choice.index][name] += said.get(name) or ""
    for found, choice in zip(parts, whole, strict=True):
        assert found == {name: choice["message"].get(name) or "" for name in found}
    assert_idle(always.service)


def test_an_answer_that_is_all_thought_has_no_content(always: Asker) -> None:
    biases = {str(CLOSES): -100}
    body = chat(always, max_tokens=5, logit_bias=biases, ignore_eos=True).json()
    (choice,) = body["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"]
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


ASKED: list[tuple[str, dict[str, Any]]] = [
    (PATH, {"messages": QUESTION, "max_tokens": 24}),
    ("/v1/responses", {"input": "Why?", "max_output_tokens": 24}),
]


def texts_of(server: Asker, path: str, fields: dict[str, Any]) -> tuple[str, str]:
    """The thought and the text of an answer, which are the same streamed."""
    fields = {**fields, "seed": 1, "temperature": 1.0, "logit_bias": {str(CLOSES): 5}}
    body = server.post(path, fields).json()
    lines = server.post(path, {**fields, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    if path == PATH:
        message = body["choices"][0]["message"]
        whole = message.get("reasoning", ""), message["content"]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        names = ("reasoning", "content")
        streamed = tuple("".join(each.get(name) or "" for each in deltas) for name in names)
    else:
        texts = {item["type"]: item["content"][0]["text"] for item in body["output"]}
        whole = texts.get("reasoning", ""), texts["message"]
        names = ("response.reasoning_text.delta", "response.output_text.delta")
        streamed = tuple(
            "".join(event["delta"] for event in events if event["type"] == name) for name in names
        )
    assert streamed == whole
    return whole


@pytest.mark.parametrize(("path", "fields"), ASKED)
def test_a_thought_can_be_left_out_or_stay_in_the_text(
    always: Asker, path: str, fields: dict[str, Any]
) -> None:
    thought, text = texts_of(always, path, fields)
    assert thought
    assert texts_of(always, path, {**fields, "reasoning_format": "auto"}) == (thought, text)
    for more in ({}, {"reasoning_format": "none"}):
        hidden = texts_of(always, path, {**fields, "include_reasoning": False, **more})
        assert hidden == ("", text)
    without, joined = texts_of(always, path, {**fields, "reasoning_format": "none"})
    assert without == ""
    assert joined.startswith(f"<think>\n{thought}")
    assert joined.partition("</think>")[2].lstrip("\n") == text


def test_a_thought_that_is_left_out_counts(always: Asker) -> None:
    body = chat(always, include_reasoning=False, **CLOSING).json()
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 1
    for more in ({"logprobs": True}, {"return_exit_layers": True}):
        refused = chat(always, include_reasoning=False, **CLOSING, **more)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "include_reasoning"


def test_an_answer_without_a_thought_has_no_such_field(hybrid: Asker) -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 4}
    message = chat(hybrid, **fields).json()["choices"][0]["message"]
    assert set(message) == {"role", "content", "refusal"}


def test_a_completion_is_all_text(always: Asker) -> None:
    prompt = always.service.served.tokenizer.apply_chat_template(QUESTION)
    body = always.post("/v1/completions", {"prompt": prompt, **CLOSING}).json()
    assert "</think>" in body["choices"][0]["text"]
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    fields = {"prompt": prompt, "add_special_tokens": False, "thinking_budget": 0, "max_tokens": 9}
    body = always.post("/v1/completions", fields).json()
    assert body["choices"][0]["text"].startswith("\n</think>\n\n")


def test_a_call_comes_after_the_thought(scripted: Asker) -> None:
    tools = [{"type": "function", "function": LOCK}]
    (choice,) = chat(scripted, tools=tools).json()["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("Which door?", "On it.")
    assert message["tool_calls"][0]["function"]["arguments"] == '{"door": 1}'
    assert choice["finish_reason"] == "tool_calls"


def responses(server: Asker, **settings: Any) -> tuple[list[Any], Any]:
    """The events of a stream, and the last one's response."""
    with listening(server.service) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        events = list(client.responses.create(model=server.service.served.name, **settings))
    for number, event in enumerate(events):
        EVENTS.validate_python(event.model_dump(), strict=False)
        assert event.sequence_number == number
    return events, events[-1].response


def joined(events: Sequence[Any], kind: str) -> str:
    return "".join(event.delta for event in events if event.type == f"response.{kind}.delta")


def test_reasoning_is_an_item_before_the_message_and_the_call(scripted: Asker) -> None:
    tools = [{"type": "function", **LOCK}]
    events, response = responses(scripted, input="Why?", stream=True, tools=tools)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    thought, message, call = response.output
    assert joined(events, "reasoning_text") == thought.content[0].text == "Which door?"
    assert joined(events, "output_text") == message.content[0].text == "On it."
    assert call.arguments == '{"door": 1}'
    assert {item.status for item in response.output} == {"completed"}
    assert (thought.summary, thought.content[0].type) == ([], "reasoning_text")
    assert response.usage.output_tokens_details.reasoning_tokens == 3
    kinds = [event.type.removeprefix("response.") for event in events]
    first = kinds.index("output_item.added")
    assert kinds[first : first + 7] == [
        "output_item.added",
        "content_part.added",
        *["reasoning_text.delta"] * 2,
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]


def test_whole_responses_are_those_of_streams(always: Asker) -> None:
    fields = {"input": "Why?", "max_output_tokens": 24, "temperature": 1.0, "seed": 1}
    fields |= {"logit_bias": {str(CLOSES): 5}, "return_exit_layers": True}
    fields["include"] = ["message.output_text.logprobs"]
    whole = of_openai.Response.model_validate(always.post("/v1/responses", fields).json())
    extra = {name: fields.pop(name) for name in ("seed", "logit_bias", "return_exit_layers")}
    events, response = responses(always, stream=True, extra_body=extra, **fields)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    for one, other in zip(whole.output, response.output, strict=True):
        assert one.content[0].text == other.content[0].text
    assert joined(events, "reasoning_text") == whole.output[0].content[0].text
    assert whole.output_text == response.output_text == joined(events, "output_text")
    layers = [n for event in events for n in getattr(event, "exit_layers", None) or ()]
    assert len(layers) == 24
    scores = whole.output[-1].content[0].logprobs
    assert scores == response.output[-1].content[0].logprobs
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [each.token for each in scores] == [s.token for event in deltas for s in event.logprobs]
    assert len(scores) == 24 - whole.usage.output_tokens_details.reasoning_tokens


def test_a_response_that_is_all_thought_is_incomplete(always: Asker) -> None:
    settings = {"input": "Why?", "max_output_tokens": 5, "stream": True}
    extra = {"logit_bias": {str(CLOSES): -100}}
    _, response = responses(always, extra_body=extra, **settings)
    (item,) = response.output
    assert (item.type, item.status, response.status) == ("reasoning", "incomplete", "incomplete")
    assert response.output_text == ""


# Conversations


def rendered(server: Asker, messages: Sequence[Any], **fields: Any) -> str:
    body = {"messages": messages, **fields}
    tokens = server.post("/tokenize", body).json()["tokens"]
    text: str = server.service.served.tokenizer.decode(tokens, skip_special_tokens=False)
    return text


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_thought_goes_back_as_each_template_wants_it(hybrid: Asker, name: str) -> None:
    answer = {"role": "assistant", "content": "On it.", name: "Which door?"}
    call = {"id": "a", "type": "function", "function": {"name": "lock", "arguments": "{}"}}
    agent = [*QUESTION, {**answer, "tool_calls": [call]}]
    agent.append({"role": "tool", "tool_call_id": "a", "content": "done"})
    assert "<think>\nWhich door?\n</think>\n\nOn it." in rendered(hybrid, agent)
    later = rendered(hybrid, [*QUESTION, answer, *QUESTION])
    assert "On it." in later
    assert "door?" not in later


def test_the_items_of_a_response_go_back_unchanged(scripted: Asker) -> None:
    tools = [{"type": "function", **LOCK}]
    _, response = responses(scripted, input="Why?", stream=True, tools=tools)
    first = {"type": "message", "role": "user", "content": "Why?"}
    call = response.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    items = [item.model_dump(exclude_none=True) for item in response.output]
    body = of_openai_body([first, *items, result])
    (_, answer, _) = read_response(body).messages
    assert answer["reasoning_content"] == "Which door?"
    assert answer["tool_calls"][0]["function"]["name"] == "lock"
    # A thought without an answer is not part of the next one.
    body = of_openai_body([first, items[0], first, items[1]])
    assert "reasoning_content" not in read_response(body).messages[-1]


def of_openai_body(items: Sequence[Any]) -> bytes:
    return json.dumps({"input": items}).encode()


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"enable_thinking": False}, False),
        ({"think": False}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}, False),
        ({"enable_thinking": True, "reasoning_effort": "none"}, True),
    ],
)
def test_a_request_says_whether_to_think(
    hybrid: Asker, fields: dict[str, Any], thinks: bool
) -> None:
    assert rendered(hybrid, QUESTION, **fields).endswith("</think>\n\n") is not thinks


def test_effort_goes_to_a_template_that_names_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    template = "{{ reasoning_effort or 'as usual' }},{{ enable_thinking }}" + HYBRID
    server = server_of(tmp_path_factory, "effort", template)
    assert rendered(server, QUESTION, reasoning_effort="low").startswith("low,True")
    assert rendered(server, QUESTION, reasoning_effort="none").startswith("as usual,False")


def test_a_template_that_cannot_be_told_refuses(always: Asker, intent: eecore.Model) -> None:
    for fields in ({"reasoning_effort": "none"}, {"enable_thinking": False}):
        answer = chat(always, **fields)
        assert answer.status_code == 400
        assert "expected a chat template that names it" in answer.json()["error"]["message"]
        assert chat(asker(intent), **fields, max_tokens=1).status_code == 200


def test_markers_in_words(tmp_path_factory: pytest.TempPathFactory) -> None:
    server = server_of(tmp_path_factory, "words", WORDS, markers=False)
    message = chat(server, max_tokens=4).json()["choices"][0]["message"]
    assert "reasoning" not in message


# Budgets


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_budget": 0},
        {"thinking_token_budget": 0},
        {"thinking_budget_tokens": 0},
        {"reasoning_budget_tokens": 0},
        {"chat_template_kwargs": {"thinking_budget": 0}},
        {"thinking_budget": 0, "chat_template_kwargs": {"thinking_budget": 9}},
    ],
    ids=str,
)
def test_a_budget_by_the_names_of_other_servers(always: Asker, fields: dict[str, Any]) -> None:
    body = chat(always, max_tokens=30, ignore_eos=True, **fields).json()
    assert body.get("ignored_fields") is None
    assert body["choices"][0]["message"]["content"]
    assert "reasoning" not in body["choices"][0]["message"]
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


@pytest.mark.parametrize("name", ["thinking_token_budget", "reasoning_budget_tokens"])
def test_no_budget_is_minus_one_elsewhere(always: Asker, name: str) -> None:
    fields = {"max_tokens": 12, "logit_bias": {str(CLOSES): -100}, "ignore_eos": True}
    for path, prompt in ((PATH, {"messages": QUESTION}), ("/v1/completions", {"prompt": "a"})):
        assert always.post(path, {**prompt, **fields, name: -1}).status_code == 200
    assert chat(always, **fields, **{name: -1}).json()["choices"][0]["message"]["content"] is None


def test_a_thought_that_ends_when_its_answer_stands(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    server = server_of(tmp_path_factory, "calibrated", ALWAYS)
    fields: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "exit": "full"}
    fields["logit_bias"] = {str(CLOSES): -100}
    refused = chat(server, think="calibrated", **fields)
    assert refused.status_code == 400
    assert "expected calibration-thoughts.json beside the model" in refused.text
    model, stop = server.service.served.model, ThoughtStop(0.0, 1, every=6, max_answer=4)
    assert model.network.source is not None
    path = ThoughtCalibration.file_of(model.network.source.directory)
    calibrated(model, stop).save(path)
    for name in ("think", "enable_thinking"):
        body = chat(server, **{name: "calibrated"}, **fields).json()
        assert body.get("ignored_fields") is None
        own = body["usage"]["eecore"]
        assert own["thought_end"] in ("confident", "budget")
        assert own["thought_contract"].startswith("calibrated (at most 0.02")
        assert own["probe_rows"] > 5
    assert "thought_end" not in chat(server, **fields).json()["usage"]["eecore"]


def test_budgets_that_cannot_be(always: Asker, intent: eecore.Model) -> None:
    for server, fields, said in (
        (always, {"thinking_budget": -1}, "thinking_budget: expected None or a whole number, 0.."),
        (always, {"thinking_budget": 1.5}, "thinking_budget: Input should be a valid integer"),
        (always, {"thinking_budget": 3, "max_tokens": 4}, "max_tokens: expected at least 5 with"),
        (asker(intent), {"thinking_budget": 3}, "thinking_budget: expected a model with markers"),
    ):
        answer = chat(server, **fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(said)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_format_binds_the_answer_alone(always: Asker, stream: bool, n: int) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 23]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    fields = {"response_format": form, "thinking_budget": 7, "max_tokens": 200, "n": n}
    fields |= {"temperature": 1.0, "seed": 4, "stream": stream}
    with listening(always.service) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        budget = {"thinking_budget": fields.pop("thinking_budget")}
        made = client.chat.completions.create(
            model=always.service.served.name, messages=QUESTION, extra_body=budget, **fields
        )
        said = [["", ""] for _ in range(n)]
        for chunk in made if stream else [made]:
            for choice in chunk.choices:
                part = choice.delta if stream else choice.message
                said[choice.index][0] += (part.model_extra or {}).get("reasoning") or ""
                said[choice.index][1] += part.content or ""
    for thought, answer in said:
        assert thought
        assert isinstance(json.loads(answer)["a"], int)


def test_a_call_that_must_be_made_comes_after_the_thought(always: Asker) -> None:
    door = {"type": "object", "properties": {"door": {"enum": [1, 2]}}, "required": ["door"]}
    tools = [{"type": "function", "function": {"name": "lock", "parameters": door}}]
    fields = {"tools": tools, "tool_choice": "required", "thinking_budget": 5}
    fields["return_exit_layers"] = True
    (choice,) = chat(always, **fields, max_tokens=120).json()["choices"]
    assert choice["token_ids"].count(CALLS) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["door"] in (1, 2)


DOOR = {"type": "object", "properties": {"door": {"enum": [1, 2]}}, "required": ["door"]}
DOOR["additionalProperties"] = False
LOCKS = {"name": "lock", "parameters": DOOR, "strict": True}
CALLING = {"tool_choice": "required", "temperature": 1.0}
THINKING = {"thinking_budget": 6, "logit_bias": {str(OPENS): 8}}
ANSWERING = {"structured_outputs": {"choice": ["It is locked."]}}


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_of_three_turns_thinks_in_each(hybrid: Asker, stream: bool) -> None:
    """With OpenAI's client, which sends its messages back as they are."""
    tools: Any = [{"type": "function", "function": LOCKS}]
    messages: list[Any] = list(QUESTION)
    with listening(hybrid.service) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        for turn in range(3):
            more = {"tools": tools, **CALLING} if turn < 2 else {}
            fields: Any = {"model": "hybrid", "messages": messages, "seed": turn, **more}
            fields["extra_body"] = THINKING if more else {**THINKING, **ANSWERING}
            if stream:
                with client.chat.completions.stream(**fields) as events:
                    message: Any = events.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**fields).choices[0].message
            assert message.reasoning_content == message.reasoning != ""
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                assert json.loads(call.function.arguments)["door"] in (1, 2)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
    assert [each["role"] for each in messages[1:]] == ["assistant", "tool"] * 2 + ["assistant"]
    assert messages[-1]["content"] == "It is locked."
    assert rendered(hybrid, messages, tools=tools).count("</think>") == 3
    messages += QUESTION  # a new question: earlier thoughts are left out
    assert "</think>" not in rendered(hybrid, messages, tools=tools)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_over_responses_thinks_in_each_turn(hybrid: Asker, stream: bool) -> None:
    tools: Any = [{"type": "function", **LOCKS}]
    items: list[Any] = list(QUESTION)
    with listening(hybrid.service) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        for turn in range(3):
            more = {"tools": tools, **CALLING} if turn < 2 else {}
            extra = {**THINKING, "seed": turn, **({} if more else ANSWERING)}
            fields: Any = {"model": "hybrid", "input": items, "extra_body": extra, **more}
            if stream:
                with client.responses.stream(**fields) as events:
                    response: Any = events.get_final_response()
            else:
                response = client.responses.create(**fields)
            assert response.output[0].content[0].text
            items += [item.model_dump(exclude_none=True) for item in response.output]
            for call in response.output[1:] if more else ():
                result = {"type": "function_call_output", "call_id": call.call_id}
                items.append({**result, "output": "done"})
    assert response.output_text == "It is locked."
    answers = [m for m in read_response(of_openai_body(items)).messages if m["role"] == "assistant"]
    assert all(answer["reasoning_content"] for answer in answers)
    assert len(answers) == 3
