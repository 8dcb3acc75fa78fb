"""The form that a text must have: a JSON schema, a regular expression, a choice, a grammar.

A request with a guide only gets tokens after which its text can still fit the guide.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from eecore.errors import GuideError
from eecore.values import as_items, shown

GuideKind = Literal["json", "regex", "choice", "grammar"]

MAX_TEXT = 1 << 18
"""Characters of a guide's text, at most."""
MAX_CHOICES = 4096
"""Texts of a choice, at most."""
# String formats that are enforced; in JSON schema any other format says nothing of the text.
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"}
FORMATS |= {"uuid", "uri"}
TOO_DEEP = "guide: expected a schema that is less deep"
MAX_INTEGER = 1 << 53
"""The largest integer of a schema's values and bounds: llguidance 1.9 holds them as doubles."""
# Keywords of JSON schema whose values are no schemas, and those of them that are enforced.
_VALUES = {"const", "enum", "default", "examples"}
_ENFORCED = {"const", "enum"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
# Keywords that say which other properties an object has, and those that add to a description.
_OPENING = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
_COMBINING = {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not"}
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
# Keywords whose values are schemas, or lists of them.
_INNER = {"items", "prefixItems", "additionalItems", "contains", "additionalProperties", "not"}
_INNER |= {"unevaluatedItems", "unevaluatedProperties", "propertyNames", "if", "then", "else"}
_INNER |= {"allOf", "anyOf", "oneOf"}
# Keywords whose values are schemas by name.
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
# Keywords that say nothing of a text.
_REMARKS = {"title", "description", "default", "examples", "deprecated", "$comment"}


@dataclass(frozen=True)
class Guide:
    """The form that the text of a request must have, made by one of the methods below.

    Args:
        kind: the kind of guide.
        text: a JSON schema, a regular expression, a JSON list of strings, or a grammar; at most
            262144 characters.
    """

    kind: GuideKind
    text: str

    def __post_init__(self) -> None:
        kind, text = (
            str.__str__(value) if isinstance(value, str) else None
            for value in (self.kind, self.text)
        )
        if kind not in get_args(GuideKind):
            kinds = ", ".join(get_args(GuideKind))
            raise GuideError(f"guide: expected a kind of {kinds}, got {shown(self.kind)}")
        if text is None or not 0 < len(text) <= MAX_TEXT:
            raise GuideError(
                f"guide: expected a text of 1..{MAX_TEXT} characters, got {shown(self.text)}"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise GuideError("guide: expected text that UTF-8 can say") from None
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "text", text)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Guide:
        """JSON that a schema describes, on one line or indented.

        Args:
            schema: an object, or its JSON text. Keywords that cannot be enforced are refused when
                the request is made; unknown formats are annotations. An object has the named
                properties alone unless the schema allows more (``additionalProperties``).

        Raises:
            GuideError: it is no JSON schema, has a type that does not exist, or integers beyond
                2^53.
        """
        if isinstance(schema, str):
            schema = _parsed(schema)
        if not isinstance(schema, Mapping):
            raise GuideError(f"guide: expected a JSON schema, an object, got {shown(schema)}")
        text = _written(schema if isinstance(schema, dict) else dict(schema))
        enforceable(schema)
        return cls("json", text)

    @classmethod
    def json_object(cls) -> Guide:
        """Any JSON object."""
        return cls("json", '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> Guide:
        """Text that a regular expression matches as a whole.

        Args:
            pattern: in the syntax of Rust's regex: no look-around, no back references.
        """
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Iterable[str]) -> Guide:
        """One of some texts."""
        items = None if isinstance(texts, (str, bytes)) else as_items(texts, MAX_CHOICES)
        if not items or not all(isinstance(item, str) and item for item in items):
            raise GuideError(
                f"guide: expected 1..{MAX_CHOICES} choices, none empty, got {shown(texts)}"
            )
        return cls("choice", _written(items))

    @classmethod
    def grammar(cls, text: str) -> Guide:
        """Text that a context-free grammar describes.

        Args:
            text: in Lark's syntax as in llguidance, beginning at ``start``, or in the GBNF of
                llama.cpp, beginning at ``root``. A terminal of Lark's takes as much text as it can;
                GBNF has no terminals.
        """
        return cls("grammar", text)


def check_types(schema: Any) -> None:
    """Check that a JSON schema has no type that does not exist.

    Raises:
        GuideError: the first that does not, or the schema is too deep.
    """
    try:
        _check_types(schema, "")
    except RecursionError:
        raise GuideError(TOO_DEEP) from None


def _check_types(schema: Any, where: str) -> None:
    if isinstance(schema, list):
        for index, each in enumerate(schema):
            _check_types(each, f"{where[:-1]}[{index}].")
    if not isinstance(schema, Mapping):
        return
    if "type" in schema:
        given = schema["type"]
        for each in given if isinstance(given, list) else [given]:
            if each not in TYPES:
                expected = ", ".join(TYPES)
                raise GuideError(f"guide: {where}type: expected {expected}, got {shown(each)}")
    for key, value in schema.items():
        if key in _INNER:
            _check_types(value, f"{where}{key}.")
        elif key in _NAMED and isinstance(value, Mapping):
            for name, each in value.items():
                _check_types(each, f"{where}{key}.{name}.")


def enforceable(schema: Any) -> Any:
    """A JSON schema as it is enforced: unknown formats left out, objects closed, propertyNames said
    by other keywords.

    An object with properties has no others unless the schema says so, by additionalProperties,
    patternProperties or unevaluatedProperties; else a model could add properties for ever. Schemas
    that describe an object in several places (allOf, a $ref beside properties) are left open.

    Raises:
        GuideError: a type does not exist, a number of a value or a bound is beyond 2^53, which a
            double does not hold, or the schema is too deep.
    """
    check_types(schema)
    try:
        return _enforceable(schema, schema, closes=not _is_combined(schema))
    except RecursionError:
        raise GuideError(TOO_DEEP) from None


def _enforceable(schema: Any, root: Any, *, closes: bool, is_named: bool = False) -> Any:
    """A part of a schema, or of its parts by name.

    Args:
        root: the schema whose definitions its references name.
    """
    if isinstance(schema, list):
        return [_enforceable(each, root, closes=closes) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    if not is_named and "$id" in schema:
        root = schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if not is_named and key in _VALUES:
            if key in _ENFORCED:
                _check_numbers(key, value)
            kept[key] = value
        elif is_named or key != "format" or not isinstance(value, str) or value in FORMATS:
            if not is_named and key in _BOUNDS:
                _check_numbers(key, value)
            named = not is_named and key in _NAMED
            kept[key] = _enforceable(value, root, closes=closes, is_named=named)
    if closes and not is_named and _has_properties(schema) and not _OPENING & schema.keys():
        kept["additionalProperties"] = False
    return kept if is_named or "propertyNames" not in kept else _by_names(kept, root)


def _by_names(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """An object's schema without propertyNames, which llguidance does not know: properties of these
    names, or nothing for any text. As it is where that would not say the same.
    """
    names = _definition(schema["propertyNames"], root)
    others = {key: value for key, value in schema.items() if key != "propertyNames"}
    if not isinstance(names, Mapping) or names.get("type", "string") != "string":
        return schema
    said = names.keys() - _REMARKS - {"type"}
    if not said:
        return others
    if len(said) > 1 or not {"properties", "patternProperties"}.isdisjoint(schema):
        return schema
    value = schema.get("additionalProperties", True)
    others["additionalProperties"] = False
    if isinstance(pattern := names.get("pattern"), str):
        return {**others, "patternProperties": {pattern: value}}
    chosen = names.get("enum", [names.get("const")])
    is_list = isinstance(chosen, list) and all(isinstance(each, str) for each in chosen)
    if not is_list or len(chosen) * len(_written(value)) > MAX_TEXT:
        return schema
    return {**others, "properties": dict.fromkeys(chosen, value)}


def _definition(schema: Any, root: Any) -> Any:
    """The definition that a schema refers to, if it is such a reference alone."""
    if isinstance(schema, Mapping) and schema.keys() == {"$ref"}:
        _, _, path = str(schema["$ref"]).partition("#/")
        where, _, name = path.partition("/")
        definitions = root.get(where) if where in ("$defs", "definitions") else None
        return definitions.get(name, schema) if isinstance(definitions, Mapping) else schema
    return schema


def _has_properties(schema: Mapping[str, Any]) -> bool:
    """Whether a schema names properties, all that it requires among them."""
    given, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(given, Mapping) or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in given for name in required)


def _is_combined(schema: Any) -> bool:
    """Whether a part of a schema may describe an object together with another part."""
    if isinstance(schema, list):
        return any(map(_is_combined, schema))
    if not isinstance(schema, Mapping):
        return False
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    beside = "properties" in schema and bool(_COMBINING & schema.keys())
    return several or beside or any(map(_is_combined, schema.values()))


def _check_numbers(key: str, value: Any) -> None:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            _check_numbers(key, each)
    elif isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise GuideError(f"guide: {key}: expected integers of at most 2^53, got {shown(value)}")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GuideError(f"guide: expected a JSON schema, got: {error}") from None


def _written(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except Exception as error:  # RecursionError too, and errors of a user's class
        raise GuideError(f"guide: expected what JSON can say, got: {error}") from None
