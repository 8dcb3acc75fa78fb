"""What one rendering of a chat template may do: steps, and text that it makes.

Templates come with models and are programs. Steps bound their time and made text their memory; both
are counted as the work is done, so that the same template and messages always come out the same.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any

from jinja2.runtime import Context
from jinja2.utils import Namespace

__all__ = ["ITEM", "REPR", "WORK", "Lazy", "TemplateLimit", "Work", "weigh", "work_of"]

WORK = "@work"
"""Where a rendering's work is kept among its variables: no template can say this name."""

# A step takes about a microsecond at most.
STEPS, STEPS_PER_MESSAGE = 2_000_000, 2_000
CHARACTERS, CHARACTERS_PER_GIVEN = 64 << 20, 16
ITEM = 16
"""What an item of a list counts beside characters."""
REPR = 10
"""How many characters may stand for one where a list is written."""
DEPTH = 100
"""How deeply lists and objects may lie in one another."""
# Comparing shorter texts than this is part of a step, and so is writing them.
SHORT = 4096
SCANNED_PER_STEP = 64
MOST_BITS = 1 << 16
"""Of a whole number."""
MOST_WIDTH = 10_000
"""Of what a filter pads or cuts to, and of a number in a format."""


class TemplateLimit(Exception):
    """A template wants more than it may have."""


class Work:
    """What a rendering may still do.

    Args:
        messages: of the conversation, which long ones need more steps for.
        given: characters of all that the template is given.
    """

    __slots__ = ("characters", "most_characters", "most_steps", "steps")

    def __init__(self, messages: int, given: int) -> None:
        self.most_steps = self.steps = STEPS + STEPS_PER_MESSAGE * messages
        self.most_characters = self.characters = CHARACTERS + CHARACTERS_PER_GIVEN * given

    def step(self, count: int = 1) -> None:
        """So many steps are about to be done."""
        self.steps -= count
        if self.steps < 0:
            raise TemplateLimit(f"expected at most {self.most_steps} steps, got more")

    def scan(self, characters: int) -> None:
        """So many characters are about to be read."""
        self.step(characters // SCANNED_PER_STEP + 1)

    def expect(self, characters: int) -> None:
        """So many characters at most are about to be made."""
        if characters > self.characters:
            raise TemplateLimit(f"expected at most {self.most_characters} characters, got more")

    def make(self, characters: int) -> None:
        """So many characters are or have been made."""
        self.characters -= characters
        if self.characters < 0:
            self.expect(0)

    def width(self, value: Any) -> None:
        """A width, a precision or a number of places."""
        if isinstance(value, int) and abs(value) > MOST_WIDTH:
            raise TemplateLimit(f"expected widths of {MOST_WIDTH} at most, got {_shown(value)}")

    def bits(self, count: int) -> None:
        """A whole number of so many bits is about to be made."""
        if count > MOST_BITS:
            raise TemplateLimit(f"expected whole numbers of {MOST_BITS} bits at most, got {count}")

    def written(self, value: Any) -> str:
        """A value as text."""
        text = value if type(value) is str else self._written(value)
        self.make(len(text))
        return text

    def _written(self, value: Any) -> str:
        self.readable(value)
        return str(value)

    def readable(self, value: Any) -> int:
        """How many characters a value is that is about to be read as text."""
        size = weigh(self, value)
        self.expect(size if isinstance(value, str) else REPR * size)
        self.scan(size)
        return size


class Lazy(Iterator[Any]):
    """The items of a filter that gives them one by one, each of them a step."""

    __slots__ = ("_items", "_work")

    def __init__(self, work: Work, items: Iterator[Any]) -> None:
        self._work = work
        self._items = items

    def __next__(self) -> Any:
        self._work.step()
        return next(self._items)

    def __repr__(self) -> str:
        """What a template shows that forgot to make a list of it."""
        return repr(self._items)


def work_of(context: Context) -> Work:
    """The work of the rendering that a filter or call is part of."""
    work: Work = context.parent[WORK]
    return work


def weigh(work: Work, value: Any, depth: int = 0) -> int:
    """About how many characters a value has, all that it holds counted as often as it is held.

    What reads a value to its depths (writes, compares, hashes it) costs that much; the counting
    itself is work too.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return 5 + value.bit_length() // 3
    if depth > DEPTH:
        raise TemplateLimit(f"expected lists and objects at most {DEPTH} deep, got deeper ones")
    if isinstance(value, (list, tuple, KeysView, ValuesView)):
        work.step(4 + 2 * len(value))
        return sum(weigh(work, item, depth + 1) + 4 for item in value) + 2
    if isinstance(value, Namespace):
        value = value._Namespace__attrs
    if isinstance(value, (dict, ItemsView)):
        work.step(4 + 4 * len(value))
        pairs = value.items() if isinstance(value, dict) else value
        return sum(weigh(work, k, depth + 1) + weigh(work, v, depth + 1) + 8 for k, v in pairs) + 2
    if isinstance(value, range):
        return 8 * len(value)
    return 64


def _shown(value: int) -> str:
    return str(value) if value.bit_length() < 64 else f"one of {value.bit_length()} bits"
