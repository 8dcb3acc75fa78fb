"""Constrained answers, requested as OpenAI's and vLLM's clients do."""

from __future__ import annotations

import asyncio
import enum
import json
import re
import threading
from dataclasses import replace
from typing import Annotated, Any

import httpx
import llguidance
import openai
import pydantic
import pytest

import eecore
from eecore import Guide
from eecore.planning.grammars import Grammars
from eecore.serving import guides
from eecore.serving.answering import STUCK_SECONDS
from eecore.serving.protocol import ChatRequest
from eecore.serving.tool_calls import FORMATS, ToolCall
from eecore.serving.xml_calls import tagged_parameters
from servers import Asker, asker, assert_idle, events

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

# Fields of a body, and the guide that they mean.
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


def test_guides_that_cost_too_much_keep_no_request_waiting(
    server: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more guides than threads that prepare requests."""
    goes_on = threading.Event()
    compiled = Grammars.compiled

    def late(self: Grammars, guide: eecore.Guide) -> Any:
        if "late" in guide.text:
            assert goes_on.wait(60)
            raise eecore.GuideError("guide: expected one within bounds, got one too complex")
        return compiled(self, guide)

    monkeypatch.setattr(Grammars, "compiled", late)

    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        def post(**fields: Any) -> Any:
            return client.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 3, **fields})

        costly = [asyncio.create_task(post(guided_regex=f"late {i}")) for i in range(5)]
        while len(server.service._waiting) < 5:
            await asyncio.sleep(0)
        try:
            said = [await post(), await post(guided_regex="[a-c]{9}"), await client.get("/health")]
            for key in server.service._waiting:
                server.service._waiting[key] -= STUCK_SECONDS
            said.append(await client.get("/health"))
        finally:
            goes_on.set()
        return [*said, *await asyncio.gather(*costly), await client.get("/health")]

    plain, guided, well, ill, *refused, again = server.run(ask)
    assert plain.status_code == guided.status_code == 200
    assert re.fullmatch("[a-c]+", guided.json()["choices"][0]["text"])
    assert (well.status_code, well.json()) == (200, {"status": "ok"})
    assert (ill.status_code, ill.json()) == (503, {"status": "compiling no guides"})
    for answer in refused:
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "guided_regex"
        assert "within bounds, got one too complex" in answer.json()["error"]["message"]
    assert again.json() == {"status": "ok"}
    assert_idle(server.service)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    parameters["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("lock", door={"enum": ["front", "garage"]}),
    tool("light", level={"type": "integer", "format": "int32", "minimum": 0, "maximum": 9}),
    {"type": "function", "function": {"name": "off"}},
]
LIGHT = {"type": "function", "function": {"name": "light"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """A choice of some tools, as OpenAI has it."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", LIGHT, allowed("required", "light")])
@pytest.mark.parametrize("parser", ["auto", "llama3", "mistral", "mistral3", "qwen3_coder"])
def test_a_call_that_has_to_be_made(
    intent: eecore.Model, parser: str, choice: Any, stream: bool
) -> None:
    server = asker(intent, tool_parser=parser)
    body = {"messages": [{"role": "user", "content": PROMPT}], "tools": TOOLS, "stream": stream}
    body |= {"tool_choice": choice, "temperature": 0.5, "seed": 3, "max_tokens": 120}
    answer = server.post(CHATS, body)
    if stream:
        chunks = [each for chunk in events(answer.text) for each in chunk["choices"]]
        parts = [c for each in chunks for c in each["delta"].get("tool_calls", ())]
        functions = [part["function"] for part in parts if part["index"] == 0]
        name = functions[0]["name"]
        arguments = "".join(function["arguments"] for function in functions)
        reason = chunks[-1]["finish_reason"]
    else:
        (only,) = answer.json()["choices"]
        function = only["message"]["tool_calls"][0]["function"]
        name, arguments, reason = function["name"], function["arguments"], only["finish_reason"]
    given = json.loads(arguments)
    assert reason == "tool_calls"
    if choice != "required":
        assert name == "light"
    valid = {"lock": {"door": ("front", "garage")}, "light": {"level": range(10)}, "off": {}}[name]
    assert list(given) == list(valid) if valid else isinstance(given, dict)
    assert all(given[key] in values for key, values in valid.items())


@pytest.mark.parametrize(
    ("fields", "parser", "param", "message"),
    [
        ({"tools": None}, "hermes", "tool_choice", r"expected a tool of \[\]"),
        ({"tool_choice": {"type": "function"}}, "hermes", "tool_choice", "expected a tool of"),
        ({"tool_choice": "lock"}, "hermes", "tool_choice", "expected none, auto, required"),
        ({}, "none", "tool_choice", "--tool-parser"),
        ({"guided_regex": "a"}, "hermes", "guided_regex", "expected at most one"),
        ({"tools": [tool("a", b={"pattern": "("})]}, "hermes", "tool_choice", "can be compiled"),
        ({"tools": [tool("a", b={"const": 2**60})]}, "hermes", "tool_choice", "tool_choice: const"),
        (
            {"tools": [tool("a"), tool("b", c={"items": [{"type": ["null", "any"]}]})]}
            | {"tool_choice": {"type": "function", "function": {"name": "a"}}},
            "hermes",
            "tools",
            r"tools\[1\].function.parameters: properties.c.items\[0\].type: .* got 'any'",
        ),
        (
            {"tools": [tool("a", b={"type": "str"})], "tool_choice": "none"},
            "none",
            "tools",
            "expected array, .*, string, got 'str'",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"anyOf": [{"type": "any"}]}}},
            "hermes",
            "response_format",
            r"response_format: anyOf\[0\].type: expected .* got 'any'",
        ),
        ({"tools": [{"type": "function"}]}, "hermes", "tools", r"tools\[0\].function: expected"),
        ({"tools": [{"function": {"name": ""}}]}, "hermes", "tools", r"tools\[0\].function.name"),
        (
            {"tools": [*TOOLS, {"type": "custom", "custom": {"name": "a"}}]},
            "hermes",
            "tools",
            r"tools\[3\].type: expected function, got 'custom'",
        ),
        (
            {"tools": [{"function": {"name": "a", "parameters": [1]}}]},
            "hermes",
            "tools",
            r"tools\[0\].function.parameters: expected a JSON schema",
        ),
        ({"tool_choice": {}}, "hermes", "tool_choice", "expected a tool of"),
        ({"tool_choice": allowed("required", "fly")}, "hermes", "tool_choice", "got .*fly"),
        ({"tool_choice": allowed("auto", "light", "fly")}, "none", "tool_choice", "got .*fly"),
        ({"tool_choice": allowed("required")}, "hermes", "tool_choice", "expected a tool of"),
        ({"tool_choice": allowed("maybe", "light")}, "hermes", "tool_choice", "with a mode"),
        (
            {"tool_choice": {"type": "custom", "custom": {"name": "light"}}},
            "hermes",
            "tool_choice",
            "expected a tool of",
        ),
    ],
)
def test_a_call_that_cannot_be_made(
    intent: eecore.Model, fields: dict[str, Any], parser: str, param: str, message: str
) -> None:
    server = asker(intent, tool_parser=parser)
    body = {"messages": [{"role": "user", "content": PROMPT}], "tools": TOOLS}
    answer = server.post(CHATS, body | {"tool_choice": "required"} | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == param
    assert re.search(message, error["message"])


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Lamp(pydantic.BaseModel):
    colour: Colour
    inner: list[Lamp] = pydantic.Field(max_length=1)


class Shade(pydantic.BaseModel):
    """A tool's argument whose definitions have the same names as another tool's."""

    class Colour(pydantic.BaseModel):
        level: Annotated[int, pydantic.Field(ge=0, le=3)]

    colour: Colour


DRAFT_7 = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "definitions": {"Colour": {"enum": ["green"]}},
    "properties": {"colour": {"$ref": "#/definitions/Colour"}},
    "required": ["colour"],
}
REFERRING = [
    *map(openai.pydantic_function_tool, (Lamp, Shade)),
    {"type": "function", "function": {"name": "Seven", "parameters": DRAFT_7}},
]


def test_tools_that_are_allowed_are_all_that_is_called(intent: eecore.Model) -> None:
    server = asker(intent, tool_parser="hermes")
    for name in ("off", "lock"):
        said = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
        body = {"messages": [{"role": "user", "content": PROMPT}], "tools": TOOLS}
        body |= {"tool_choice": allowed("auto", "off"), "max_tokens": 120, "guided_choice": [said]}
        message = server.post(CHATS, body).json()["choices"][0]["message"]
        if name == "off":
            assert message["tool_calls"][0]["function"]["name"] == "off"
        else:
            assert message["content"] == said


def read_chat(**fields: Any) -> ChatRequest:
    return ChatRequest(messages=[{"role": "user", "content": PROMPT}], **fields)


def guide_of(body: ChatRequest, parser: str) -> Guide:
    """The guide of a request to a model whose calls are of a family."""
    made = guides.guide_of(body, guides.expected_calls(body, FORMATS[parser]))
    assert made is not None
    return made[1]


def accepts(guide: Guide, text: str) -> bool:
    """Whether a guide accepts a whole text."""
    tokenizer = llguidance.LLTokenizer("byte")
    form = {"json": "json_schema"}.get(guide.kind, guide.kind)
    matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from(form, guide.text))
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@pytest.mark.parametrize("parser", ["hermes", "llama3", "mistral"])
def test_definitions_of_a_tool_are_its_own(parser: str) -> None:
    """Tools described by pydantic, beside tools with definitions of the same names."""
    assert all("$ref" in json.dumps(tool) for tool in REFERRING)
    guide = guide_of(read_chat(tools=REFERRING, tool_choice="required"), parser)
    form = FORMATS[parser]
    lamp = {"colour": "red", "inner": [{"colour": "blue", "inner": []}]}
    good = {"Lamp": lamp, "Shade": {"colour": {"level": 3}}, "Seven": {"colour": "green"}}
    for name in good:
        for arguments in good.values():
            call: Any = {"name": name, form.arguments: arguments}
            said = json.dumps([call] if form.is_list else call)
            assert accepts(guide, form.begins + said + form.ends) == (arguments is good[name])


TRIP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "title": "Place"},
        "unit": {"enum": ["c", "f"]},
        "days": {"$ref": "#/$defs/Days", "description": "How many."},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    },
    "required": ["place"],
    "$defs": {"Days": {"type": "array", "items": {"type": "integer"}}},
}
LIMITED = tool("limited", code={"type": "string", "pattern": "^[a-z]{2}$"})


def tagged(name: str, **values: str) -> str:
    parts = [f"<parameter={each}>\n{value}\n</parameter>\n" for each, value in values.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


def test_calls_as_tags_follow_the_schemas() -> None:
    """A call is JSON where its schema asks more of a text than tags can hold to."""
    trip = {"type": "function", "function": {"name": "trip", "parameters": TRIP}}
    tools = [trip, TOOLS[2], LIMITED]
    guide = guide_of(read_chat(tools=tools, tool_choice="required"), "qwen3_coder")
    json_call = '<tool_call>\n{"name": "limited", "arguments": {"code": "%s"}}\n</tool_call>'
    good = [
        tagged("trip", place='Zürich "See"\n\n<b>'),
        tagged("trip", place="", unit="c", days="[1, 2]", note="null"),
        tagged("off"),
        json_call % "ab",
    ]
    bad = [
        tagged("trip"),
        tagged("trip", place="a", unit="k"),
        tagged("trip", place="a", days="[1.5]"),
        tagged("trip", place="a", more="b"),
        tagged("off", place="a"),
        tagged("limited", code="ab"),
        json_call % "abc",
        "Let me see.",
    ]
    assert [accepts(guide, each) for each in [*good, *bad]] == [True] * len(good) + [False] * 8
    form = {"type": "json_schema", "json_schema": {"schema": {"properties": {}}}}
    either = guide_of(read_chat(tools=tools, response_format=form), "qwen3_coder")
    assert all(accepts(either, each) for each in ("{}", good[0], tagged("limited", code="ab")))
    assert not accepts(either, "no")


def test_calls_in_python_follow_the_schemas() -> None:
    """Parameters come in the schema's order; the model's form has several calls in a list."""
    trip = {"type": "function", "function": {"name": "trip", "parameters": TRIP}}
    optional = tool("either", a={"type": "integer"}, b={"type": "boolean"})
    optional["function"]["parameters"]["required"] = []
    late = tool("late", a={"type": "integer"}, b={"type": "boolean"})
    late["function"]["parameters"]["required"] = ["b"]
    rich = {"name": "rich", "parameters": {"properties": {}, "minProperties": 0}}
    tools = [trip, TOOLS[2], optional, late, LIMITED, {"type": "function", "function": rich}]
    good = [
        'trip(place="Zürich \\"See\\"")',
        'trip(place="", unit="c", days=[1, 2], note=null)',
        'trip(place="a", note="b"), off(), either()',
        "either(a=1), either(b=true), either(a=1, b=false), late(b=true), late(a=1, b=true)",
        'limited(code="ab")',
        '{"name": "rich", "arguments": {}}',
    ]
    bad = [
        "",
        "trip()",
        'trip(unit="c", place="a")',
        'trip(place="a", unit="k")',
        'trip(place="a", days=[1.5])',
        'trip(place="a",)',
        'trip(place="a", more="b")',
        "either(, b=true)",
        "late()",
        "late(a=1)",
        'limited(code="abc")',
        "other()",
    ]
    body = read_chat(tools=tools, tool_choice="required")
    calls, guide = guides.expected_calls(body, FORMATS["lfm2"]), guide_of(body, "lfm2")
    assert calls is not None
    for said in (*good, *bad):
        text = f"<|tool_call_start|>[{said}]<|tool_call_end|>"
        assert accepts(guide, text) == (said in good), said
        assert said in bad or all(map(is_call, calls.reader().add(text, last=True)))
    one = guide_of(body.model_copy(update={"parallel_tool_calls": False}), "lfm2")
    assert accepts(one, "<|tool_call_start|>[off()]<|tool_call_end|>")
    assert not accepts(one, "<|tool_call_start|>[off(), off()]<|tool_call_end|>")
    form = {"type": "json_schema", "json_schema": {"schema": {"properties": {}}}}
    either = guide_of(read_chat(tools=tools, response_format=form), "lfm2")
    assert accepts(either, '<|tool_call_start|>[off(a=1, b="c")]<|tool_call_end|>')
    assert accepts(either, "{}")
    assert not accepts(either, "no")


def is_call(part: str | ToolCall) -> bool:
    return isinstance(part, ToolCall)


def test_schemas_that_refer_to_themselves_are_read_once() -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/A"}] * 40}
    schema = {"properties": {"a": loop, "b": {"type": "string"}}, "$defs": {"A": loop}}
    read = tagged_parameters(schema)
    assert read == {"a": {**loop, "$defs": {"A": loop}}, "b": None}


INNER = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
SCHEMAS: dict[str, tuple[dict[str, Any], str, str]] = {
    "root": ({"$ref": "#/$defs/X", "$defs": {"X": INNER}}, '{"a": 1}', '{"a": 2}'),
    "itself": (
        {"properties": {"k": {"$ref": "#"}}, "additionalProperties": False},
        '{"k": {"k": {}}}',
        '{"k": {"z": {}}}',
    ),
    "anchor": (
        {"$defs": {"Y": {"$anchor": "y", **INNER}}, "properties": {"k": {"$ref": "#y"}}},
        '{"k": {"a": 1}}',
        '{"k": {"a": 2}}',
    ),
    "id": (
        {"$id": "x:y", "$defs": {"Y": INNER}, "properties": {"k": {"$ref": "x:y#/$defs/Y"}}},
        '{"k": {"a": 1}}',
        '{"k": {"a": 2}}',
    ),
    "data": (
        {"properties": {"$ref": {"const": {"$ref": "#/a"}}}},
        '{"$ref": {"$ref": "#/a"}}',
        "1",
    ),
    "null too": ({"type": ["object", "null"]}, "{}", "null"),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_references_of_a_tool_lead_into_its_own_schema(name: str) -> None:
    schema, good, bad = SCHEMAS[name]
    functions = [{"name": "first", "parameters": INNER}, {"name": "it", "parameters": schema}]
    tools = [{"type": "function", "function": function} for function in functions]
    guide = guide_of(read_chat(tools=tools, tool_choice="required"), "llama3")
    for arguments, fits in ((good, True), (bad, False)):
        call = f'{{"name": "it", "parameters": {arguments}}}'
        assert accepts(guide, call) == fits


def test_a_named_call_has_its_markers_as_tokens() -> None:
    form = replace(FORMATS["mistral3"], tokens=(("[TOOL_CALLS]", 9), ("[ARGS]", 32)))
    body = read_chat(tools=TOOLS, tool_choice=LIGHT)
    made = guides.guide_of(body, guides.expected_calls(body, form))
    assert made is not None
    assert made[1].text.startswith("start: <[9]> call\ncall: call_0\n")
    assert 'call_0: "light" <[32]> call_0_json\n' in made[1].text
    assert accepts(guide_of(body, "mistral3"), '[TOOL_CALLS]light[ARGS]{"level": 3}')
    assert not accepts(guide_of(body, "mistral3"), '[TOOL_CALLS]light[ARGS]{"level": 10}')


def test_one_call_of_a_list_where_no_more_are_wanted() -> None:
    call = '{"name": "off", "arguments": {}}'
    for parallel, most in ((False, 1), (True, 2), (None, 2)):
        body = read_chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel)
        guide = guide_of(body, "mistral")
        for count in (1, 2):
            said = f"[TOOL_CALLS][{', '.join([call] * count)}]"
            assert accepts(guide, said) == (count <= most)


@pytest.mark.parametrize(
    "form", [{}, {"type": None}, {"type": "json_object", "schema": 3}, {"type": "structural_tag"}]
)
def test_response_formats_that_are_none(server: Asker, form: Any) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "response_format": form}
    answer = server.post(CHATS, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"


def test_settings_of_structured_outputs_that_matter_are_refused(server: Asker) -> None:
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        body = {"prompt": PROMPT, "structured_outputs": {"json": SCHEMA, name: True}}
        error = server.post(COMPLETIONS, body).json()["error"]
        assert error["param"] == "structured_outputs"
        assert name in error["message"]
    fields = {"json": SCHEMA, "disable_fallback": True, "disable_any_whitespace": False}
    body = {"prompt": PROMPT, "structured_outputs": fields, "max_tokens": 2}
    assert server.post(COMPLETIONS, body).status_code == 200
