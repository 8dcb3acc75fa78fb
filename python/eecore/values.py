"""Checks of users' values, which are stored as Python's own numbers and strings.

A stored value of another type would bring its surprises along: an int8 that overflows, a Fraction
that numpy does not take, a bool that counts as one. A wrong value is refused at once, not by a
TypeError or OverflowError from far inside.
"""

from __future__ import annotations

import inspect
import math
import operator
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from numbers import Integral, Real
from typing import Annotated, Any, get_args, get_origin, get_type_hints

INT32_MAX = 2**31 - 1
MIN_POSITIVE = sys.float_info.min
MAX_SHOWN = 120
"""Characters of a value that errors show."""


class _Short(reprlib.Repr):
    """A repr that looks at no more of a value than it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxstring = self.maxother = self.maxlong = MAX_SHOWN
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 8

    def repr_int(self, value: int, _level: int) -> str:
        """Python refuses to write out very long integers."""
        return repr(value) if value.bit_length() < 1000 else "a value of type int"


_SHORT = _Short()


def shown(value: object) -> str:
    """A value as an error shows it: its repr, cut short; its type where repr fails."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # whatever a user's class raises
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def as_whole(value: object, low: float = -math.inf, high: float = math.inf) -> int | None:
    """An integer, numpy's included, of low..high as an int; None for all else, and for bools."""
    try:
        if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
            return None
        number = int(value)
    except Exception:
        return None
    return number if low <= number <= high else None


def as_real(value: object, low: float = -math.inf, high: float = math.inf) -> float | None:
    """A finite real number, numpy's included, of low..high as a float; None for all else, and for
    bools.
    """
    try:
        if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
            return None
        number = float(value)
    except Exception:
        return None
    return number if math.isfinite(number) and low <= number <= high else None


def as_index(value: object) -> int | None:
    """An index, tensors of one integer included, as an int; None for all else, and for bools."""
    try:
        if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
            return None
        return int(operator.index(value))  # type: ignore[arg-type]
    except Exception:
        return None


def as_items(value: object, most: int) -> list[Any] | None:
    """The items of an iterable as a list; None for all else, and beyond ``most`` items."""
    try:
        items = list(islice(value, most + 1)) if isinstance(value, Iterable) else None
    except Exception:
        return None
    return None if items is None or len(items) > most else items


def is_whole(value: object, low: float) -> bool:
    """Whether a value is an integer, numpy's included, of at least ``low``."""
    return as_whole(value, low) is not None


@dataclass(frozen=True)
class Rule:
    """The values that a field of a dataclass may have: ``num_drafts: Annotated[int, whole(1)] =
    6``.

    Attributes:
        own: converts a value to Python's own type; returns None for one that cannot be used.
        expected: the allowed values in words.
        read: converts a text to a value.
        is_plain: whether JSON can express the values.
        optional: whether None is allowed, too.
    """

    own: Callable[[Any], Any]
    expected: str
    read: Callable[[str], Any] = str
    is_plain: bool = True
    optional: bool = False


def whole(low: int = 0, high: int = INT32_MAX) -> Rule:
    """An int of low..high."""
    expected = f"a whole number, {low}..{high}"
    return Rule(partial(as_whole, low=low, high=high), expected, int)


def real(low: float, high: float, *, expected: str = "", or_zero: bool = False) -> Rule:
    """A float of low..high; or 0.0, where ``or_zero``."""

    def own(value: object) -> float | None:
        zero = as_real(value, 0.0, 0.0)
        return as_real(value, low, high) if zero is None else zero

    expected = expected or f"{'0 or ' * or_zero}{low:g}..{high:g}"
    return Rule(own if or_zero else partial(as_real, low=low, high=high), expected, float)


def choice(*choices: str) -> Rule:
    """One of some words."""

    def own(value: object) -> str | None:
        word = str.__str__(value) if isinstance(value, str) else None
        return word if word in choices else None

    return Rule(own, f"{', '.join(choices[:-1])} or {choices[-1]}")


def instance(kind: type) -> Rule:
    """An object of a class."""
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    expected = f"{article} {kind.__name__}"
    return Rule(lambda value: value if isinstance(value, kind) else None, expected, is_plain=False)


def instances(kind: type, *, most: int) -> Rule:
    """A tuple of objects of a class, at least one."""

    def own(value: object) -> Any:
        items = None if isinstance(value, kind) else as_items(value, most)
        good = bool(items) and all(isinstance(item, kind) for item in items or ())
        return tuple(items or ()) if good else None

    return Rule(own, f"1 to {most} objects of {kind.__name__}", is_plain=False)


def texts(*, most: int, longest: int) -> Rule:
    """A tuple of strings, none empty; a single string counts as a tuple of one."""

    def own(value: object) -> tuple[str, ...] | None:
        items = [value] if isinstance(value, str) else as_items(value, most)
        good = items is not None and all(
            isinstance(item, str) and 0 < len(item) <= longest for item in items
        )
        return tuple(map(str.__str__, items or ())) if good else None

    return Rule(own, f"at most {most} strings, none empty or longer than {longest} characters")


def wholes(
    low: int = 0,
    high: int = INT32_MAX,
    *,
    most: int,
    kind: type[tuple[Any, ...]] | type[frozenset[Any]] = tuple,
) -> Rule:
    """A tuple, or another ``kind``, of ints of low..high; a single int counts as a tuple of one."""

    def own(value: object) -> Any:
        single = as_whole(value)
        items = as_items(value, most) if single is None else [single]
        numbers = [as_whole(item, low, high) for item in items or ()]
        return None if items is None or None in numbers else kind(numbers)

    return Rule(own, f"at most {most} whole numbers, {low}..{high}")


def reals(low: float, high: float, *, most: int) -> Rule:
    """A tuple of floats of low..high."""

    def own(value: object) -> Any:
        items = as_items(value, most)
        numbers = [as_real(each, low, high) for each in items or ()]
        return None if items is None or None in numbers else tuple(numbers)

    return Rule(own, f"at most {most} numbers, {low:g}..{high:g}")


def weights(low: float, high: float, *, most: int) -> Rule:
    """A mapping from ints to floats of low..high, as pairs by ascending int."""

    def own(value: object) -> tuple[tuple[int, float], ...] | None:
        given = value if isinstance(value, tuple) else None
        with suppress(Exception):  # whatever a user's class raises
            given = tuple(islice(value.items(), most + 1)) if isinstance(value, Mapping) else given
        pairs: dict[Any, Any] = {}
        for pair in given or ():
            key, number = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, None)
            pairs[as_whole(key, 0, INT32_MAX)] = as_real(number, low, high)
        good = given is not None and len(pairs) == len(given) <= most
        good = good and None not in pairs and None not in pairs.values()
        return tuple(sorted(pairs.items())) if good else None

    return Rule(own, f"at most {most} token ids with numbers, {low:g}..{high:g}")


def _flag(value: object) -> bool | None:
    is_flag = isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")
    return bool(value) if is_flag else None


FLAG = Rule(_flag, "True or False")
"""A bool, numpy's included."""


def _rules(kind: type) -> dict[str, Rule]:
    """The rules of a dataclass by field; fields that may be None are optional."""
    found: dict[str, Rule] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        plain, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        for rule in metadata:
            if isinstance(rule, Rule) and type(None) in get_args(plain):
                rule = replace(rule, expected=f"None or {rule.expected}", optional=True)
            if isinstance(rule, Rule):
                found[name] = rule
    return found


rules_of: Callable[[type], dict[str, Rule]] = cache(_rules)


def check_fields(
    owner: object,
    error: type[Exception],
    prefix: str = "",
    rules: Mapping[str, Rule] | None = None,
) -> None:
    """Replace the fields of a frozen dataclass by plain values.

    Args:
        error: the error for a wrong field.
        prefix: before the names in messages.
        rules: by field; None: the dataclass's own.
    """
    for name, rule in (rules_of(type(owner)) if rules is None else rules).items():
        value = getattr(owner, name)
        if value is None and rule.optional:
            continue
        own = rule.own(value)
        if own is None:
            raise error(f"{prefix}{name}: expected {rule.expected}, got {shown(value)}")
        object.__setattr__(owner, name, own)


@cache
def described(kind: type) -> dict[str, str]:
    """The text of each of a class's ``Args:``, each on one line."""
    _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("\nArgs:\n")
    parts = re.split(r"^    (\w+): ", section.partition("\n\n")[0], flags=re.M)[1:]
    return {
        name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def help_of(kind: type, name: str) -> str:
    """The help of a field in one line: the first sentence of its text, and the allowed values."""
    words = described(kind).get(name, "").partition(". ")[0].removesuffix(".").replace("``", "")
    words, rule = words[:1].upper() + words[1:], rules_of(kind).get(name, FLAG)
    values = rule.expected.removeprefix("None or ").replace(f"..{INT32_MAX}", " or more")
    return words if rule is FLAG else f"{words} ({values})"
