"""What a request wants its text to look like, in OpenAI's words and in vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from eecore.errors import GuideError
from eecore.guide import Guide
from eecore.serving.protocol import GenerationRequest
from eecore.serving.refusals import ApiError, invalid
from eecore.values import shown

__all__ = ["guide_of", "refusal_of"]

Made = tuple[str, Guide]
"""A guide, and the field that it is from."""

_KINDS: dict[str, Callable[[Any], Guide]] = {
    "json": Guide.json_schema,
    "regex": Guide.regex,
    "choice": Guide.choice,
    "grammar": Guide.grammar,
}
FORMS = "text, json_object or json_schema"


def guide_of(body: GenerationRequest) -> Made | None:
    """The guide of a request; None for one that may say anything.

    Raises:
        ApiError: 400: it is no guide, or there are several.
    """
    found = [*_formats(body.response_format), *_structured(body.structured_outputs)]
    for name, make in _KINDS.items():
        given = getattr(body, f"guided_{name}")
        if given not in (None, "", [], {}):
            found.append(_made(f"guided_{name}", make, given))
    if len(found) > 1:
        names = ", ".join(field for field, _ in found)
        raise invalid(f"{found[-1][0]}: expected at most one of {names}, got {len(found)}")
    return found[0] if found else None


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
