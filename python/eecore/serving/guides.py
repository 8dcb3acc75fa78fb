"""The guide of a request, from OpenAI's fields and vLLM's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from eecore.errors import GuideError
from eecore.guide import Guide, check_types, enforceable
from eecore.serving.protocol import ChatRequest, GenerationRequest
from eecore.serving.python_calls import WORD
from eecore.serving.refusals import ApiError, invalid
from eecore.serving.tool_calls import ARGUMENTS, ExpectedCalls, ToolFormat
from eecore.serving.xml_calls import (
    CLOSES,
    NAME,
    OPENS,
    PARAMETER_CLOSES,
    PARAMETER_OPENS,
    single_parameters,
    tagged_parameters,
)
from eecore.values import shown

Made = tuple[str, Guide]
"""A guide, and the field that it is from."""

_KINDS: dict[str, Callable[[Any], Guide]] = {
    "json": Guide.json_schema,
    "regex": Guide.regex,
    "choice": Guide.choice,
    "grammar": Guide.grammar,
}
_GUIDED = [f"guided_{name}" for name in _KINDS]
AS_TEMPLATES_HAVE_IT = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
FORMS = "text, json_object or json_schema"


def guide_of(body: GenerationRequest, calls: ExpectedCalls | None = None) -> Made | None:
    """The guide of a request; None where its text is free.

    Args:
        calls: the tool calls that the answer may make; a response format applies to answers without
            calls.

    Raises:
        ApiError: 400: a guide is malformed, or there are several.
    """
    found = [*_formats(body.response_format, calls), *_structured(body.structured_outputs)]
    if calls is not None and calls.is_required:
        parameters = [_parameters(*each) for each in enumerate(calls.functions)]
        found.append(_made("tool_choice", partial(_call_alone, calls), parameters))
    for name, make in _KINDS.items():
        given = getattr(body, f"guided_{name}")
        if given not in (None, "", [], {}):
            found.append(_made(f"guided_{name}", make, given))
    if len(found) > 1:
        names = ", ".join(field for field, _ in found)
        raise invalid(f"{found[-1][0]}: expected at most one of {names}, got {len(found)}")
    return found[0] if found else None


def has_guide(body: GenerationRequest) -> bool:
    """Whether a request may have a guide; a quick check."""
    fields = ("response_format", "structured_outputs", "tool_choice", *_GUIDED)
    return any(getattr(body, name, None) not in (None, "", [], {}) for name in fields)


def expected_calls(body: ChatRequest, form: ToolFormat | None) -> ExpectedCalls | None:
    """The tool calls that the answer to a chat may or must make; None where it can make none.

    Args:
        form: the model's format of tool calls; None: it has none.

    Raises:
        ApiError: 400: a tool is malformed, or unknown, or the model has no format of calls.
    """
    field = "tool_choice"
    given = [_function(index, tool) for index, tool in enumerate(body.tools or ())]
    functions = {function["name"]: function for function in given}
    is_required, names = _choice(body.tool_choice)
    if is_required and form is None:
        raise invalid(f"{field}: expected a model with a format of calls: --tool-parser", field)
    names = list(functions) if names is None else names
    strange = [name for name in names if name not in functions]
    if strange or (is_required and not names):
        got = strange[0] if any(strange) else body.tool_choice
        expected = f"expected a tool of {shown(list(functions))}"
        raise invalid(f"{field}: {expected}, got {shown(got)}", field)
    if form is None or not names:
        return None
    chosen = tuple(functions[name] for name in names)
    return ExpectedCalls(
        form, chosen, is_required, 1 if body.parallel_tool_calls is False else None
    )


def _function(index: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function in a tool."""
    kind, function = tool.get("type", "function"), tool.get("function")
    if kind != "function":
        raise invalid(f"tools[{index}].type: expected function, got {shown(kind)}")
    if not isinstance(function, Mapping):
        raise invalid(f"tools[{index}].function: expected an object, got {shown(function)}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise invalid(f"tools[{index}].function.name: expected text, got {shown(name)}")
    if not isinstance(parameters, Mapping | None):
        got = shown(parameters)
        raise invalid(f"tools[{index}].function.parameters: expected a JSON schema, got {got}")
    try:
        check_types(parameters)
    except GuideError as error:
        raise refusal_of(f"tools[{index}].function.parameters", error, "tools") from None
    return function


def _choice(choice: str | Mapping[str, Any] | None) -> tuple[bool, list[Any] | None]:
    """Whether a tool must be called, and the names of those that may be; None for all."""
    if choice is None or isinstance(choice, str):
        if choice in (None, "auto", "none", "required"):
            return choice == "required", [] if choice == "none" else None
    elif "allowed_tools" not in choice:
        return True, [_name(choice)]
    elif isinstance(allowed := choice["allowed_tools"], Mapping):
        mode, tools = allowed.get("mode"), allowed.get("tools")
        if mode in ("auto", "required") and isinstance(tools, list):
            return mode == "required", [_name(tool) for tool in tools]
    expected = "none, auto, required, a function or allowed_tools with a mode and tools"
    raise invalid(f"tool_choice: expected {expected}, got {shown(choice)}", "tool_choice")


def _name(tool: Any) -> str | None:
    """The name in a choice of a function; None where there is none."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _parameters(index: int, function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a call's arguments, as a resource of its own in which ``#`` is its root."""
    given = function.get("parameters") or {"properties": {}}
    return {"$id": f"tool:{index}", **given, "type": "object"}


def _call_alone(calls: ExpectedCalls, parameters: Iterable[Mapping[str, Any]]) -> Guide:
    return Guide.grammar(f"start: {_call(calls, parameters)}")


def _call(calls: ExpectedCalls, parameters: Iterable[Mapping[str, Any] | None]) -> str:
    """The right side of a grammar rule for a call in the model's format, followed by the rules that
    it needs.

    Args:
        parameters: the schema of each function's arguments; None for any arguments.
    """
    form = calls.format
    languages: dict[str, Callable[[str, str, Any], list[str] | None]] = {
        "tags": _tags,
        "python": _in_python,
        "named": partial(_named, form),
    }
    make = languages.get(form.language)
    kinds, rules, names = [], [], []
    for number, (function, schema) in enumerate(zip(calls.functions, parameters, strict=True)):
        rule = f"call_{number}"
        own = None if make is None else make(rule, function["name"], schema)
        if own is not None:
            names.append(rule)
            rules += own
            continue
        arguments = {"type": "object"} if schema is None else schema
        kinds.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, form.arguments: arguments},
                "required": ["name", form.arguments],
                "additionalProperties": False,
            }
        )
    if kinds:
        value: dict[str, Any] = {"anyOf": kinds}
        if form.is_list and form.language == "json":
            value = {"type": "array", "items": value, "minItems": 1}
            if calls.max_calls is not None:
                value["maxItems"] = calls.max_calls
        names.append("json_call")
        rules.append(f"json_call: {_on_one_line(value)}")
    parts = [_marker(form, marker) for marker in (form.begins, form.ends) if marker]
    parts.insert(bool(form.begins), "call")
    call = " | ".join(names)
    if form.language == "python":
        rules.append(f"one: {call}")
        call = '"[" one "]"' if calls.max_calls == 1 else '"[" one (", " one)* "]"'
    return "\n".join([" ".join(parts), f"call: {call}", *rules, ""])


def _marker(form: ToolFormat, text: str) -> str:
    """A marker with its line end as a grammar has it, the token where it is one."""
    for marker, token in form.tokens:
        before, found, after = text.partition(marker)
        if found:
            quoted = [json.dumps(each) if each else "" for each in (before, after)]
            return f"{quoted[0]} <[{token}]> {quoted[1]}".strip()
    return json.dumps(text)


def _named(form: ToolFormat, rule: str, name: str, schema: Mapping[str, Any] | None) -> list[str]:
    """The grammar rules of a call as a name and JSON."""
    arguments = {"type": "object"} if schema is None else schema
    return [
        f"{rule}: {_quoted(name)} {_marker(form, ARGUMENTS)} {rule}_json",
        f"{rule}_json: {_on_one_line(arguments)}",
    ]


def _tags(rule: str, name: str, schema: Mapping[str, Any] | None) -> list[str] | None:
    """The grammar rules of a call as tags; None where tags cannot follow the schema."""
    parameters = {} if schema is None else tagged_parameters(schema)
    if parameters is None or not NAME.fullmatch(name):
        return None
    begins = _quoted(f"{OPENS}{name}>\n")
    if schema is None:
        return [f"{rule}: {begins} {rule}_rest", _text_up_to(CLOSES, f"{rule}_rest")]
    parts, rules, required = [begins], [], schema.get("required", ())
    for number, (each, given) in enumerate(parameters.items()):
        own = f"{rule}_{number}"
        parts.append(own if each in required else f"{own}?")
        ends = _quoted(f"\n{PARAMETER_CLOSES}\n")
        if given is None:
            value = f"{own}_text {_quoted(chr(10))}"
            rules.append(_text_up_to(PARAMETER_CLOSES, f"{own}_text"))
        elif isinstance(given, list):
            value = f"({' | '.join(map(_quoted, given))}) {ends}"
        else:
            value = f"{own}_json {ends}"
            rules.append(f"{own}_json: {_on_one_line(given)}")
        opens = _quoted(f"{PARAMETER_OPENS}{each}>\n")
        rules.append(f"{own}: {opens} {value}")
    return [f"{rule}: {' '.join([*parts, _quoted(CLOSES)])}", *rules]


def _in_python(rule: str, name: str, schema: Mapping[str, Any] | None) -> list[str] | None:
    """The grammar rules of a call in Python; None where it cannot follow the schema."""
    begins = _quoted(f"{name}(")
    if schema is None:
        return [
            f'{rule}: {begins} ({rule}_any (", " {rule}_any)*)? ")"',
            f'{rule}_any: /[A-Za-z_][A-Za-z0-9_]*/ "=" {rule}_value',
            f"{rule}_value: {_on_one_line({})}",
        ]
    parameters = single_parameters(schema)
    if parameters is None or not all(map(WORD.fullmatch, (name, *parameters))):
        return None
    rules, required = list[str](), schema.get("required", ())
    follows, is_needed = "", False  # the rule of what may follow a parameter, and whether it must
    for number, (each, given) in reversed([*enumerate(parameters.items())]):
        own = f"{rule}_{number}"
        more = _perhaps(f'", " {follows}', not is_needed) if follows else ""
        rules.append(f"{own}: {_quoted(f'{each}=')} {own}_value {more}")
        rules.append(f"{own}_value: {_on_one_line(given)}")
        is_needed = is_needed or each in required
        if each in required or not follows:
            follows = own
        else:
            rules.append(f"{own}_on: {own} | {follows}")
            follows = f"{own}_on"
    arguments = _perhaps(follows, not is_needed) if follows else ""
    return [f'{rule}: {begins} {arguments} ")"', *rules]


def _perhaps(part: str, is_optional: bool) -> str:
    """A part of a grammar rule, which may be missing."""
    return f"({part})?" if is_optional else part


def _text_up_to(end: str, rule: str) -> str:
    """The grammar rule of any text and its end."""
    return f"{rule}[suffix={_quoted(end)}]: /(?s:.*)/"


def _quoted(text: str) -> str:
    """A text as a grammar has it."""
    return json.dumps(text, ensure_ascii=False)


def _on_one_line(schema: Mapping[str, Any]) -> str:
    """A schema's JSON on one line, for a grammar.

    Raises:
        GuideError: it cannot be enforced.
    """
    return f"%json {json.dumps({**enforceable(schema), 'x-guidance': AS_TEMPLATES_HAVE_IT})}"


def refusal_of(where: str, error: GuideError, field: str | None = None) -> ApiError:
    """A guide's error as a refusal of the field that it is from."""
    return invalid(f"{where}:{str(error).partition(':')[2]}", field or where)


def _formats(form: Mapping[str, Any] | None, calls: ExpectedCalls | None) -> list[Made]:
    field = "response_format"
    schema = None if form is None else _schema(field, form)
    if schema is None:
        return []
    if calls is None or calls.is_required:
        made = _made(field, Guide.json_schema, schema)
        return [made] if calls is None else []
    return [_made(field, partial(_answer_or_call, calls), schema)]


def _answer_or_call(calls: ExpectedCalls, schema: Mapping[str, Any]) -> Guide:
    call = _call(calls, [None] * len(calls.functions))
    answer = _on_one_line(schema)
    return Guide.grammar(f"start: answer | call_of_tool\nanswer: {answer}\ncall_of_tool: {call}")


def _schema(field: str, form: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema of a response format; None for text."""
    kind, given = form.get("type"), form.get("json_schema")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = form.get("schema", {"type": "object"})
    elif kind == "json_schema":
        schema = given.get("schema") if isinstance(given, Mapping) else None
    else:
        raise invalid(f"{field}: expected {FORMS}, got {shown(kind)}")
    if not isinstance(schema, Mapping):
        raise invalid(f"{field}: expected json_schema.schema, an object, got {shown(schema)}")
    return schema


def _structured(given: Any) -> list[Made]:
    field = "structured_outputs"
    if given in (None, {}):
        return []
    if not isinstance(given, Mapping):
        raise invalid(f"{field}: expected an object, got {shown(given)}")
    set_ = {name: value for name, value in given.items() if value not in (None, False)}
    asked = {name: value for name, value in set_.items() if name != "disable_fallback"}
    whole = asked.pop("json_object", None)
    if unknown := [name for name in asked if name not in _KINDS]:
        kinds = ", ".join(_KINDS)
        raise invalid(f"{field}: expected {kinds} or json_object, got {shown(unknown[0])}")
    found = [_made(field, _KINDS[name], value) for name, value in asked.items()]
    return [*found, (field, Guide.json_object())] if whole else found


def _made(field: str, make: Callable[[Any], Guide], given: Any) -> Made:
    try:
        return field, make(given)
    except GuideError as error:
        raise refusal_of(field, error) from None
