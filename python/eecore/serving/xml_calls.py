"""Tool calls as tags, as Qwen3-Coder writes them: a function, and a text for each parameter.

The texts have no quotes, so that a parameter's schema has to say whether ``5`` is a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from eecore.guide import MAX_TEXT

OPENS, CLOSES = "<function=", "</function>"
PARAMETER_OPENS, PARAMETER_CLOSES = "<parameter=", "</parameter>"
SPACE = re.compile(r"\s*")
NAME = re.compile(r"[^<>\n]+")
# Keywords of a string's schema that a free text follows anyway.
_SAYING = {"type", "title", "description", "default", "examples", "enum", "const", "deprecated"}
# Keywords of an object that more than its list of properties has to follow.
_BEYOND_PROPERTIES = {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "minProperties"}
_BEYOND_PROPERTIES |= {"maxProperties", "propertyNames", "dependentSchemas", "dependentRequired"}
_BEYOND_PROPERTIES |= {"dependencies", "unevaluatedProperties"}
_DEFINITIONS = ("$defs", "definitions")
# References that hold in a parameter's schema alone, once it has the definitions.
_REFERENCES = re.compile(r'"\$(?:id|anchor)":|"\$ref": "(?!#/(?:\$defs|definitions)/)')
MAX_REFERENCES = 16
"""References that are followed from one to the next."""
CONSTANTS = {"True": "true", "False": "false", "None": "null"}
"""Python's names of values, which templates write for calls in a history."""


def written(name: str, arguments: Any) -> str:
    """A call as tags."""
    values = arguments if isinstance(arguments, Mapping) else {}
    parts = [f"{OPENS}{name}>\n"]
    for each, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        parts.append(f"{PARAMETER_OPENS}{each}>\n{text}\n{PARAMETER_CLOSES}\n")
    return "".join([*parts, CLOSES])


class XmlCall:
    """A call as tags in a text that grows.

    A parameter's text ends at the first closing tag that another tag of the call follows.

    Args:
        begin: where its tag begins.
        names: the functions that there are.
    """

    def __init__(self, begin: int, names: Collection[str]) -> None:
        self._at = begin
        self._names = names
        self.name = ""
        self._values: dict[str, str] = {}
        self._parameter: str | None = None
        self._search = 0
        """Where the end of the parameter's text is looked for."""
        self._end: int | None = None

    def end(self, text: str) -> int | None:
        """The call's end; None: not known yet.

        Raises:
            ValueError: the text cannot become a call.
        """
        while self._end is None and self._goes_on(text):
            pass
        return self._end

    def arguments(self, schema: Any) -> str:
        """The JSON of its arguments, by the schema of the function's parameters."""
        root = schema if isinstance(schema, Mapping) else {}
        members = (
            f"{json.dumps(name, ensure_ascii=False)}: {_value(value, _schema_of(name, root), root)}"
            for name, value in self._values.items()
        )
        return f"{{{', '.join(members)}}}"

    def _goes_on(self, text: str) -> bool:
        """Read the next part; False where it is incomplete."""
        if not self.name:
            name = _name(text, self._at, OPENS)
            if name is None:
                return False
            if name not in self._names:
                raise ValueError(name)
            self.name, self._at = name, self._at + len(OPENS) + len(name) + 1
        elif self._parameter is None:
            at = after_space(text, self._at)
            if text.startswith(CLOSES, at):
                self._end = at + len(CLOSES)
            elif CLOSES.startswith(text[at:]):
                return False
            else:
                self._parameter = _name(text, at, PARAMETER_OPENS)
                if self._parameter is None:
                    return False
                self._at = at + len(PARAMETER_OPENS) + len(self._parameter) + 1
                self._search = self._at
        else:
            return self._ends_parameter(text, self._parameter)
        return True

    def _ends_parameter(self, text: str, name: str) -> bool:
        found = text.find(PARAMETER_CLOSES, self._search)
        if found < 0:
            self._search = max(self._search, len(text) - len(PARAMETER_CLOSES))
            return False
        after = found + len(PARAMETER_CLOSES)
        at = after_space(text, after)
        tags = (PARAMETER_OPENS, CLOSES)
        if text.startswith(tags, at):
            value = text[self._at : found].removeprefix("\n")
            self._values[name] = value.removesuffix("\n")
            self._at, self._parameter = at, None
        elif any(tag.startswith(text[at:]) for tag in tags):
            self._search = found
            return False
        else:
            self._search = after
        return True


def _name(text: str, at: int, opens: str) -> str | None:
    """The name in a tag; None: not known yet."""
    if not text.startswith(opens, at):
        if opens.startswith(text[at:]):
            return None
        raise ValueError(text[at:])
    found = NAME.match(text, at + len(opens))
    end = at + len(opens) if found is None else found.end()
    if end == len(text):
        return None
    if found is None or text[end] != ">":
        raise ValueError(text[at:end])
    return found[0]


def after_space(text: str, at: int) -> int:
    """The position of the next character that is no space."""
    found = SPACE.match(text, at)
    return at if found is None else found.end()


def _value(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The JSON of a parameter's text: as it is where it is the JSON of a type that the schema has,
    a string where the schema has strings, or where it is no JSON.
    """
    kinds = _types(schema, root)
    said = CONSTANTS.get(text.strip(), text)
    if kinds != {"string"} and (kind := _type_of(said)):
        fits = kind in kinds or (kind == "integer" and "number" in kinds)
        if "string" not in kinds or (fits and kind != "string"):
            return said.strip()
    return json.dumps(text, ensure_ascii=False)


def _type_of(text: str) -> str:
    """The type of a JSON text; empty for a text that is none."""
    try:
        value = json.loads(text, parse_constant=int)  # int refuses NaN and Infinity
    except (ValueError, RecursionError):
        return ""
    return _type_of_value(value)


def _type_of_value(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _schema_of(name: str, root: Mapping[str, Any]) -> Any:
    """The schema of a parameter."""
    properties = _resolved(root, root).get("properties")
    named = properties if isinstance(properties, Mapping) else {}
    return named.get(name, root.get("additionalProperties"))


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a reference within ``root`` names; empty where it names none."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema if isinstance(schema, Mapping) else {}
        place, found = schema["$ref"], root
        if not isinstance(place, str) or not place.startswith("#"):
            return {}
        for step in place.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            found = found.get(step, {}) if isinstance(found, Mapping) else {}
        schema = found
    return {}


def _types(
    schema: Any, root: Mapping[str, Any], known: dict[int, set[str]] | None = None
) -> set[str]:
    """The types that a schema allows; empty: it says nothing of them.

    Args:
        known: the types found before, by the schemas' ids.
    """
    try:
        return _found_types(schema, root, {} if known is None else known)
    except RecursionError:
        return set()


def _found_types(schema: Any, root: Mapping[str, Any], known: dict[int, set[str]]) -> set[str]:
    """The types that a schema allows, as found before or now."""
    said = _resolved(schema, root)
    if id(said) not in known:
        known[id(said)] = set()  # a schema that refers to itself says nothing by that
        known[id(said)] = _types_of(said, root, known)
    return known[id(said)]


def _types_of(
    schema: Mapping[str, Any], root: Mapping[str, Any], known: dict[int, set[str]]
) -> set[str]:
    given = schema.get("type")
    if given is not None:
        return {given} if isinstance(given, str) else set(given)
    if "const" in schema:
        return {_type_of_value(schema["const"])}
    if isinstance(schema.get("enum"), list):
        return set(map(_type_of_value, schema["enum"]))
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            each = [_found_types(branch, root, known) for branch in schema[key]]
            if key == "allOf" or all(each):
                return set().union(*each)
    return set()


def single_parameters(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]] | None:
    """The parameters of a function, each with a schema that stands alone, with the definitions that
    it refers to; None where more than these schemas has to hold.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    inner = json.dumps({name: each for name, each in schema.items() if name != "$id"})
    is_plain = not _BEYOND_PROPERTIES & schema.keys() and not _REFERENCES.search(inner)
    if not is_plain or not isinstance(properties, Mapping) or not isinstance(required, list):
        return None
    if any(each not in properties for each in required):
        return None
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    room = MAX_TEXT // (len(json.dumps(definitions)) + 1)
    made: dict[str, Mapping[str, Any]] = {}
    for name, given in properties.items():
        if not isinstance(given, Mapping):
            return None
        refers = '"$ref"' in json.dumps(given)
        room -= refers
        if room < 0:
            return None
        made[name] = {**given, **definitions} if refers else given
    return made


def tagged_parameters(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """The parameters of a function, where texts in tags can follow its schema; else None.

    Each has a schema that stands alone; None for a free text; a list for one of some texts.
    """
    parameters = single_parameters(schema)
    if parameters is None:
        return None
    made: dict[str, Any] = {}
    known: dict[int, set[str]] = {}
    for name, given in parameters.items():
        if not NAME.fullmatch(name):
            return None
        kinds, resolved = _types(given, schema, known), _resolved(given, schema)
        if "string" not in kinds:
            made[name] = given
        elif kinds == {"string"} and not resolved.keys() - _SAYING:
            texts = [resolved["const"]] if "const" in resolved else resolved.get("enum")
            if texts and any(not _is_tagged_as_it_is(each) for each in texts):
                return None
            made[name] = texts
        elif kinds == {"string", "null"} and _is_text_or_null(resolved):
            made[name] = None
        else:
            return None
    return made


def _is_text_or_null(schema: Mapping[str, Any]) -> bool:
    parts = [schema, *schema.get("anyOf", ())]
    return all(part.keys() <= _SAYING - {"enum", "const"} | {"anyOf"} for part in parts)


def _is_tagged_as_it_is(text: Any) -> bool:
    return isinstance(text, str) and PARAMETER_CLOSES not in text and text == text.strip("\n")
