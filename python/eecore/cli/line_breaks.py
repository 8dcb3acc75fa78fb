"""Line breaks between the words of a text that comes piece by piece."""

from __future__ import annotations

import re

from rich.cells import cell_len
from rich.text import Text

# Scripts without spaces may break after any character.
WIDE = "\u2e80-\ud7ff\uf900-\ufaff\uff00-\uff60"
PART = re.compile(rf"\n|[^\S\n]+|[{WIDE}]|[^\s{WIDE}]+")
HELD = re.compile(rf"(?:[^\S\n]+)?(?:[{WIDE}]|[^\s{WIDE}]*)\Z")
"""The last word of a text, which may go on, and the spaces before it."""


def whole_words(text: str | Text, width: int) -> Text:
    """A text with breaks between words, for lines of a width, in cells of a terminal."""
    breaks = LineBreaks(width)
    return breaks.add(text) + breaks.rest()


class LineBreaks:
    """Breaks lines before words that do not fit; a word is held back until it is whole.

    Args:
        width: of a line, in cells of a terminal; 0, of a terminal that does not tell it, is 80.
    """

    def __init__(self, width: int) -> None:
        self._width, self._column = width or 80, 0
        self._held = Text()

    def add(self, text: str | Text) -> Text:
        """The text that can be shown now, with line breaks."""
        self._held.append_text(text if isinstance(text, Text) else Text(text))
        last = HELD.search(self._held.plain)
        assert last is not None
        # A word that is longer than a line is not held back.
        return self._taken(last.start() if len(last[0]) <= self._width else len(self._held))

    def rest(self) -> Text:
        """The end of the text."""
        return self._taken(len(self._held))

    def _taken(self, end: int) -> Text:
        """The held text up to ``end``."""
        shown, space = Text(), 0
        for part in PART.finditer(self._held.plain[:end]):
            begin, word, size = part.start(), part[0], cell_len(part[0])
            if word == "\n":
                self._column, space = 0, 0
            elif word.isspace():
                space = len(word)
                continue
            elif self._column and self._column + space + size > self._width:
                shown.append("\n")
                self._column, space = (size - 1) % self._width + 1, 0
            else:
                self._column = (self._column + space + size - 1) % self._width + 1
            shown.append_text(self._held[begin - space : part.end()])
            space = 0
        shown.append_text(self._held[end - space : end])
        self._held = self._held[end:]
        return shown
