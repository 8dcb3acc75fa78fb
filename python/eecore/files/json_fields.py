"""Typed look-ups in JSON files; errors name file, field, the expected value and the value found.

All JSON files are read here. Numbers have a range and lists a length; a field outside of them is an
error that names it.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from eecore.errors import EecoreError
from eecore.files.readable import kind_of, read_bytes, shown_path
from eecore.values import as_real, as_whole, shown

REQUIRED: Any = object()
MAX_BYTES = 4 << 20
"""Bytes of a JSON file, unless the caller says otherwise."""
MAX_DIGITS = 300
"""Digits of an integer, at most: as many as a float can hold."""
MAX_ITEMS = 1 << 16
"""Items of a list, unless the caller says otherwise."""
LOWEST, HIGHEST = -(2**63), 2**63 - 1
ABOVE_ZERO = sys.float_info.min

Self = TypeVar("Self", bound="JsonFields")


class _NotJson(ValueError):
    """JSON that is valid in general, but refused in a file."""


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _NotJson(f"an integer of {len(digits)} digits")
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise _NotJson(f"the field {shown(twice)} twice")
    return values


def parse_json(text: str | bytes, where: str, error: type[EecoreError]) -> Any:
    """The value of JSON text; bytes are UTF-8, with or without a byte order mark.

    Raises:
        EecoreError: of class ``error``: the text is not JSON, is nested too deeply, has an integer
            of hundreds of digits, or the same field twice.
    """
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(decoded, parse_int=_integer, object_pairs_hook=_object)
    except RecursionError:
        raise error(f"{where}: expected JSON, got brackets nested too deeply") from None
    except ValueError as caught:
        raise error(f"{where}: expected JSON, got: {caught}") from None


def read_json_value(
    path: Path,
    error: type[EecoreError],
    missing: type[EecoreError] | None = None,
    *,
    most: int = MAX_BYTES,
) -> Any:
    """The JSON value of a file of at most ``most`` bytes.

    Raises:
        EecoreError: of class ``missing``, where it is given, when there is no file; of class
            ``error`` when it cannot be read or is not JSON.
    """
    return parse_json(read_bytes(path, most, error, missing), shown_path(path), error)


class JsonFields:
    """Typed look-ups in a JSON object; null counts as absent.

    Args:
        where: the file, for errors.
        error: the class of errors.
        prefix: before the fields' names in errors.
    """

    def __init__(
        self, values: dict[str, Any], where: str, error: type[EecoreError], prefix: str = ""
    ) -> None:
        self._values = values
        self.where = where
        self.error = error
        self.prefix = prefix

    @classmethod
    def of(
        cls: type[Self], value: Any, where: str, error: type[EecoreError], prefix: str = ""
    ) -> Self:
        """The fields of a JSON value, which must be an object."""
        if not isinstance(value, dict):
            at = f"{where}: {prefix.rstrip('.')}".removesuffix(": ")
            raise error(f"{at}: expected a JSON object, got {shown(value)}")
        return cls(value, where, error, prefix)

    @classmethod
    def read(
        cls: type[Self],
        path: Path,
        error: type[EecoreError],
        missing: type[EecoreError] | None = None,
        *,
        most: int = MAX_BYTES,
    ) -> Self:
        """The fields of the JSON object in a file; errors as in :func:`read_json_value`."""
        value = read_json_value(path, error, missing, most=most)
        return cls.of(value, shown_path(path), error)

    @classmethod
    def read_if_there(cls: type[Self], path: Path, error: type[EecoreError]) -> Self:
        """The same; no fields where there is no file."""
        if kind_of(path) == "nothing":
            return cls({}, shown_path(path), error)
        return cls.read(path, error)

    def replaced(self: Self, values: dict[str, Any]) -> Self:
        """Other fields of the same place."""
        return type(self)(values, self.where, self.error, self.prefix)

    @property
    def values(self) -> dict[str, Any]:
        """All values, unchecked."""
        return dict(self._values)

    @property
    def names(self) -> list[str]:
        return list(self._values)

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(
        self, name: str, low: int = LOWEST, high: int = HIGHEST, default: Any = REQUIRED
    ) -> Any:
        """An integer of ``low..high``, or the default."""
        value = self._values.get(name)
        if value is None and default is not REQUIRED:
            return default
        if as_whole(value, low, high) is None:
            raise self.wrong(name, f"an integer{_range(low, high)}", value)
        return value

    def number(
        self, name: str, low: float = -math.inf, high: float = math.inf, default: Any = REQUIRED
    ) -> Any:
        """A finite float of ``low..high``, or the default."""
        value: Any = self._values.get(name)
        if value is None and default is not REQUIRED:
            return default
        number = as_real(value, low, high)
        if number is None:
            raise self.wrong(name, f"a number{_range(low, high)}", value)
        return number

    def flag(self, name: str, default: Any = REQUIRED) -> Any:
        """True or False, or the default."""
        return self._typed(name, bool, "true or false", default)

    def text(
        self,
        name: str,
        default: Any = REQUIRED,
        *,
        one_of: Sequence[str] | None = None,
    ) -> Any:
        """A string, where ``one_of`` is given one of these; or the default."""
        expected = "a string" if one_of is None else f"one of {', '.join(one_of)}"
        value = self._typed(name, str, expected, default)
        if one_of is not None and value not in one_of and value is not default:
            raise self.wrong(name, expected, value)
        return value

    def inner(self: Self, name: str) -> Self | None:
        """The fields of a nested object; None when it is absent."""
        value = self._typed(name, dict, "an object", None)
        return None if value is None else self._nested(value, name)

    def has_list(self, name: str) -> bool:
        """Whether the field is a list."""
        return isinstance(self._values.get(name), list)

    def has_inner(self, name: str) -> bool:
        """Whether the field is an object."""
        return isinstance(self._values.get(name), dict)

    def integers(
        self,
        name: str,
        low: int = LOWEST,
        high: int = HIGHEST,
        default: Any = REQUIRED,
        *,
        most: int = MAX_ITEMS,
    ) -> Any:
        """A tuple of integers of ``low..high``, or the default."""
        values = self._list(name, f"integers{_range(low, high)}", default, most)
        if values is not default and not _are_within(values, (int,), low, high):
            raise self.wrong(name, f"a list of integers{_range(low, high)}", values)
        return values if values is default else tuple(values)

    def numbers(
        self,
        name: str,
        low: float = -math.inf,
        high: float = math.inf,
        default: Any = REQUIRED,
        *,
        most: int = MAX_ITEMS,
    ) -> Any:
        """A tuple of finite floats of ``low..high``, or the default."""
        values = self._list(name, f"numbers{_range(low, high)}", default, most)
        if values is not default and not _are_within(values, (int, float), low, high):
            raise self.wrong(name, f"a list of numbers{_range(low, high)}", values)
        return values if values is default else tuple(map(float, values))

    def texts(self, name: str, default: Any = REQUIRED, *, most: int = MAX_ITEMS) -> Any:
        """A tuple of strings, or the default."""
        values = self._list(name, "strings", default, most)
        if values is not default and not all(
            issubclass(kind, str) for kind in set(map(type, values))
        ):
            raise self.wrong(name, "a list of strings", values)
        return values if values is default else tuple(values)

    def objects(self: Self, name: str) -> list[Self]:
        """The fields of each object in a list."""
        values = self._list(name, "objects", REQUIRED, MAX_ITEMS)
        for value in values:
            if not isinstance(value, dict):
                raise self.wrong(name, "a list of objects", values)
        return [self._nested(value, f"{name}[{index}]") for index, value in enumerate(values)]

    def entries(self: Self, name: str) -> Self | None:
        """The items of a list of several kinds, as the fields "0", "1", ...; None when it is
        absent.
        """
        values = self._list(name, "items", None, MAX_ITEMS)
        if values is None:
            return None
        return self._nested({str(index): value for index, value in enumerate(values)}, name)

    def only(self, *names: str, optional: Sequence[str] = ()) -> None:
        """Raise an error unless these are the fields; only the optional ones may be missing, any
        may be null.
        """
        if set(self._values) - set(optional) != set(names) - set(optional):
            expected = ", ".join(sorted(names))
            at = f"{self.where}: {self.prefix.rstrip('.')}".removesuffix(": ")
            raise self.error(f"{at}: expected the fields {expected}, got {shown(self.names)}")

    def wrong(self, name: str, expected: str, got: Any) -> EecoreError:
        """The error for a field."""
        return self.error(
            f"{self.where}: {self.prefix}{name}: expected {expected}, got {shown(got)}"
        )

    def _nested(self: Self, value: dict[str, Any], name: str) -> Self:
        return type(self)(value, self.where, self.error, f"{self.prefix}{name}.")

    def _typed(self, name: str, kind: type, expected: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None and default is not REQUIRED:
            return default
        if not isinstance(value, kind):
            raise self.wrong(name, expected, value)
        return value

    def _list(self, name: str, items: str, default: Any, most: int) -> Any:
        values = self._typed(name, list, f"a list of {items}", default)
        if values is not default and len(values) > most:
            raise self.wrong(name, f"a list of at most {most} {items}", values)
        return values


def _are_within(values: list[Any], kinds: tuple[type, ...], low: float, high: float) -> bool:
    """Whether all are finite numbers of a kind and a range; quick, since lists may be long."""
    if not set(map(type, values)) <= set(kinds):
        return False
    finite = sys.float_info.max
    return not values or (
        max(low, -finite) <= min(values)
        and max(values) <= min(high, finite)
        and all(map(math.isfinite, values))
    )


def _range(low: float, high: float) -> str:
    """`` of 1..4096``; nothing where there is no limit."""
    first = low not in (-math.inf, LOWEST) and (f"{low:g}" if isinstance(low, float) else str(low))
    last = high not in (math.inf, HIGHEST) and (
        f"{high:g}" if isinstance(high, float) else str(high)
    )
    if low == ABOVE_ZERO:
        return f" above 0, at most {last}" if last else " above 0"
    if first and last:
        return f" of {first}..{last}"
    return f" of at least {first}" if first else f" of at most {last}" if last else ""
