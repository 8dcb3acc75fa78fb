"""Tool calls in an answer's text: found in whole answers and streams alike, or left as text."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

import eecore
from chat_templates import TEMPLATES
from eecore.serving.asking import ask_chat
from eecore.serving.protocol import ChatRequest
from eecore.serving.settings import ServerSettings
from eecore.serving.tool_calls import FORMATS, CallReader, ToolCall, ToolFormat, tool_format
from servers import Asker, asker, events, script

NAMES = ("weather", "time")
TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]
PLACE = '{"place": "Zürich \\"am See\\" }]</tool_call>", "days": [1.0, {}]}'
WEATHER, TIME = ("weather", PLACE), ("time", "{}")
CALL = f'{{"name": "weather", "arguments": {PLACE}}}'
LLAMA = f'{{"name": "weather", "parameters": {PLACE}}}'

SCHEMAS: dict[str, Any] = {
    "weather": {
        "$defs": {"Days": {"type": "array", "items": {"type": "number"}}},
        "properties": {
            "place": {"type": "string"},
            "days": {"$ref": "#/$defs/Days"},
            "exact": {"type": "boolean"},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "level": {"type": ["integer", "string"]},
            "share": {"type": ["number", "string"]},
        },
        "additionalProperties": {"type": "string"},
    },
    "time": None,
}
TAGS = (
    "<function=weather>\n<parameter=place>\nZürich\n</parameter>\n"
    "<parameter=days>\n[1, 2.5]\n</parameter>\n</function>"
)
PYTHON = "weather(place=\"Zürich\", days=[1, 2.5, {'a': True}])"
IN_PYTHON = ("weather", '{"place": "Zürich", "days": [1, 2.5, {"a": true}]}')
NAMED = ("weather", '{"place": "]{"}')
TAGGED = ("weather", '{"place": "Zürich", "days": [1, 2.5]}')


def tags(**values: str) -> str:
    parts = [f"<parameter={name}>{value}</parameter>" for name, value in values.items()]
    return f"<tool_call><function=weather>{''.join(parts)}</function></tool_call>"


def in_python(*calls: str) -> str:
    return f"<|tool_call_start|>[{', '.join(calls)}]<|tool_call_end|>"


Found = tuple[str, list[tuple[str, str]]]

# An answer, the part of it that is text, and its calls.
GOOD: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "hermes": ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [WEATHER]),
    "after text": (
        "hermes",
        f"I'll see.\n<tool_call>{CALL}</tool_call>\n",
        "I'll see.\n",
        [WEATHER],
    ),
    "two": (
        "hermes",
        f"<tool_call>{CALL}</tool_call>\n"
        '<tool_call> {"arguments":{},"name":"time"}</tool_call>',
        "",
        [WEATHER, TIME],
    ),
    "a list": (
        "hermes",
        f'<tool_call>[{CALL} , {{"name": "time"}}]</tool_call>',
        "",
        [WEATHER, TIME],
    ),
    "text between": (
        "hermes",
        f"a<tool_call>{CALL}</tool_call> b <tool_call>{CALL}</tool_call>",
        "a b ",
        [WEATHER, WEATHER],
    ),
    "not closed": ("hermes", f"<tool_call>{CALL}", "", [WEATHER]),
    "closed in part": ("hermes", f"<tool_call>{CALL}\n</tool_c", "", [WEATHER]),
    "closed by the next": (
        "hermes",
        f"<tool_call>{CALL}\n<tool_call>{CALL}",
        "",
        [WEATHER, WEATHER],
    ),
    "JSON in JSON": (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("weather", '{"a": 1}')],
    ),
    "a bad one and a good one": (
        "hermes",
        f"<tool_call>{{oops}}</tool_call><tool_call>{CALL}</tool_call>",
        "<tool_call>{oops}</tool_call>",
        [WEATHER],
    ),
    "llama": ("llama3", f"\n{LLAMA}", "", [WEATHER]),
    "llama's arguments": ("llama3", CALL, "", [WEATHER]),
    "llama, tagged": ("llama3", f"<|python_tag|>{LLAMA}", "", [WEATHER]),
    "llama, after text": (
        "llama3",
        f"Let me see <|python_tag|> {LLAMA}\n",
        "Let me see ",
        [WEATHER],
    ),
    "llama, two": ("llama3", f"{LLAMA}; {LLAMA}\n", "", [WEATHER, WEATHER]),
    "llama, two tagged": (
        "llama3",
        f"<|python_tag|>{LLAMA}<|python_tag|>{LLAMA}",
        "",
        [WEATHER, WEATHER],
    ),
    "mistral": ("mistral", f"[TOOL_CALLS] [{CALL}]", "", [WEATHER]),
    "mistral, two": (
        "mistral",
        f'[TOOL_CALLS][{CALL}, {{"name":"time","arguments":{{}},"id":"x"}}]',
        "",
        [WEATHER, TIME],
    ),
    "granite": ("granite", f"Yes <|tool_call|>[{CALL}]", "Yes ", [WEATHER]),
    "named": ("mistral3", '[TOOL_CALLS]weather[ARGS]{"place": "]{"}', "", [NAMED]),
    "named, two, with ids": (
        "mistral3",
        'So [TOOL_CALLS]weather[CALL_ID]a2[ARGS]{"place": "]{"}[TOOL_CALLS] time [ARGS] {}\n',
        "So ",
        [NAMED, TIME],
    ),
    "JSON where names are": ("mistral3", f"[TOOL_CALLS] [{CALL}]", "", [WEATHER]),
    "tags": ("qwen3_coder", f"<tool_call>\n{TAGS}\n</tool_call>", "", [TAGGED]),
    "tags, after text": ("qwen3_coder", f"So <b> <tool_call>{TAGS}", "So <b> ", [TAGGED]),
    "tags, two": (
        "qwen3_coder",
        f"<tool_call>{TAGS}\n<function=time></function></tool_call>\n<tool_call>{TAGS}</tool_call>",
        "",
        [TAGGED, TIME, TAGGED],
    ),
    "tags without a marker": ("qwen3_coder", f"I: {TAGS}\n</tool_call>.", "I: .", [TAGGED]),
    "tags without any marker": ("qwen3_coder", f"{TAGS} <So>", " <So>", [TAGGED]),
    "JSON where tags are": ("qwen3_coder", f"<tool_call>{CALL}</tool_call>", "", [WEATHER]),
    "tags and more in a block": (
        "qwen3_coder",
        f"<tool_call>{TAGS} more</tool_call>",
        "<tool_call> more</tool_call>",
        [TAGGED],
    ),
    "texts as they are": (
        "qwen3_coder",
        tags(place='\n\n "5" </parameter> <b\n\n', unit="5", other="true"),
        "",
        [
            (
                "weather",
                '{"place": "\\n \\"5\\" </parameter> <b\\n", "unit": "5", "other": "true"}',
            )
        ],
    ),
    "types of the schema": (
        "qwen3_coder",
        tags(exact="True", unit="null", level="\n7\n", share="8", place="null", days="[2]"),
        "",
        [
            (
                "weather",
                '{"exact": true, "unit": null, "level": 7, "share": 8, "place": "null", '
                '"days": [2]}',
            )
        ],
    ),
    "no JSON of the type": (
        "qwen3_coder",
        tags(exact="perhaps", level="7.5", days="NaN"),
        "",
        [("weather", '{"exact": "perhaps", "level": "7.5", "days": "NaN"}')],
    ),
    "no schema": (
        "qwen3_coder",
        "<function=time><parameter=a>[1]</parameter><parameter=b>x</parameter></function>",
        "",
        [("time", '{"a": [1], "b": "x"}')],
    ),
    "python": ("lfm2", in_python(PYTHON), "", [IN_PYTHON]),
    "python, two": ("lfm2", in_python(PYTHON, "time( )"), "", [IN_PYTHON, TIME]),
    "python, two blocks": (
        "lfm2",
        f"I <see>. {in_python(PYTHON)}{in_python('time()')}",
        "I <see>. ",
        [IN_PYTHON, TIME],
    ),
    "python, not closed": ("lfm2", in_python(PYTHON)[: -len("end|>")], "", [IN_PYTHON]),
    "python, alone": (
        "lfm2",
        f"<|tool_call_start|>\n{PYTHON}\n<|tool_call_end|>",
        "",
        [IN_PYTHON],
    ),
    "JSON where python is": (
        "lfm2",
        f'<|tool_call_start|>[{CALL}, {{"name": "time"}}]<|tool_call_end|>',
        "",
        [WEATHER, TIME],
    ),
    "quotes within texts": (
        "lfm2",
        in_python(
            """time(a='it's "so"', b="", c=\'\'\'x', y\'\'\', """
            """d = "a 'b' c", e='\\'\\\\',)"""
        ),
        "",
        [
            (
                "time",
                json.dumps({"a": 'it\'s "so"', "b": "", "c": "x', y", "d": "a 'b' c", "e": "'\\"}),
            )
        ],
    ),
    "escapes of both languages": (
        "lfm2",
        in_python(r"""time(a='\x41\u00e4\d', b="\ud83c\udf89\/", c="\x41", d='1""" + "\n2')"),
        "",
        [("time", r'{"a": "Aä\\d", "b": "🎉/", "c": "A", "d": "1\n2"}')],
    ),
    "constants of both languages": (
        "lfm2",
        in_python("time(a=[True, false, None, null], b=-1.50, c=07, d=.5, e={'f': +1}, g=1e3)"),
        "",
        [
            (
                "time",
                '{"a": [true, false, null, null], "b": -1.50, "c": 7, "d": 0.5, "e": {"f": 1}, '
                '"g": 1e3}',
            )
        ],
    ),
    "mistral, after text": ("mistral", f"Yes [[ [TOOL_CALLS] [{CALL}] ", "Yes [[ ", [WEATHER]),
}

# Answers that are text and nothing else.
BAD = [
    ("hermes", "Nothing of the kind: <tool <tool_cal"),
    ("hermes", "  \n"),
    ("hermes", ""),
    ("hermes", f"\n <tool_call>{CALL[:-1]}"),
    ("hermes", f"<tool_call>{CALL[:40]}</tool_call> and more"),
    ("hermes", f"<tool_call>{CALL} }}</tool_call>"),
    ("hermes", f"<tool_call>{CALL}</tool_called>"),
    ("hermes", f"<tool_call>{CALL}</tool_c x"),
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("hermes", "<tool_call>[3]</tool_call>"),
    ("hermes", "<tool_call>weather()</tool_call>"),
    ("hermes", '<tool_call>{"name": "launch", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "here"}</tool_call>'),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>',
    ),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": "\n"}}</tool_call>'),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
    ),
    ("hermes", f"<function>{CALL}</function>"),
    ("llama3", f"Sure: {LLAMA}"),
    ("llama3", f"{LLAMA} is what I would call"),
    ("llama3", '{"name": "weather"}'),
    ("llama3", '{"name": "Alice", "parameters": {}}'),
    ("llama3", f"{LLAMA}; {LLAMA[:-1]}"),
    ("llama3", "<|python_tag|>weather.call()"),
    ("llama3", f"<|python_tag|>{LLAMA} and <|python"),
    ("llama3", "{ braces }"),
    ("llama3", "{"),
    ("qwen3_coder", "<tool_call>\n<function=launch>\n</function>\n</tool_call>"),
    ("qwen3_coder", f"<tool_call>{TAGS} and</tool_call>".replace(">\n</f", "> and </f")),
    ("qwen3_coder", f"<tool_call>{TAGS[:-8]}"),
    ("qwen3_coder", "Write <function=weather> and <function"),
    ("qwen3_coder", "<tool_call><function=weather\n></function></tool_call>"),
    ("qwen3_coder", "<tool_call><function=weather><parameter=></parameter></function>"),
    ("lfm2", in_python("launch()")),
    ("lfm2", in_python("time('a')")),
    ("lfm2", in_python("time(a=b)")),
    ("lfm2", in_python("time(a=time())")),
    ("lfm2", in_python("time(a=(1, 2))")),
    ("lfm2", in_python("time(a={b=1})")),
    ("lfm2", in_python("time(a=nan)")),
    ("lfm2", in_python("time(a=NaN)")),
    ("lfm2", in_python("time(a=1}")),
    ("lfm2", in_python("time(a='\\ud800')")),
    ("lfm2", in_python("time(a='\\U00110000')")),
    ("lfm2", in_python("time() weather()")),
    ("lfm2", in_python("[time()]")),
    ("lfm2", in_python("[1]")),
    ("lfm2", in_python()),
    ("lfm2", in_python("time(=1)")),
    ("lfm2", "<|tool_call_start|>[time(a='"),
    ("lfm2", f"{in_python('time()')[:-5]}, and"),
    ("lfm2", "Call time(a=1) or [time()], <|tool_call"),
    ("mistral", f"[TOOL_CALLS] [{CALL}, "),
    ("mistral", f'[TOOL_CALLS] [{CALL}, {{"name": "launch", "arguments": {{}}}}]'),
    ("mistral", "[TOOL_CALLS] none [TOOL_CALL"),
    ("mistral3", "[TOOL_CALLS]launch[ARGS]{}"),
    ("mistral3", '[TOOL_CALLS]weather[ARGS]{"place"'),
    ("mistral3", "[TOOL_CALLS]weather[ARGS][1]"),
    ("mistral3", "[TOOL_CALLS]weather[CALL"),
    ("mistral3", '[TOOL_CALLS]weather{"place": "here"}'),
    ("mistral3", f"[TOOL_CALLS]{'weather' * 99}[ARGS]{{}}"),
]


def read(parser: str, pieces: Sequence[str]) -> Found:
    """Text and calls of an answer that comes in pieces."""
    reader = CallReader(FORMATS[parser], SCHEMAS)
    parts = [part for piece in pieces for part in reader.add(piece)]
    parts += reader.add("", last=True)
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert reader.num_calls == len(calls)
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [(call.name, call.arguments) for call in calls]


def splits(text: str) -> Iterator[list[str]]:
    """The splits of a text: whole, in two at each point, by character, and at random."""
    yield [text]
    yield list(text)
    for at in range(len(text)):
        yield [text[:at], text[at:]]
    random = Random(0)
    for _ in range(50):
        points = sorted(random.randrange(len(text) + 1) for _ in range(6))
        yield [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]


@pytest.mark.parametrize("name", GOOD)
def test_calls_wherever_the_stream_is_split(name: str) -> None:
    parser, answer, text, calls = GOOD[name]
    for pieces in splits(answer):
        assert read(parser, pieces) == (text, calls)
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(("parser", "answer"), BAD)
def test_what_is_no_call_is_text_and_all_there(parser: str, answer: str) -> None:
    pieces = splits(answer) if len(answer) < 500 else iter([[answer]])
    for each in pieces:
        assert read(parser, each) == (answer, [])


@pytest.mark.parametrize("seed", range(3))
def test_answers_that_were_tampered_with(seed: int) -> None:
    """Every split gives the same; without calls, all of the text."""
    random = Random(seed)
    answers = [answer for _, answer, _, _ in GOOD.values()] + [answer for _, answer in BAD]
    parts = [
        CALL,
        LLAMA,
        PYTHON,
        "<|tool_call_start|>[",
        "<|tool_call_end|>",
        *"{}[]()=\"'\\;:, \n<",
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
    ]
    for _ in range(300):
        answer = random.choice(answers)[:800]
        for _ in range(random.randrange(4)):
            begin = random.randrange(len(answer) + 1)
            added = random.choice([*parts, "<|python_tag|>", '{"name": "time"}', ""])
            answer = answer[:begin] + added + answer[begin + random.randrange(4) :]
        parser = random.choice(sorted(FORMATS))
        whole = read(parser, [answer])
        assert whole[1] or whole[0] == answer
        at = random.randrange(len(answer) + 1)
        assert read(parser, [answer[:at], answer[at:]]) == read(parser, [*answer]) == whole


def random_value(random: Random, depth: int = 0) -> Any:
    """A value of JSON whose texts are full of what Python's syntax is made of."""

    def text() -> str:
        letters = "ab'\"\\,:)]}([{= \n\tä🎉x0"
        return "".join(random.choice(letters) for _ in range(random.randrange(8)))

    kind, count = random.randrange(7 if depth < 3 else 5), random.randrange(4)
    if kind < 3:
        return text()
    if kind == 3:
        return random.choice([True, False, None])
    if kind == 4:
        return random.choice([random.randrange(-99, 99), -1e30, 0.5])
    values = [random_value(random, depth + 1) for _ in range(count)]
    return values if kind == 5 else {text(): value for value in values}


def test_calls_that_are_written_in_python_are_python_and_read_as_they_were() -> None:
    random = Random(0)
    for _ in range(500):
        arguments = {f"a{i}": random_value(random) for i in range(random.randrange(4))}
        said = FORMATS["lfm2"].written([("time", arguments)])
        _, ((name, found),) = read("lfm2", [said])
        assert (name, json.loads(found)) == ("time", arguments)
        block = said.removeprefix("<|tool_call_start|>").removesuffix("<|tool_call_end|>")
        (call,) = ast.parse(block, mode="eval").body.elts  # type: ignore[attr-defined]
        assert {each.arg: ast.literal_eval(each.value) for each in call.keywords} == arguments


@pytest.mark.parametrize("parser", FORMATS)
def test_deep_and_long_answers(parser: str) -> None:
    opens = FORMATS[parser].opens
    for answer in (opens + "[" * 100_000, opens + '{"a":' * 50_000, opens * 2_000, "\n" * 50_000):
        assert read(parser, [answer]) == (answer, [])
    answer = opens + '{"name": "weather", "arguments": ' + '{"a":' * 50_000 + "1" + "}" * 50_001
    assert read(parser, [answer])[0] == answer


def test_text_is_given_at_once() -> None:
    reader = CallReader(FORMATS["hermes"], SCHEMAS)
    assert reader.add("Let me") == ["Let me"]
    assert reader.add(" see <tool") == [" see "]
    assert reader.add("box>") == ["<toolbox>"]
    assert reader.add("<tool_call>") == []
    assert reader.add("{nonsense") == []
    assert reader.add("</tool_call> so") == ["<tool_call>", "{nonsense</tool_call> so"]
    reader = CallReader(FORMATS["qwen3_coder"], SCHEMAS)
    assert reader.add("<function=oth") == []
    assert reader.add("er> <") == ["<", "function=other> "]
    reader = CallReader(FORMATS["llama3"], SCHEMAS)
    assert reader.add(" {") == []
    assert reader.add('"name": "Bob"}') == [" {", '"name": "Bob"}']
    assert reader.add("{") == ["{"]
    reader = CallReader(FORMATS["mistral3"], SCHEMAS)
    assert reader.add("[TOOL_CALLS]so") == []
    assert reader.add("\nit") == ["[TOOL_CALLS]", "so\nit"]
    reader = CallReader(FORMATS["mistral"], SCHEMAS)
    (call,) = reader.add(f"[TOOL_CALLS][{CALL}]")  # before the answer ends
    assert isinstance(call, ToolCall)
    assert len(call.id) == 9  # Mistral's templates insist
    assert call.id.isalnum()


def test_a_parser_is_chosen_by_the_chat_template() -> None:
    known = {"headers": "llama3", "thoughts": "hermes", "alternating": "mistral"}
    known |= {"parameters": "qwen3_coder", "listed": "lfm2", "python": "lfm2"}
    for name, template in TEMPLATES.items():
        assert tool_format("auto", template) is FORMATS[known[name]]
        assert tool_format("none", template) is None
        assert tool_format("mistral", template) is FORMATS["mistral"]
    assert tool_format("auto", "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}") is FORMATS["mistral3"]
    assert tool_format("auto", "{{ 'Respond only with <|tool_call|>' }}") is FORMATS["granite"]
    assert tool_format("auto", "{{ messages }}") is FORMATS["hermes"]
    with pytest.raises(eecore.RequestError, match="tool_parser: expected auto, granite, hermes"):
        ServerSettings(tool_parser="json")


def test_markers_that_are_special_tokens_are_shown(endless: eecore.Model) -> None:
    """They are shown only in answers to requests with tools."""
    tokenizer = endless.tokenizer
    assert tokenizer is not None
    served = asker(endless).service.served
    served.tool_format = ToolFormat("<|im_start|>")
    answer = "ü<|im_start|> {}<|im_end|>"
    ids = tokenizer.encode(answer, add_special_tokens=False)
    for tools, text in ((TOOLS, "ü<|im_start|> {}"), (None, "ü {}")):
        messages = [{"role": "user", "content": "a"}]
        asked = ask_chat(served, ChatRequest(messages=messages, tools=tools, max_tokens=60))
        prepared = asked.choices[0].prepared
        streamed = ""
        for number, token in enumerate(ids, 1):
            prepared.output_ids.append(token)
            streamed += prepared.text.show_up_to(number, final=number == len(ids)).text
        assert streamed == prepared.text.decoded.text == text
    quiet = ask_chat(
        served, ChatRequest(messages=messages, tools=TOOLS, tool_choice="none", max_tokens=60)
    )
    assert quiet.calls is None


# Servers


def saying(
    intent: eecore.Model, pieces: Sequence[str], reason: str = "stop", parser: str = "hermes"
) -> Asker:
    server = asker(intent, tool_parser=parser)
    (output,) = eecore.generate(intent, "lock the front door", max_tokens=64)
    output = replace(output, text="".join(pieces), finish_reason=reason)
    script(server.service, output, pieces)
    return server


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, **fields}


PIECES = ["I'll ", "see.", " <tool", "_call>", CALL[:30], CALL[30:], "\n</tool_call>", "\n"]


def test_an_answer_with_calls(intent: eecore.Model) -> None:
    server = saying(intent, PIECES)
    choice = server.post("/v1/chat/completions", chat()).json()["choices"][0]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "I'll see. ", "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "weather", "arguments": PLACE}

    server = saying(intent, PIECES[2:])
    choices = server.post("/v1/chat/completions", chat(n=2)).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == [None, None]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 2


def test_a_stream_with_calls(intent: eecore.Model) -> None:
    server = saying(intent, PIECES)
    chunks = events(server.post("/v1/chat/completions", chat(stream=True)).text)
    (choices,) = zip(*(chunk["choices"] for chunk in chunks), strict=True)
    deltas = [choice["delta"] for choice in choices]
    identity = deltas[4]["tool_calls"][0].pop("id")
    assert identity.startswith("call_")
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "I'll "},
        {"content": "see."},
        {"content": " "},
        {
            "tool_calls": [
                {"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": PLACE}}]},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices][-2:] == [None, "tool_calls"]


def test_a_stream_that_says_how_deep_it_went(intent: eecore.Model) -> None:
    """No token is missing, whether its text is held back or not."""
    server = saying(intent, [*PIECES[2:-1], PIECES[2], *PIECES[3:]])
    body = chat(stream=True, return_exit_layers=True)
    chunks = events(server.post("/v1/chat/completions", body).text)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [t for c in choices for t in c.get("token_ids", [])] == [5] * 11
    calls = [call for c in choices for call in c["delta"].get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 0, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "parser", "reason", "pieces"),
    [
        ({}, "hermes", "length", PIECES[:5]),
        ({"tools": None}, "hermes", "stop", PIECES),
        ({"tools": []}, "hermes", "stop", PIECES),
        ({"tool_choice": "none"}, "hermes", "stop", PIECES),
        ({}, "none", "stop", PIECES),
        ({}, "mistral", "stop", PIECES),
    ],
)
def test_answers_that_stay_text(
    intent: eecore.Model,
    stream: bool,
    fields: dict[str, Any],
    parser: str,
    reason: str,
    pieces: list[str],
) -> None:
    server = saying(intent, pieces, reason, parser)
    answer = server.post("/v1/chat/completions", chat(stream=stream, **fields))
    chunks = events(answer.text) if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    said = [choice["delta" if stream else "message"] for choice in choices]
    assert "".join(each.get("content", "") for each in said) == "".join(pieces)
    assert choices[-1]["finish_reason"] == reason
    assert not any("tool_calls" in each for each in said)


def test_calls_of_an_answer_that_was_cut_off(intent: eecore.Model) -> None:
    server = saying(intent, [*PIECES, "And now"], "length")
    choice = server.post("/v1/chat/completions", chat()).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["content"] == "I'll see. \nAnd now"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("parser", "pieces", "content"),
    [
        (
            "hermes",
            [f"a<tool_call>{CALL}</tool_call>", f" b <tool_call>{CALL}</tool_call>"],
            "a b ",
        ),
        ("hermes", [f"<tool_call>[{CALL}, {CALL}]</tool_call>"], ""),
        ("llama3", [f"{LLAMA}; {LLAMA}"], ""),
        ("mistral", [f"[TOOL_CALLS] [{CALL}, {CALL}, {CALL}]"], ""),
    ],
)
@pytest.mark.parametrize("parallel", [False, True, None])
def test_one_call_where_no_more_are_wanted(
    intent: eecore.Model,
    stream: bool,
    parser: str,
    pieces: list[str],
    content: str,
    parallel: bool | None,
) -> None:
    server = saying(intent, pieces, parser=parser)
    body = chat(stream=stream, parallel_tool_calls=parallel)
    answer = server.post("/v1/chat/completions", body)
    chunks = events(answer.text) if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    said = [choice["delta" if stream else "message"] for choice in choices]
    calls = {
        call["index" if stream else "id"] for each in said for call in each.get("tool_calls", ())
    }
    assert (len(calls) == 1) == (parallel is False)
    assert "".join(each.get("content") or "" for each in said) == content
    assert choices[-1]["finish_reason"] == "tool_calls"
