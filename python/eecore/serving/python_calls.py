"""Tool calls as a list of Python's calls, as LFM2 writes them: ``[name(place="x", days=[1, 2])]``.

They are read as JSON, and nothing is evaluated. LFM2.5's template writes texts between quotes as
they are, so that a quote ends a text only where the call can go on after it; and it writes some
constants as JSON does.
"""

from __future__ import annotations

import codecs
import json
import re
from contextlib import suppress
from typing import Any

from eecore.serving.xml_calls import CONSTANTS, after_space

WORD = re.compile(r"""[^\s()\[\]{}'"=,:]+""")
"""The name of a function or a parameter, a constant or a number."""
_NAMING = re.compile(r"\s*([(=]?)")
"""What follows a word, and makes it a name."""
_QUOTE = re.compile("\"\"\"|'''|\"|'")
_ESCAPE = re.compile(r"""\\(?:[\\'"abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})""")
_CLOSING = {"[": "]", "{": "}"}
_SEPARATORS = {",": ", ", ":": ": "}
_AFTER_TEXT = ",:)]}"


def written(name: str, arguments: Any) -> str:
    """A call in Python."""
    values = arguments if isinstance(arguments, dict) else {}
    parts = []
    for each, value in values.items():
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
        parts.append(f"{each}={text}")
    return f"{name}({', '.join(parts)})"


class PythonCalls:
    """Calls in Python, or as JSON, in a text that grows.

    Args:
        begin: where they begin.
    """

    def __init__(self, begin: int) -> None:
        self._at = begin
        self._open: list[str] = []
        """The brackets that are yet to be closed."""
        self._parts: list[str] = []
        self._quote = ""
        """The quote that a text begins with; empty outside of texts."""
        self._search = 0
        """Where the end of the text is looked for."""
        self._end: int | None = None

    @property
    def json(self) -> str:
        """The calls as JSON: objects with a name and arguments."""
        return "".join(self._parts)

    def end(self, text: str) -> int | None:
        """The end of the calls; None: not known yet.

        Raises:
            ValueError: the text cannot become calls.
        """
        while self._end is None and self._goes_on(text):
            pass
        return self._end

    def _goes_on(self, text: str) -> bool:
        """Read the next part; False where it is incomplete."""
        if self._quote:
            return self._ends_text(text)
        at = self._at = after_space(text, self._at)
        mark = text[at : at + 1]
        if not mark:
            return False
        if mark in _CLOSING:
            self._open.append(_CLOSING[mark])
            self._goes_to(at + 1, mark)
        elif mark in _SEPARATORS:
            self._goes_to(at + 1, _SEPARATORS[mark])
        elif mark in ")]}":
            self._close(mark)
        elif (quote := _QUOTE.match(text, at)) is not None:
            if len(text) < at + 3:
                return False
            self._quote, self._at = quote[0], quote.end()
            self._search = self._at
        else:
            return self._reads_word(text)
        return True

    def _goes_to(self, at: int, part: str) -> None:
        self._at = at
        self._parts.append(part)

    def _close(self, mark: str) -> None:
        if not self._open or self._open.pop() != mark:
            raise ValueError(mark)
        if self._parts[-1] == _SEPARATORS[","]:
            self._parts.pop()
        self._goes_to(self._at + 1, "}}" if mark == ")" else mark)
        self._end = None if self._open else self._at

    def _reads_word(self, text: str) -> bool:
        found = WORD.match(text, self._at)
        naming = None if found is None else _NAMING.match(text, found.end())
        if found is None or naming is None:
            raise ValueError(text[self._at])
        word, kind = found[0], naming[1]
        if not kind and naming.end() == len(text):
            return False
        if kind == "(" and self._open in ([], ["]"]):
            self._open.append(")")
            part = f'{{"name": {json.dumps(word)}, "arguments": {{'
        elif kind == "=" and self._open[-1:] == [")"]:
            part = f"{json.dumps(word, ensure_ascii=False)}: "
        elif not kind:
            part = _constant(word)
        else:
            raise ValueError(word)
        self._goes_to(naming.end(), part)
        return True

    def _ends_text(self, text: str) -> bool:
        for found in re.compile(rf"\\.|{self._quote}", re.DOTALL).finditer(text, self._search):
            if found[0] == self._quote:
                after = after_space(text, found.end())
                if after == len(text):
                    return False
                if text[after] in _AFTER_TEXT:
                    value = _text(text[self._at : found.start()], self._quote)
                    self._goes_to(found.end(), json.dumps(value, ensure_ascii=False))
                    self._quote = ""
                    return True
            self._search = found.end()
        self._search = max(self._search, len(text) - 2)
        return False


def _constant(word: str) -> str:
    """The JSON of a constant or a number.

    Raises:
        ValueError: it is none.
    """
    if word in CONSTANTS:
        return CONSTANTS[word]
    with suppress(ValueError):
        json.loads(word)
        return word
    for number in (int, float):
        with suppress(ValueError):
            return json.dumps(number(word))
    raise ValueError(word)


def _text(inner: str, quote: str) -> str:
    """The text that is written between quotes.

    Raises:
        ValueError: it has an escape of no character.
    """
    if quote == '"':
        with suppress(ValueError):
            return str(json.loads(f'"{inner}"', strict=False))
    return _ESCAPE.sub(lambda found: codecs.decode(found[0], "unicode_escape"), inner)
