"""Tool calls in the text of an answer, in the formats of families of models.

An answer is text and blocks of calls. A block is all calls or all text: a block that is malformed,
unfinished, or names no tool of the request stays text, and nothing of it is lost. A block is held
back until that is known; other text is passed on at once, except for what may become a marker.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from eecore.models import Tokenizer
from eecore.models.text.thinking import overlap
from eecore.serving import python_calls, xml_calls
from eecore.serving.python_calls import PythonCalls
from eecore.serving.xml_calls import XmlCall

SPACE = re.compile(r"\s*")
# The end of a run of JSON outside of strings, and within them.
OUTSIDE = re.compile(r"[^\s\w,:.+-]")
WITHIN = re.compile(r'["\\]')
# What follows the name of a function in Mistral's format, up to the arguments.
ARGUMENTS, CALL_ID = "[ARGS]", "[CALL_ID]"
NAMED = re.compile(
    rf"([^\[\]{{}}\n]{{1,256}})(?:{re.escape(CALL_ID)}[^\[\]{{}}\n]{{0,256}})?{re.escape(ARGUMENTS)}\s*(?=\{{)"
)
# Such a name as far as it can be read.
NAMING = re.compile(r"[^\[\]{}\n]{0,256}(?:\[[A-Z_]*(?:\][^\[\]{}\n]{0,256})?){0,2}\s*")
# The separator before the next of several calls in Llama's format.
BETWEEN = re.compile(r"(?:\s|;|<\|python_tag\|>)*")


@dataclass(frozen=True)
class ToolCall:
    """A tool call in an answer."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""

    def whole(self) -> dict[str, Any]:
        """The call in OpenAI's format."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}

    def pieces(self, index: int) -> list[dict[str, Any]]:
        """The parts of the call in a stream: the name first."""
        function = {"name": self.name, "arguments": ""}
        first = {"index": index, "id": self.id, "type": "function", "function": function}
        return [first, {"index": index, "function": {"arguments": self.arguments}}]


@dataclass(frozen=True)
class ToolFormat:
    """A family's format of tool calls.

    Args:
        opens: the marker before a block.
        closes: the marker after it; "": none.
        is_rest: a block goes on to the end of the answer, call after call; one that is the whole
            answer may lack its marker.
        arguments: the name of the field of the arguments.
        is_list: a block has a list of calls.
        language: of the calls in a block, which may be JSON in any format; "named" is a name,
            :data:`ARGUMENTS` and JSON.
        id_length: length of the ids, where the family's templates insist on one.
        hints: texts that only the family's chat templates have.
        tokens: the markers that are tokens of the model, with their ids.
    """

    opens: str
    closes: str = ""
    is_rest: bool = False
    arguments: str = "arguments"
    is_list: bool = False
    language: Literal["json", "tags", "python", "named"] = "json"
    id_length: int | None = None
    hints: tuple[str, ...] = ()
    tokens: tuple[tuple[str, int], ...] = ()

    def of(self, tokenizer: Tokenizer) -> ToolFormat:
        """The format of a model with this tokenizer."""
        ids = ((marker, tokenizer.token_id(marker)) for marker in self.markers)
        return replace(self, tokens=tuple((each, id_) for each, id_ in ids if id_ is not None))

    @property
    def begins(self) -> str:
        """The text before a call that has to be made."""
        return "" if self.is_rest else f"{self.opens}{self._line_end}"

    @property
    def ends(self) -> str:
        """The text after it."""
        return f"{self._line_end}{self.closes}"

    @property
    def _line_end(self) -> str:
        """The text between a marker and a call."""
        return "\n" if self.closes and self.language != "python" else ""

    @property
    def markers(self) -> list[str]:
        named = (CALL_ID, ARGUMENTS) if self.language == "named" else ()
        return [marker for marker in (self.opens, self.closes, *named) if marker]

    @property
    def openers(self) -> list[str]:
        """The texts that a block may begin with: models leave the marker before tags out."""
        return [self.opens, *([xml_calls.OPENS] if self.language == "tags" else ())]

    def written(self, calls: Iterable[tuple[str, Any]]) -> str:
        """The text of calls with these names and arguments."""
        others = {"tags": xml_calls.written, "python": python_calls.written}
        write = others.get(self.language, self._in_json)
        texts = [write(*call) for call in calls]
        if self.is_list:
            return f"{self.begins}[{', '.join(texts)}]{self.ends}"
        separator = "; " if self.is_rest else "\n"
        return separator.join(f"{self.begins}{text}{self.ends}" for text in texts)

    def _in_json(self, name: str, arguments: Any) -> str:
        if self.language == "named":
            return f"{name}{ARGUMENTS}{json.dumps(arguments, ensure_ascii=False)}"
        return json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False)

    def new_id(self) -> str:
        """A new id for a call."""
        number = uuid.uuid4().hex
        return f"call_{number[:24]}" if self.id_length is None else number[: self.id_length]


FORMATS = {
    "mistral3": ToolFormat("[TOOL_CALLS]", language="named", id_length=9, hints=(ARGUMENTS,)),
    "mistral": ToolFormat("[TOOL_CALLS]", is_list=True, id_length=9, hints=("[TOOL_CALLS]",)),
    "granite": ToolFormat("<|tool_call|>", is_list=True, hints=("<|tool_call|>",)),
    "qwen3_coder": ToolFormat(
        "<tool_call>", "</tool_call>", language="tags", hints=(xml_calls.PARAMETER_OPENS,)
    ),
    "hermes": ToolFormat("<tool_call>", "</tool_call>", hints=("<tool_call>",)),
    "lfm2": ToolFormat(
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        is_list=True,
        language="python",
        hints=("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),
    ),
    "llama3": ToolFormat(
        "<|python_tag|>",
        is_rest=True,
        arguments="parameters",
        hints=("<|python_tag|>", '"parameters": '),
    ),
}
TOOL_PARSERS = ("auto", *sorted(FORMATS), "none")


def tool_format(parser: str, template: str | None) -> ToolFormat | None:
    """The format that a parser's name means for a model with a chat template; None for none.

    A template without a known format gets the tools in the form of hermes.
    """
    if parser != "auto":
        return FORMATS.get(parser)
    known = FORMATS.values()
    found = (f for f in known if any(hint in (template or "") for hint in f.hints))
    return next(found, FORMATS["hermes"])


@dataclass(frozen=True)
class ExpectedCalls:
    """The tool calls that an answer may make.

    Args:
        functions: those that may be called, as OpenAI describes them.
        is_required: whether the answer must make a call.
        max_calls: None for any number. Further calls are left out of the answer.
    """

    format: ToolFormat
    functions: tuple[Mapping[str, Any], ...]
    is_required: bool = False
    max_calls: int | None = None

    def reader(self) -> CallReader:
        """A reader for one answer."""
        schemas = {each["name"]: each.get("parameters") for each in self.functions}
        return CallReader(self.format, schemas, self.max_calls)


class CallReader:
    """Finds the text and the calls of one answer, which may come piece by piece.

    Where there are calls, text before, between and after them is left out if it is only space.

    Args:
        schemas: the functions by name, with the schemas of their parameters, which give texts in
            tags their types; None for any parameters.
        max_calls: None for any number; further calls are left out.
    """

    def __init__(
        self, form: ToolFormat, schemas: Mapping[str, Any], max_calls: int | None = None
    ) -> None:
        self._format = form
        self._schemas = schemas
        self._max_calls = max_calls
        self._held = ""
        """Text that is not passed on yet: an unfinished block, or what may become a marker."""
        self._space = ""
        """The space since the last call, while nothing else has come."""
        self._is_space = True
        self._block: _Block | None = None
        self._may_be_bare = form.is_rest
        self.num_calls = 0

    def add(self, text: str, *, last: bool = False) -> list[str | ToolCall]:
        """The parts that are certain after some more text, and all parts after the last text."""
        self._held += text
        parts: list[str | ToolCall] = []
        while True:
            if self._block is None and not self._open(parts, last):
                break
            block = self._block
            assert block is not None
            try:
                end = block.end(self._held, last)
            except (ValueError, RecursionError):
                self._give(parts, block.begin)
                self._block = None
                continue
            if end is None:
                break
            left = None if self._max_calls is None else self._max_calls - self.num_calls
            calls = [ToolCall(self._format.new_id(), *call) for call in block.calls[:left]]
            parts += calls
            self.num_calls += len(calls)
            self._held, self._space, self._is_space = self._held[end:], "", True
            self._block = None
        if last and not self.num_calls and self._space:
            parts.append(self._space)
        return parts

    def _open(self, parts: list[str | ToolCall], last: bool) -> bool:
        """Go on to the next block; False where none has begun."""
        if self._may_be_bare:
            begin = _skip(SPACE, self._held, 0)
            self._may_be_bare = begin == len(self._held) and not last
            if not self._may_be_bare and self._held[begin : begin + 1] == "{":
                self._give(parts, begin)
                self._block = self._new_block(0)
                return True
        openers = self._format.openers
        found = [(at, each) for each in openers if (at := self._held.find(each)) >= 0]
        if found:
            at, marker = min(found)
            self._give(parts, at)
            self._block = self._new_block(len(marker) if marker == self._format.opens else 0)
            return True
        pending = 0 if last else max(overlap(self._held, each) for each in openers)
        self._give(parts, len(self._held) - pending)
        return False

    def _new_block(self, begin: int) -> _Block:
        return _Block(self._format, self._schemas, begin)

    def _give(self, parts: list[str | ToolCall], count: int) -> None:
        """Pass on the next ``count`` characters as text."""
        text, self._held = self._space + self._held[:count], self._held[count:]
        self._is_space = self._is_space and (not text or text.isspace())
        self._space = text if self._is_space else ""
        if text and not self._is_space:
            parts.append(text)


class _Block:
    """Calls in a row.

    Args:
        begin: where the first call begins: after the marker, if there is one.
    """

    def __init__(self, form: ToolFormat, schemas: Mapping[str, Any], begin: int) -> None:
        self._format, self._schemas = form, schemas
        self._is_marked = begin > 0
        self.begin = max(begin, 1)
        """Where the text ends that is passed on if this is no block."""
        self.calls: list[tuple[str, str]] = []
        """Name and arguments of each call."""
        self._at = begin
        self._value: _Value | XmlCall | PythonCalls | _NamedCall | None = None

    def end(self, text: str, last: bool) -> int | None:
        """The block's end in a text that begins with it; None: not known yet.

        Raises:
            ValueError, RecursionError: the text is no block.
        """
        while True:
            if self._value is None:
                begin = _skip(SPACE, text, self._at)
                if begin == len(text):
                    _unless_last(last)
                    return None
                if self._format.language == "python":
                    self._value = PythonCalls(begin)
                elif text[begin] in "{[":
                    self._value = _Value(begin)
                elif self._format.language == "tags":
                    self._value = XmlCall(begin, self._schemas)
                elif self._format.language == "named":
                    self._value = _NamedCall(begin)
                else:
                    raise ValueError(text[begin])
                self._at = begin
            end = self._value.end(text)
            if end is None:
                _unless_last(last)
                return None
            if self._at < end:
                self.calls += self._read(self._value, text[self._at : end])
                self._at = end
            if not self._format.is_rest:
                begin = _skip(SPACE, text, end)
                has_tags = self._format.language == "tags"
                if not (has_tags and text.startswith(xml_calls.OPENS, begin)):
                    return self._closed(text, last)
                self._value = None
                continue
            start = _skip(BETWEEN, text, end)
            if start == len(text):
                return start if last else None
            if not last and self._format.opens.startswith(text[start:]):
                return None
            self._at, self._value = start, None

    def _read(
        self, value: _Value | XmlCall | PythonCalls | _NamedCall, text: str
    ) -> list[tuple[str, str]]:
        """The calls of a complete value."""
        if isinstance(value, XmlCall):
            return [(value.name, value.arguments(self._schemas[value.name]))]
        if isinstance(value, PythonCalls):
            text = value.json
        if isinstance(value, _NamedCall):
            name, arguments = value.call(text)
            text = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
        return _calls(text, self._schemas, not self._format.is_rest)

    def _closed(self, text: str, last: bool) -> int | None:
        """The position after the closing marker. Models leave the marker out before the next call,
        or at the end.
        """
        closes, opens = self._format.closes, self._format.opens
        if not closes:
            return self._at
        at = _skip(SPACE, text, self._at)
        if text.startswith(closes, at):
            return at + len(closes)
        if text.startswith(opens, at):
            return at
        rest = text[at:]
        openers = self._format.openers
        if closes.startswith(rest) or (not last and any(e.startswith(rest) for e in openers)):
            return len(text) if last else None
        if self._is_marked:
            raise ValueError(rest)
        return self._at


class _Value:
    """A JSON object or list in a text that grows."""

    def __init__(self, begin: int) -> None:
        self._at = begin
        self._depth = 0
        self._in_string = False
        self._end: int | None = None

    def end(self, text: str) -> int | None:
        """The value's end; None: not known yet.

        Raises:
            ValueError: the text cannot become JSON.
        """
        while self._end is None:
            found = (WITHIN if self._in_string else OUTSIDE).search(text, self._at)
            if found is None:
                self._at = len(text)
                return None
            mark, self._at = found[0], found.end()
            if mark == '"':
                self._in_string = not self._in_string
            elif mark == "\\" and self._in_string:
                if self._at == len(text):
                    self._at -= 1
                    return None
                self._at += 1
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                self._end = self._at if self._depth == 0 else None
            else:
                raise ValueError(mark)
        return self._end


class _NamedCall:
    """The name of a function and JSON, in a text that grows.

    Args:
        begin: where the name begins.
    """

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self._value: _Value | None = None

    def end(self, text: str) -> int | None:
        """The call's end; None: not known yet.

        Raises:
            ValueError: the text cannot become a call.
        """
        if self._value is None:
            found = NAMED.match(text, self._begin)
            if found is None:
                if _skip(NAMING, text, self._begin) < len(text):
                    raise ValueError(text[self._begin :])
                return None
            self._value = _Value(found.end())
        return self._value.end(text)

    @staticmethod
    def call(text: str) -> tuple[str, str]:
        """The name and the arguments of a complete call."""
        found = NAMED.match(text)
        assert found is not None
        return found[1].strip(), text[found.end() :]


def _calls(text: str, names: Collection[str], may_lack: bool) -> list[tuple[str, str]]:
    """Names and arguments of the calls that a JSON text makes: one, or a list of them.

    Raises:
        ValueError, RecursionError: the text is not JSON, or something else than calls.
    """
    json.loads(text, parse_constant=_refuse)
    listed = text if text.startswith("[") else f"[{text}]"
    try:
        found = msgspec.json.decode(listed.encode(), type=list[dict[str, msgspec.Raw]])
    except msgspec.DecodeError:
        raise ValueError(text) from None
    if not found:
        raise ValueError(text)
    written = ({name: bytes(raw).decode() for name, raw in each.items()} for each in found)
    return [_call(members, names, may_lack) for members in written]


def _call(members: Mapping[str, str], names: Collection[str], may_lack: bool) -> tuple[str, str]:
    """The name and the arguments of a call, from the JSON of its members."""
    name = json.loads(members.get("name", "null"))
    if not isinstance(name, str) or name not in names:
        raise ValueError(name)
    missing = "{}" if may_lack else "null"
    arguments = members.get("arguments", members.get("parameters", missing))
    value = json.loads(arguments)
    if isinstance(value, str):  # JSON in a JSON string
        arguments, value = value, json.loads(value, parse_constant=_refuse)
        arguments.encode()  # fails for half a surrogate pair, which cannot be sent
    if not isinstance(value, dict):
        raise ValueError(arguments)
    return name, arguments


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _unless_last(last: bool) -> None:
    """Raise an error if no more text can come."""
    if last:
        raise ValueError("unfinished")


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
