"""Messages of a conversation, copied to plain data for a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from eecore.errors import RequestError

MAX_DEPTH = 64
MAX_MESSAGES = 1 << 16
MAX_CHARACTERS = 64 << 20
"""Characters of all messages and variables together, at most."""


def given_values(messages: Any, variables: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The variables of a template, and their approximate number of characters.

    Raises:
        RequestError: the messages are not a list of objects with a role and a content, or are too
            many, or a value is not plain data: text, numbers, lists, objects.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not hasattr(messages, "__iter__"):
        raise RequestError(
            "messages: expected a list of objects with a role and a content, "
            f"got {type(messages).__name__}"
        )
    given = list(islice(messages, MAX_MESSAGES + 1))
    if len(given) > MAX_MESSAGES:
        raise RequestError(f"messages: expected at most {MAX_MESSAGES}, got more")
    copy = _Copy()
    conversation = [_message(copy, f"messages[{i}]", m) for i, m in enumerate(given)]
    values = {str(name): copy.of(str(name), value) for name, value in variables.items()}
    return {**values, "messages": conversation}, copy.num_characters


def _message(copy: _Copy, where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{where}: expected an object with a role and a content, got {type(message).__name__}"
        )
    plain: dict[str, Any] = copy.of(where, message)
    role, content = plain.get("role"), plain.get("content")
    if not isinstance(role, str):
        raise RequestError(f"{where}.role: expected text, got {_kind(plain, 'role')}")
    if "content" not in plain and len(plain) == 1:
        raise RequestError(f"{where}.content: expected text, got nothing")
    if content is not None and not isinstance(content, (str, list)):
        raise RequestError(
            f"{where}.content: expected text or a list of parts, got {_kind(plain, 'content')}"
        )
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, (str, dict)):
            raise RequestError(
                f"{where}.content[{index}]: expected text or an object, got {type(part).__name__}"
            )
    return plain


def _kind(fields: dict[str, Any], name: str) -> str:
    return type(fields[name]).__name__ if name in fields else "nothing"


class _Copy:
    """Copies values, and counts their characters."""

    def __init__(self) -> None:
        self.num_characters = 0

    def of(self, where: str, value: Any) -> Any:
        """A copy of a value, made only of lists, dicts, plain text and numbers."""
        try:
            return self._plain(value, 0)
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from None

    def _plain(self, value: Any, depth: int) -> Any:
        kind = type(value)
        self.num_characters += len(value) if kind is str else 8
        if self.num_characters > MAX_CHARACTERS:
            raise RequestError(f"expected at most {MAX_CHARACTERS} characters, got more")
        if value is None or kind in (str, bool, int, float):
            return value
        if depth > MAX_DEPTH:
            raise RequestError(f"expected at most {MAX_DEPTH} lists or objects deep, got more")
        if isinstance(value, Mapping):
            return {self._name(n): self._plain(item, depth + 1) for n, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._plain(item, depth + 1) for item in value]
        # Subclasses of text and numbers, such as enumerations, are made plain.
        for base, plain in ((str, str.__str__), (int, int), (float, float)):
            if isinstance(value, base):
                return self._plain(plain(value), depth)
        raise RequestError(f"expected text, numbers, lists or objects, got {kind.__name__}")

    def _name(self, name: Any) -> Any:
        if isinstance(name, str):
            self.num_characters += len(name)
            return str.__str__(name)
        if name is None or type(name) in (bool, int, float):
            return name
        raise RequestError(f"expected text as names, got {type(name).__name__}")
