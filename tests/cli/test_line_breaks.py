"""Line breaks between the words of streamed text."""

from __future__ import annotations

import random
import re

from rich.cells import cell_len
from rich.text import Text

from eecore.cli.line_breaks import LineBreaks

WIDTH = 12


def broken(text: str, sizes: list[int]) -> str:
    """The text as shown when it comes in pieces of some sizes."""
    breaks, shown, at = LineBreaks(WIDTH), "", 0
    for size in [*sizes, len(text)]:
        shown += breaks.add(text[at : at + size]).plain
        at += size
    return shown + breaks.rest().plain


def test_words_are_whole_however_the_text_comes() -> None:
    chance = random.Random(1)
    parts = ["a", "bb", "word", " ", "  ", "\n", "-", "漢", "字。", "\t"]
    for _ in range(500):
        text = "".join(chance.choices(parts, k=chance.randrange(40)))
        words = re.findall(r"[a-z-]+", text)
        if max(map(len, words), default=0) > WIDTH:
            continue
        shown = broken(text, [chance.randrange(1, 6) for _ in range(60)])
        assert shown == broken(text, [])
        assert re.findall(r"[a-z-]+", shown) == words
        assert "".join(shown.split()) == "".join(text.split())
        assert "\t" in text or max(cell_len(line.rstrip()) for line in shown.split("\n")) <= WIDTH


def test_a_line_that_is_full_and_a_word_longer_than_a_line() -> None:
    assert broken("exactly full and", []) == "exactly full\nand"
    assert broken("exactly full\nand", []) == "exactly full\nand"
    assert broken("    indented\n      much", []) == "    indented\n      much"
    breaks = LineBreaks(WIDTH)
    assert breaks.add("a word").plain == "a"
    assert breaks.add("w" * 20).plain == "\nword" + "w" * 20  # not held back for ever
    assert breaks.rest().plain == ""


def test_styles_stay() -> None:
    breaks = LineBreaks(WIDTH)
    shown = (
        breaks.add(Text("some words ", "red")) + breaks.add(Text("here", "blue")) + breaks.rest()
    )
    assert shown.plain == "some words\nhere"
    assert [(shown.plain[s.start : s.end], s.style) for s in shown.spans] == [
        *[("some", "red"), (" words", "red"), ("here", "blue")],
    ]
