"""Every field of a request affects the answer, is on a list of ignored ones, or is refused."""

from __future__ import annotations

import json
import re
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as of_completions
from openai.types.chat import completion_create_params as of_chats
from openai.types.responses import response_create_params as of_responses

from eecore.serving import protocol
from eecore.serving.elsewhere import NOTHING, OFF, WITHOUT_EFFECT
from eecore.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    Request,
    ResponsesRequest,
    StreamOptions,
    TokenizeRequest,
    read,
)
from eecore.serving.refusals import ApiError
from servers import Asker, events

USER = [{"role": "user", "content": "lock the front door"}]
NEEDED: dict[type[Request], dict[str, Any]] = {
    ChatRequest: {"messages": USER},
    CompletionRequest: {"prompt": "lock the front door"},
    ResponsesRequest: {"input": "lock the front door"},
}
PATHS = {
    ChatRequest: "/v1/chat/completions",
    CompletionRequest: "/v1/completions",
    ResponsesRequest: "/v1/responses",
}
OPENAIS = {
    ChatRequest: (
        of_chats.CompletionCreateParamsNonStreaming,
        of_chats.CompletionCreateParamsStreaming,
    ),
    CompletionRequest: (
        of_completions.CompletionCreateParamsNonStreaming,
        of_completions.CompletionCreateParamsStreaming,
    ),
    ResponsesRequest: (
        of_responses.ResponseCreateParamsNonStreaming,
        of_responses.ResponseCreateParamsStreaming,
    ),
}
OF_OPENAI = [
    (kind, name)
    for kind, params in OPENAIS.items()
    for name in sorted({name for each in params for name in get_type_hints(each)})
]
# Fields without effect, as clients send them.
SENT: dict[str, Any] = {
    "access_programs": {"cyber": "standard"},
    "max_tool_calls": 3,
    "prediction": {"type": "content", "content": "lock"},
    "prompt_cache_key": "a",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "a",
    "service_tier": "flex",
    "store": True,
}
# Fields that mean something, as clients send them.
MEANT: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "background": True,
    "background_options": {"completion_window": "soonest"},
    "context_management": [{"type": "compaction"}],
    "conversation": "conv_1",
    "function_call": {"name": "a"},
    "functions": [{"name": "a"}],
    "image": {"context_compression": "enabled"},
    "modalities": ["text", "audio"],
    "moderation": {"model": "a"},
    "prompt": {"id": "pmpt_1"},  # a field of completions
    "suffix": "x",
    "truncation": "auto",
    "web_search_options": {},
}


def request(kind: type[Request], **fields: Any) -> Request:
    return read(kind, json.dumps(NEEDED[kind] | fields).encode())


def refusal(kind: type[Request], **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        request(kind, **fields)
    return caught.value


@pytest.mark.parametrize(("kind", "name"), OF_OPENAI)
def test_what_becomes_of_each_field_of_openais_client(kind: type[Request], name: str) -> None:
    if name in kind.model_fields:  # a value that means nothing shows that it is looked at
        error = refusal(kind, **{name: of_no_kind(name)})
        assert error.param == name
    elif name in WITHOUT_EFFECT:
        request(kind, **{name: SENT[name]})
    else:
        error = refusal(kind, **{name: MEANT[name]})
        assert (error.param, error.code) == (name, "not_supported")
        for value in (None, *OFF.get(name, ())):
            request(kind, **{name: value})


def of_no_kind(name: str) -> Any:
    """A value that no field of that name can have."""
    objects = ("logit_bias", "metadata", "reasoning", "response_format", "stream_options", "text")
    objects += ("tool_choice",)
    return [3.5] if name in objects else {"a": {}}


HONOURED: list[tuple[str, Any, str]] = [
    ("max_new_tokens", 3, "max_tokens"),
    ("n_predict", 3, "max_tokens"),
    ("maxTokens", 3, "max_tokens"),
    ("stop_sequences", ["a"], "stop"),
    ("stopping_strings", ["a"], "stop"),
    ("candidateCount", 2, "n"),
    ("regex", "a", "guided_regex"),
    ("json_schema", {"type": "object"}, "guided_json"),
    ("grammar", 'root ::= "x"', "guided_grammar"),
]


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize(("name", "value", "field"), HONOURED)
def test_the_same_field_by_another_name(
    kind: type[Request], name: str, value: Any, field: str
) -> None:
    if kind is ResponsesRequest:
        field = "max_output_tokens" if field == "max_tokens" else field
        if field not in kind.model_fields:
            assert refusal(kind, **{name: value}).param == name
            return
    assert getattr(request(kind, **{name: value}), field) == value
    request(kind, **{name: value, field: value})
    others: dict[type, Any] = {int: 1, str: "b", list: ["b"], dict: {"a": {}}}
    for wrong in ({name: [[]]}, {name: value, field: others[type(value)]}):
        if field != "guided_json" or field in wrong:  # it is of any kind here
            assert refusal(kind, **wrong).param == name


def test_no_limit_and_no_text_by_other_names() -> None:
    read = request(ChatRequest, n_predict=-1, seed=-1, grammar="", stop_sequences=[])
    assert isinstance(read, ChatRequest)
    assert (read.max_tokens, read.guided_grammar, read.stop) == (None, None, None)
    two = refusal(ChatRequest, max_new_tokens=3, max_completion_tokens=5)
    assert "max_completion_tokens=5" in two.message


REFUSED: list[tuple[dict[str, Any], str]] = [
    # other settings of what eecore has, and its own names misspelt
    ({"max_length": 3}, "max_tokens"),
    ({"t_max_predict_ms": 1}, "max_tokens"),
    ({"max_answer_tokens": 3}, "max_tokens"),
    ({"max_token": 3}, "max_tokens"),
    ({"temprature": 1}, "temperature"),
    ({"topP": 0.5}, "top_p"),
    ({"k": 3}, "top_k"),
    ({"random_seed": 3}, "seed"),
    ({"logits_bias": {"5": -100}}, "logit_bias"),
    ({"do_sample": False}, "temperature"),
    ({"repeat_penalty": 1.2}, "repetition_penalty"),
    ({"top_logprobs_num": 3}, "logprobs"),
    ({"n_probs": 3}, "logprobs"),
    ({"response_schema": {"type": "object"}}, "response_format"),
    ({"format": "json"}, "response_format"),
    ({"extra_body": {"max_tokens": 3}}, "fields of the body"),
    ({"options": {"num_predict": 3}}, "fields of the body"),
    ({"gen_kwargs": {"max_tokens": 3}}, "fields of the body"),
    ({"generationConfig": {"maxOutputTokens": 3}}, "fields of the body"),
    ({"bad_words_ids": [[5]]}, "logit_bias"),
    ({"functions": [{"name": "a"}]}, "tools"),
    ({"system": "x"}, "messages"),
    ({"thinking_mode": True}, "chat_template_kwargs"),
    ({"reasoning_budget_message": "Well."}, "chat_template_kwargs"),
    ({"reasoning": {"effort": "low"}}, "reasoning_effort"),
    ({"separate_reasoning": False}, "reasoning_format"),
    ({"exit_mode": "full"}, "exit"),
    ({"continuous_usage_stats": True}, "stream_options"),
    # what it does not have
    *(
        ({name: value}, "none, since it is not supported")
        for name, value in {
            "no_repeat_ngram_size": 2,
            "min_tokens": 3,
            "min_new_tokens": 20,
            "use_beam_search": True,
            "num_beams": 4,
            "guidance_scale": 3.0,
            "typical_p": 0.5,
            "dry_multiplier": 0.8,
            "mirostat": 2,
            "mirostat_tau": 5.0,
            "penalty_alpha": 0.6,
            "skip_special_tokens": False,
            "lora_path": "x",
            "custom_logit_processor": "x",
            "truncate_prompt_tokens": 3,
            "negative_prompt": "x",
            "num_ctx": 512,
            "cache_salt": "x",
            "stream_reasoning": False,
        }.items()
    ),
    # within other fields
    ({"stream": True, "stream_options": {"included_usage": True}}, "include_usage"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": {}, "a": 1}}}, ""),
    ({"response_format": {"type": "json_object", "value": {"type": "object"}}}, "none"),
    ({"response_format": {"type": "json_schema", "schema": {"type": "object"}}}, ""),
    ({"response_format": {"type": "text", "schema": {"type": "object"}}}, ""),
]


@pytest.mark.parametrize(("fields", "ours"), REFUSED)
def test_what_would_change_an_answer_elsewhere_is_refused(
    fields: dict[str, Any], ours: str
) -> None:
    *_, name = fields
    for kind in (ChatRequest, CompletionRequest):
        error = refusal(kind, **fields)
        assert (error.param, error.code) == (name, "not_supported")
        assert re.match(rf"{name}[\w.]*: expected {ours}", error.message), error.message
    if name not in {*OFF, "response_format", "stream_options"}:
        for nothing in NOTHING:
            request(ChatRequest, **{name: nothing})


def test_settings_that_are_switched_off_ask_for_nothing() -> None:
    """User interfaces send the defaults of everything."""
    off = {"dry_multiplier": 0, "mirostat": 0, "xtc_probability": 0, "repeat_penalty": 1}
    rest = {"dry_base": 1.75, "mirostat_tau": 5, "xtc_threshold": 0.1, "repeat_last_n": 64}
    assert request(ChatRequest, **off, **rest).ignored == {}
    for name, value in rest.items():
        assert refusal(ChatRequest, **{name: value}).param == name


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionRequest, {"tools": [{"type": "function"}]}),
        (CompletionRequest, {"max_completion_tokens": 3}),
        (CompletionRequest, {"top_logprobs": 2}),
        (CompletionRequest, {"messages": USER}),
        (ChatRequest, {"prompt": "a"}),
        (ChatRequest, {"echo": True}),
        (ChatRequest, {"input": "a"}),
        (ChatRequest, {"text": {"format": {"type": "text"}}}),
        (CompletionRequest, {"instructions": "a"}),
        (ResponsesRequest, {"messages": USER}),
        (ResponsesRequest, {"n": 2}),
        (ResponsesRequest, {"max_completion_tokens": 3}),
    ],
)
def test_a_field_of_the_other_endpoint_is_refused(
    kind: type[Request], fields: dict[str, Any]
) -> None:
    ((name, value),) = fields.items()
    assert refusal(kind, **fields).param == name
    for nothing in (None, type(value)()):
        request(kind, **{name: nothing})
    read(TokenizeRequest, json.dumps({"messages": USER, **fields}).encode())


def test_fields_of_a_thought_go_with_chats() -> None:
    error = refusal(CompletionRequest, include_reasoning=False)
    assert error.message.startswith("include_reasoning: expected none, since it is not supported")
    request(CompletionRequest, include_reasoning=True, reasoning_format="none")
    for kind in (ChatRequest, ResponsesRequest):
        request(kind, include_reasoning=False, reasoning_format="none")
        assert refusal(kind, reasoning_format="raw").param == "reasoning_format"


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("streams", [False, True])
def test_unknown_fields_are_named_in_the_answer(
    server: Asker, kind: type[Request], streams: bool
) -> None:
    body = {**NEEDED[kind], "trace_id": 3, "user_agent": "a", "nothing": None}
    body |= {"stream": True, "stream_options": {"more": 1}} if streams else {}
    names = ["trace_id", "user_agent", *(["stream_options.more"] if streams else [])]
    answer = server.post(PATHS[kind], body)
    if not streams:
        assert answer.json()["ignored_fields"] == names
    elif kind is ResponsesRequest:
        assert json.dumps(names).replace(" ", "") in answer.text
    else:
        assert all(chunk["ignored_fields"] == names for chunk in events(answer.text))


def test_the_number_of_unknown_fields_is_bounded(server: Asker) -> None:
    many = {f"field{number}": 1 for number in range(protocol.MAX_UNKNOWN + 1)}
    assert "at most 256 unknown fields" in refusal(ChatRequest, **many).message
    answer = server.post("/tokenize", {"prompt": "a", "x" * 999: 1})
    assert answer.json()["ignored_fields"] == ["x" * protocol.MAX_NAME]


@pytest.mark.parametrize(
    ("options", "streams", "is_good"),
    [
        (None, False, True),
        ({}, False, True),
        ({"include_usage": None}, False, True),
        ({"include_usage": True}, False, False),
        ({"include_obfuscation": False}, False, False),
        ({"include_usage": True}, True, True),
        ({"include_usage": False, "include_obfuscation": True}, True, True),
        ({"include_usage": "yes"}, True, False),
        ({"include_usage": 1}, True, False),
        ({"continuous_usage_stats": False}, True, True),
        ({"continuous_usage_stats": True}, True, True),
        ({"continuous_usage_stats": 1}, True, False),
        ({"more": 1}, True, True),
    ],
)
@pytest.mark.parametrize("kind", PATHS)
def test_stream_options(
    server: Asker, kind: type[Request], options: Any, streams: bool, is_good: bool
) -> None:
    body = {**NEEDED[kind], "stream": streams, "stream_options": options}
    answer = server.post(PATHS[kind], body)
    if kind is ResponsesRequest and options and options.get("continuous_usage_stats"):
        is_good = False  # its usage is part of the last event
    assert answer.status_code == (200 if is_good else 400)
    if not is_good:
        assert answer.json()["error"]["param"] == "stream_options"
    assert set(get_type_hints(of_chats.ChatCompletionStreamOptionsParam)) <= set(
        StreamOptions.model_fields
    )


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatRequest, {"top_p": 0}),
        (CompletionRequest, {"top_p": 0.0}),
        (CompletionRequest, {"top_p": -0.0}),
    ],
)
def test_top_p_0_keeps_the_most_probable_token(
    server: Asker, kind: type[Request], fields: dict[str, Any]
) -> None:
    body = NEEDED[kind] | {"max_tokens": 8}
    hot = {"temperature": 2.0, "seed": 3}
    greedy, same, other = (
        server.post(PATHS[kind], body | each).json()["choices"] for each in ({}, hot | fields, hot)
    )
    assert greedy == same != other
