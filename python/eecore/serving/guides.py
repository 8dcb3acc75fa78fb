"""What a request wants its text to look like, in OpenAI's words and in vLLM's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from eecore.errors import GuideError
from eecore.guide import Guide, without_unknown_formats
from eecore.serving.protocol import ChatRequest, GenerationRequest
from eecore.serving.refusals import ApiError, invalid
from eecore.serving.tool_calls import ToolFormat
from eecore.values import shown

__all__ = ["Made", "forced_call", "guide_of", "has_guide", "refusal_of"]

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


def guide_of(body: GenerationRequest, forced: Made | None = None) -> Made | None:
    """The guide of a request; None for one that may say anything.

    Args:
        body: the request.
        forced: of :func:`forced_call`.

    Raises:
        ApiError: 400: it is no guide, or there are several.
    """
    found = [*_formats(body.response_format), *_structured(body.structured_outputs)]
    if forced is not None:
        found.append(forced)
    for name, make in _KINDS.items():
        given = getattr(body, f"guided_{name}")
        if given not in (None, "", [], {}):
            found.append(_made(f"guided_{name}", make, given))
    if len(found) > 1:
        names = ", ".join(field for field, _ in found)
        raise invalid(f"{found[-1][0]}: expected at most one of {names}, got {len(found)}")
    return found[0] if found else None


def has_guide(body: GenerationRequest) -> bool:
    """Whether a request may have a guide; quick."""
    fields = ("response_format", "structured_outputs", "tool_choice", *_GUIDED)
    return any(getattr(body, name, None) not in (None, "", [], {}) for name in fields)


def forced_call(body: ChatRequest, form: ToolFormat | None) -> Made | None:
    """The guide of a chat that has to call a tool, or a certain one; None where it need not.

    Args:
        body: the request.
        form: how the model writes calls; None: it was not made for them.

    Raises:
        ApiError: 400: there is no such tool, or no format of calls.
    """
    field, choice = "tool_choice", body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    if form is None:
        raise invalid(f"{field}: expected a model with a format of calls: --tool-parser", field)
    functions = [tool["function"] for tool in body.tools or () if _is_function(tool)]
    names = [function["name"] for function in functions]
    if isinstance(choice, Mapping):
        wanted = choice.get("function", {})
        name = wanted.get("name") if isinstance(wanted, Mapping) else None
        functions = [function for function in functions if function["name"] == name]
    elif choice != "required":
        raise invalid(
            f"{field}: expected none, auto, required or a function, got {choice!r}", field
        )
    if not functions:
        raise invalid(f"{field}: expected a tool of {shown(names)}, got {shown(choice)}", field)
    calls: dict[str, Any] = {"anyOf": [_call_schema(form, function) for function in functions]}
    if form.is_list:
        calls = {"type": "array", "items": calls, "minItems": 1}
    calls["x-guidance"] = AS_TEMPLATES_HAVE_IT
    between = [json.dumps(marker) for marker in (form.begins, form.ends) if marker]
    between.insert(bool(form.begins), "call")
    grammar = f"start: {' '.join(between)}\ncall: %json {json.dumps(calls)}\n"
    return _made(field, Guide.grammar, grammar)


def _is_function(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _call_schema(form: ToolFormat, function: Mapping[str, Any]) -> dict[str, Any]:
    """Of a call as the family writes it."""
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    parameters = without_unknown_formats(parameters)
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, form.arguments: parameters},
        "required": ["name", form.arguments],
        "additionalProperties": False,
    }


def refusal_of(field: str, error: GuideError) -> ApiError:
    """What cannot be followed, said of the field that it is from."""
    return invalid(f"{field}:{str(error).partition(':')[2]}", field)


def _formats(form: Mapping[str, Any] | None) -> list[Made]:
    field, kind = "response_format", (form or {}).get("type", "text")
    if form is None or kind == "text":
        return []
    if kind == "json_object":
        return [(field, Guide.json_object())]
    if kind != "json_schema":
        raise invalid(f"{field}: expected {FORMS}, got {shown(kind)}")
    given = form.get("json_schema")
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if not isinstance(schema, Mapping):
        raise invalid(f"{field}: expected json_schema.schema, an object, got {shown(schema)}")
    return [_made(field, Guide.json_schema, schema)]


def _structured(given: Any) -> list[Made]:
    field = "structured_outputs"
    if given in (None, {}):
        return []
    if not isinstance(given, Mapping):
        raise invalid(f"{field}: expected an object, got {shown(given)}")
    set_ = {name: value for name, value in given.items() if value not in (None, False)}
    asked = {name: value for name, value in set_.items() if not name.startswith("disable_")}
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
