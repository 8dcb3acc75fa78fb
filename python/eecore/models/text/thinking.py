"""Thoughts: the text in which a model reasons before it answers, between two markers.

The tokenizer says what the markers are where they are tokens, else the chat template. An answer has
one thought at most, at its beginning; the prompt may have opened it, or closed it.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from operator import eq
from typing import NamedTuple

from eecore.errors import ModelError, RequestError
from eecore.models.text.tokenizer import Tokenizer

MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("Here is my thought process:", "Here is my response:"),
)
"""The markers that open and close a thought, by family."""
SHOWN = ("\ufdd0", "\ufdd1")
"""Stand in decoded text for markers that are tokens: Unicode has no characters there, so that no
other token reads like a marker.
"""
AFTER = "\n\n"
"""Text between the closing marker and the answer."""
MAX_OPENING = 32
"""Last tokens of a prompt in which a marker in words is looked for."""


class Part(enum.Enum):
    """The part of a text that comes next."""

    BEGINNING = "beginning"
    """A marker, or an answer without a thought."""
    OPENED = "opened"
    """The first line of a thought."""
    THOUGHT = "thought"
    CLOSED = "closed"
    """The first line of an answer after a thought."""
    ANSWER = "answer"


class Reading(NamedTuple):
    """How far a text has been read."""

    part: Part
    held: str = ""
    """Text that may become a marker, or line ends before one."""


class Thinking:
    """The markers around a model's thoughts.

    Args:
        markers: the markers that open and close a thought.
    """

    def __init__(self, tokenizer: Tokenizer, markers: tuple[str, str]) -> None:
        self._tokenizer, self.markers = tokenizer, markers
        self._ids = [tokenizer.token_id(marker) for marker in markers]
        self.shown: dict[int, str] = {}
        """The text of markers that are tokens, in decoded text."""
        self._opens, self._closes = markers
        opens, closes = self._ids
        if opens is not None and closes is not None:
            self.shown = dict(zip((opens, closes), SHOWN, strict=True))
            self._opens, self._closes = SHOWN
        hidden = tokenizer.hidden(markers)
        texts = [
            "" if token in hidden else text for token, text in zip(self._ids, markers, strict=True)
        ]
        self._spelled = str.maketrans(dict(zip(SHOWN, texts, strict=True)))

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> Thinking | None:
        """The markers of a model; None where its tokenizer and chat templates have none."""
        if tokenizer is None:
            return None
        templates = [*tokenizer.named_templates.values(), tokenizer.chat_template or ""]
        for markers in MARKERS:
            is_token = all(tokenizer.token_id(marker) is not None for marker in markers)
            if is_token or any(all(m in text for m in markers) for text in templates):
                return cls(tokenizer, markers)
        return None

    @property
    def opening_id(self) -> int | None:
        """The token that opens a thought; None where the marker is not a token."""
        return next(iter(self.shown), None)

    @property
    def closing_id(self) -> int | None:
        """The token that closes a thought; None where the marker is not a token."""
        return self._ids[1] if self.shown else None

    def start(self, prompt_ids: Sequence[int]) -> Reading | None:
        """The beginning of the text after a prompt; None where the text can have no thought.

        It can where the prompt ends with an open thought, and where it asks for an answer as the
        chat template does, unless it closes a thought. What a user writes is not at the end of a
        prompt: tokens of the template follow it.
        """
        last: str | None
        if self.shown:
            added = self._tokenizer.added_ids
            token = next((token for token in reversed(prompt_ids) if token in added), None)
            last = None if token is None else self.shown.get(token)
        else:
            text = self._tokenizer.decode(prompt_ids[-MAX_OPENING:]).rstrip()
            last = next((each for each in self.markers if text.endswith(each)), None)
        if last is not None:
            return Reading(Part.OPENED) if last == self._opens else None
        turn = self._turn
        asks = bool(turn) and list(prompt_ids[-len(turn) :]) == turn
        return Reading(Part.BEGINNING) if asks else None

    def read(
        self, reading: Reading, text: str, *, last: bool = False
    ) -> tuple[Reading, str | None, str]:
        """Read more text, in which :attr:`shown` stands for the markers.

        Line ends around the markers belong to neither part.

        Args:
            last: whether no more text follows.

        Returns:
            The reading after it, what it adds to the thought (None where there is none), and what
            it adds to the answer.
        """
        part, held = reading.part, reading.held + text
        thought: str | None = None
        if part is Part.BEGINNING:
            begun = held.lstrip()
            if begun.startswith(self._opens):
                part, held = Part.OPENED, begun[len(self._opens) :]
            elif last or not self._opens.startswith(begun):
                return Reading(Part.ANSWER), None, held
            else:
                return Reading(part, held), None, ""
        if part is Part.OPENED:
            thought, held = "", held.lstrip("\n")
            part = Part.THOUGHT if held else part
        if part is Part.THOUGHT:
            thought, found, rest = held.partition(self._closes)
            if not found:
                end = len(thought) - (0 if last else overlap(thought, self._closes))
                kept = thought[:end].rstrip("\n")
                rest = "" if last else thought[len(kept) :]
                return Reading(part, rest), kept, ""
            part, thought, held = Part.CLOSED, thought.rstrip("\n"), rest
        if part is Part.CLOSED:
            held = held.lstrip("\n")
            part = Part.ANSWER if held else part
        return Reading(part), thought, held if part is Part.ANSWER else ""

    def closing(self, *, at_line: bool) -> tuple[int, ...]:
        """The tokens that close a thought, with the line ends around the marker.

        Args:
            at_line: whether the thought ends with a line end.
        """
        return self._closings[at_line]

    @property
    def max_closing(self) -> int:
        """The maximum number of tokens that close a thought."""
        return max(map(len, self._closings))

    @cached_property
    def after(self) -> tuple[int, ...]:
        """The tokens of the line ends after a closing marker that is a token."""
        closes, closing = self._ids[1], self._closings[0]
        return closing[closing.index(closes) + 1 :] if closes in closing else ()

    @cached_property
    def _closings(self) -> list[tuple[int, ...]]:
        """The tokens that close a thought within a line, and at the end of a line."""
        made = []
        for before, lead in (("a", "\n"), ("a\n", "")):
            texts = before, f"{before}{lead}{self.markers[1]}{AFTER}"
            known, both = (self._tokenizer.encode(t, add_special_tokens=False) for t in texts)
            made.append(tuple(both[len(known) :]))
        return made

    def spelled(self, text: str) -> str:
        """A part of a text, with the markers that are text of it as the tokenizer has them."""
        return text.translate(self._spelled) if self.shown else text

    def num_tokens(self, token_ids: Sequence[int]) -> int:
        """The number of tokens of a text with a thought up to the end of its thought."""
        if self.shown:
            closes = self._ids[1]
            return token_ids.index(closes) + 1 if closes in token_ids else len(token_ids)

        def is_closed(count: int) -> bool:
            return self._closes in self._tokenizer.decode(token_ids[:count])

        return bisect_left(range(len(token_ids)), True, key=is_closed)

    @cached_property
    def _turn(self) -> list[int]:
        """The tokens with which the chat template asks for an answer."""
        tokenizer, messages = self._tokenizer, [{"role": "user", "content": "a"}]
        try:
            texts = [
                tokenizer.apply_chat_template(messages, add_generation_prompt=asks)
                for asks in (True, False)
            ]
        except (ModelError, RequestError):
            return []
        asking, told = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        turn = asking[sum(takewhile(bool, map(eq, asking, told))) :]
        return turn or [token for token in asking[-1:] if token in tokenizer.added_ids]


def overlap(text: str, marker: str) -> int:
    """The length of the longest end of a text that begins a marker."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)
