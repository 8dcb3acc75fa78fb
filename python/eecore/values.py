"""What users give, checked and as Python's own numbers and strings.

Whoever keeps what was given keeps its surprises too: an int8 that overflows, a Fraction that numpy
does not take, a bool that counts as one. What cannot be used is known at once, never by a TypeError
or OverflowError from far inside.
"""

from __future__ import annotations

import math
import operator
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from numbers import Integral, Real
from typing import Annotated, Any, get_args, get_origin, get_type_hints

__all__ = [
    "FLAG",
    "INT32_MAX",
    "MIN_POSITIVE",
    "Fields",
    "Rule",
    "as_index",
    "check_field",
    "check_fields",
    "choice",
    "instance",
    "is_whole",
    "is_within",
    "real",
    "rules_of",
    "shown",
    "whole",
]

INT32_MAX = 2**31 - 1
MIN_POSITIVE = sys.float_info.min
MOST_SHOWN = 120


class _Short(reprlib.Repr):
    """Looks at no more of a value than it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxstring = self.maxother = self.maxlong = MOST_SHOWN
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 8

    def repr_int(self, value: int, _level: int) -> str:
        """Python refuses to write out the longest ones."""
        return repr(value) if value.bit_length() < 1000 else "a value of type int"


_SHORT = _Short()


def shown(value: object) -> str:
    """A value as an error shows it: its repr, cut short; its type where it has none."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # whatever a class of the user's says
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def as_whole(value: object, low: float = -math.inf, high: float = math.inf) -> int | None:
    """An integer, numpy's included, of low..high as an int; None for all else, and for bools."""
    try:
        if isinstance(value, bool) or not isinstance(value, Integral):
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
        if isinstance(value, bool) or not isinstance(value, Real):
            return None
        number = float(value)
    except Exception:
        return None
    return number if math.isfinite(number) and low <= number <= high else None


def as_index(value: object) -> int | None:
    """What can stand as an index, tensors of one integer included, as an int; None for all else,
    and for bools.
    """
    try:
        if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
            return None
        return int(operator.index(value))  # type: ignore[arg-type]
    except Exception:
        return None


def as_items(value: object, most: int) -> list[Any] | None:
    """What can be gone through, as a list; None for all else, and beyond ``most`` items."""
    try:
        items = list(islice(value, most + 1)) if isinstance(value, Iterable) else None
    except Exception:
        return None
    return None if items is None or len(items) > most else items


def is_whole(value: object, low: float, high: float = math.inf) -> bool:
    """Whether it is an integer, numpy's included, of low..high."""
    return as_whole(value, low, high) is not None


def is_within(value: object, low: float, high: float) -> bool:
    """Whether it is a finite real number, numpy's included, of low..high."""
    return as_real(value, low, high) is not None


@dataclass(frozen=True)
class Rule:
    """What a field of a dataclass may hold: ``num_drafts: Annotated[int, whole(1)] = 6``.

    Attributes:
        own: the value as Python's own; None for one that cannot be used.
        expected: the values that can be used, in words.
        read: makes a value of a text.
        is_plain: JSON can say the values.
        optional: None can be used, too.
    """

    own: Callable[[Any], Any]
    expected: str
    read: Callable[[str], Any] = str
    is_plain: bool = True
    optional: bool = False


def whole(low: int = 0, high: int = INT32_MAX) -> Rule:
    """An int of low..high."""
    expected = f"a whole number, {low}..{high}"
    return Rule(lambda value: as_whole(value, low, high), expected, int)


def real(low: float, high: float, *, expected: str = "", or_zero: bool = False) -> Rule:
    """A float of low..high; or 0.0, where ``or_zero``."""

    def own(value: object) -> float | None:
        zero = as_real(value, 0.0, 0.0) if or_zero else None
        return as_real(value, low, high) if zero is None else zero

    return Rule(own, expected or f"{'0 or ' * or_zero}{low:g}..{high:g}", float)


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


def check_fields(owner: object, error: type[Exception], prefix: str = "") -> None:
    """Put plain values in the place of those that a frozen dataclass was made with.

    Args:
        owner: the dataclass, whose fields have rules.
        error: what a field that cannot be used raises.
        prefix: of the names in messages.
    """
    for name, rule in rules_of(type(owner)).items():
        check_field(owner, name, rule, error, prefix)


def check_field(
    owner: object, name: str, rule: Rule, error: type[Exception], prefix: str = ""
) -> None:
    """Check one field of a frozen dataclass, as :func:`check_fields` does."""
    value = getattr(owner, name)
    if value is None and rule.optional:
        return
    own = rule.own(value)
    if own is None:
        raise error(f"{prefix}{name}: expected {rule.expected}, got {shown(value)}")
    object.__setattr__(owner, name, own)


class Fields:
    """Checks the fields of a frozen dataclass as it is made, and puts plain values in their place.

    Args:
        owner: the dataclass.
        error: what a field that cannot be used raises.
        prefix: of the names in messages.
    """

    def __init__(self, owner: object, error: type[Exception], prefix: str = "") -> None:
        self._owner, self._error, self._prefix = owner, error, prefix

    def whole(
        self,
        name: str,
        low: int = 0,
        high: int = INT32_MAX,
        *,
        expected: str | None = None,
        optional: bool = False,
    ) -> None:
        """An int of low..high; or None, where it is ``optional``."""
        value = getattr(self._owner, name)
        if optional and value is None:
            return
        expected = expected or f"{'None or ' * optional}a whole number, {low}..{high}"
        self._put(name, as_whole(value, low, high), expected)

    def real(
        self,
        name: str,
        low: float,
        high: float,
        *,
        expected: str | None = None,
        optional: bool = False,
        or_zero: bool = False,
    ) -> None:
        """A float of low..high; or None, where it is ``optional``, or 0.0, where ``or_zero``."""
        value = getattr(self._owner, name)
        if optional and value is None:
            return
        number = as_real(value, 0.0, 0.0) if or_zero else None
        if number is None:
            number = as_real(value, low, high)
        expected = expected or f"{'None or ' * optional}{'0 or ' * or_zero}{low:g}..{high:g}"
        self._put(name, number, expected)

    def flag(self, name: str) -> None:
        """A bool, numpy's included."""
        value = getattr(self._owner, name)
        is_flag = isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")
        self._put(name, bool(value) if is_flag else None, "True or False")

    def choice(self, name: str, *choices: str) -> None:
        """One of some words."""
        value = getattr(self._owner, name)
        word = str.__str__(value) if isinstance(value, str) else None
        words = f"{', '.join(choices[:-1])} or {choices[-1]}"
        self._put(name, word if word in choices else None, words)

    def instance(self, name: str, kind: type, *, optional: bool = False) -> None:
        """An object of a class; or None, where it is ``optional``."""
        value = getattr(self._owner, name)
        if optional and value is None:
            return
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        expected = f"{'None or ' * optional}{article} {kind.__name__}"
        self._put(name, value if isinstance(value, kind) else None, expected)

    def texts(self, name: str, *, most: int, longest: int) -> None:
        """A tuple of strings, none empty; a single one is one of one."""
        value = getattr(self._owner, name)
        items = [value] if isinstance(value, str) else as_items(value, most)
        good = items is not None and all(
            isinstance(item, str) and 0 < len(item) <= longest for item in items
        )
        expected = f"at most {most} strings, none empty or longer than {longest} characters"
        self._put(name, tuple(map(str.__str__, items or ())) if good else None, expected)

    def wholes(
        self,
        name: str,
        low: int = 0,
        high: int = INT32_MAX,
        *,
        most: int,
        expected: str | None = None,
        kind: type[tuple[Any, ...]] | type[frozenset[Any]] = tuple,
    ) -> None:
        """A tuple, or another ``kind``, of ints of low..high; a single one is one of one."""
        value = getattr(self._owner, name)
        single = as_whole(value)
        items = as_items(value, most) if single is None else [single]
        numbers = [as_whole(item, low, high) for item in items or ()]
        good = items is not None and None not in numbers
        expected = expected or f"at most {most} whole numbers, {low}..{high}"
        self._put(name, kind(numbers) if good else None, expected)

    def weights(self, name: str, low: float, high: float, *, most: int) -> None:
        """A mapping from ints to floats of low..high, as pairs by ascending int; or None."""
        value = getattr(self._owner, name)
        if value is None:
            return
        given = value if isinstance(value, tuple) else None
        with suppress(Exception):  # whatever a class of the user's says
            given = tuple(islice(value.items(), most + 1)) if isinstance(value, Mapping) else given
        pairs = {}
        for pair in given or ():
            key, number = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, None)
            pairs[as_whole(key, 0, INT32_MAX)] = as_real(number, low, high)
        good = given is not None and len(pairs) == len(given) <= most
        good = good and None not in pairs and None not in pairs.values()
        expected = f"None or at most {most} token ids with numbers, {low:g}..{high:g}"
        self._put(name, tuple(sorted(pairs.items())) if good else None, expected)

    def put(self, name: str, value: object) -> None:
        """A field that was checked elsewhere."""
        object.__setattr__(self._owner, name, value)

    def _put(self, name: str, value: object, expected: str) -> None:
        if value is None:
            given = shown(getattr(self._owner, name))
            raise self._error(f"{self._prefix}{name}: expected {expected}, got {given}")
        self.put(name, value)
