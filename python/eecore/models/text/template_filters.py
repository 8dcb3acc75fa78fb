"""What chat templates may call: jinja2's filters, tests and methods of values, within bounds.

Nothing else can be called. What gives at most a few times what it was given is charged for the
result; what can give much more is asked first how much it would be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import filters as jinja_filters
from jinja2 import pass_context
from jinja2 import tests as jinja_tests
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedFormatter

from eecore.models.text.template_work import (
    ITEM,
    REPR,
    SHORT,
    Lazy,
    TemplateLimit,
    Work,
    weigh,
    work_of,
)

__all__ = [
    *("FILTERS", "METHODS", "TESTS"),
    *("Formatter", "key", "measured", "percent", "searched", "settled"),
]

# Read no further than the list or object that they are given.
SHALLOW = (
    *("attr", "count", "d", "default", "first", "items", "last", "length", "map", "random"),
    *("reject", "rejectattr", "reverse", "select", "selectattr"),
)
# Read all that they are given.
DEEP = (
    *("abs", "capitalize", "dictsort", "filesizeformat", "float", "groupby", "lower", "max"),
    *("min", "safe", "sort", "string", "title", "trim", "truncate", "unique", "upper", "wordcount"),
)
ESCAPING = ("e", "escape", "forceescape")
COMPARING = "== eq equalto != ne > gt greaterthan ge >= < lt lessthan <= le in".split()
# A conversion of the % operator: its width and its precision.
CONVERSION = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")
MOST_FORMAT = 10_000
"""Characters of a format."""
LINEAR_METHODS = {
    str: (
        *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha"),
        *("isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable"),
        *("isspace", "istitle", "isupper", "lower", "lstrip", "partition", "removeprefix"),
        *("removesuffix", "rfind", "rindex", "rpartition", "rstrip", "startswith", "strip"),
        *("swapcase", "title", "upper"),
    ),
    dict: ("copy", "get", "items", "keys", "values"),
    list: ("copy", "count", "index"),
    tuple: ("count", "index"),
    float: ("is_integer",),
    int: ("bit_length", "is_integer"),
}


def measured(work: Work, value: Any) -> Any:
    """A value that is about to be read to its depths."""
    kind = type(value)
    if kind is str:
        if len(value) > SHORT:
            work.scan(len(value))
    elif kind is not int and kind is not bool and value is not None:
        work.scan(weigh(work, value))
    return value


def searched(work: Work, value: Any) -> Any:
    """A value in which something is about to be looked for."""
    return value if isinstance(value, dict) else measured(work, value)


def key(work: Work, value: Any) -> Any:
    """A value that is about to be hashed."""
    return measured(work, value) if isinstance(value, tuple) else value


def settled(work: Work, result: Any) -> Any:
    """A result, paid for."""
    if isinstance(result, str):
        work.make(len(result))
    elif isinstance(result, (list, tuple, dict)):
        work.make(ITEM * len(result))
    elif isinstance(result, Iterator) and not isinstance(result, Lazy):
        return Lazy(work, result)
    return result


def _called(function: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """One of jinja2's functions, given what it asks for with ``pass_context`` and the like."""
    wants = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
    if wants is None:
        return function
    first = {"context": context, "eval_context": context.eval_ctx}.get(wants, context.environment)
    return lambda *args, **kwargs: function(first, *args, **kwargs)


def _filter(name: str) -> Callable[..., Any]:
    function: Any = jinja_filters.FILTERS[name]
    deep, growth = name in DEEP, 6 if name in ESCAPING else 1

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        work = work_of(context)
        work.step(1 + len(args) // 8)
        if deep:
            work.readable(value)
            if not isinstance(value, str) and hasattr(value, "__len__"):
                work.step(len(value))
        elif growth > 1:
            work.expect(growth * work.readable(value))
        return settled(work, _called(function, context)(value, *args, **kwargs))

    return bounded


def _test(name: str) -> Callable[..., Any]:
    function: Any = jinja_tests.TESTS[name]
    compares = name in COMPARING

    @pass_context
    def bounded(context: Context, value: Any, *args: Any) -> Any:
        work = work_of(context)
        work.step(1 + len(args) // 8)
        if compares:
            measured(work, value)
            for arg in args:
                measured(work, arg)
        return _called(function, context)(value, *args)

    return bounded


def _of_work(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of ours: its first argument is the work."""

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        work = work_of(context)
        work.step(1 + len(args) // 8)
        return settled(work, function(work, value, *args, **kwargs))

    return bounded


def _batch(work: Work, value: Any, linecount: int, fill_with: Any = None) -> Any:
    work.width(linecount)
    work.make(ITEM * linecount)
    return jinja_filters.do_batch(value, linecount, fill_with)


def _slice(work: Work, value: Any, slices: int, fill_with: Any = None) -> Any:
    work.width(slices)
    return jinja_filters.sync_do_slice(value, slices, fill_with)


def _center(work: Work, value: Any, width: int = 80) -> str:
    work.width(width)
    return work.written(value).center(width)


def _list(work: Work, value: Any) -> list[Any]:
    if hasattr(value, "__len__"):
        work.expect(ITEM * len(value))
    return list(value)


def _format(work: Work, value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("format: expected positional or named values, got both")
    return percent(work, work.written(value), kwargs or args)


def _indent(
    work: Work, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    size = len(width) if isinstance(width, str) else width
    work.width(size)
    if isinstance(value, str):
        work.expect(len(value) + size * (len(value.splitlines()) + 1))
    return jinja_filters.do_indent(value, width, first, blank)


def _int(work: Work, value: Any, default: int = 0, base: int = 10) -> int:
    if isinstance(value, str):
        work.bits(4 * len(value))
    return jinja_filters.do_int(value, default, base)


def _round(work: Work, value: Any, precision: int = 0, method: Any = "common") -> float:
    if isinstance(precision, int):
        work.bits(4 * abs(precision))
    return jinja_filters.do_round(value, precision, method)


def _replace(work: Work, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, before, after = (work.written(part) for part in (value, old, new))
    return _replaced(work, text, before, after, -1 if count is None else count)


def _replaced(work: Work, text: str, old: str, new: str, count: int = -1, /) -> str:
    found = text.count(old)
    work.scan(len(text))
    work.expect(len(text) + found * len(new))
    return text.replace(old, new, count)


@pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: Any = None) -> str:
    work = work_of(context)
    items = _steps(work, _parts(context, value, attribute))
    return _joined(work, work.written(d), [work.written(item) for item in items])


def _parts(context: Context, value: Iterable[Any], attribute: Any) -> Iterable[Any]:
    """The items, or what they have by a name; no list is an error, as in jinja2, even if false."""
    if attribute is None:
        return value
    return map(jinja_filters.make_attrgetter(context.environment, attribute), value)


def _joined(work: Work, between: str, texts: Iterable[str]) -> str:
    parts = list(texts)
    work.make(sum(map(len, parts)) + len(between) * len(parts))
    return str(between).join(parts)


def _steps(work: Work, value: Iterable[Any]) -> Iterator[Any]:
    for item in value:
        work.step()
        yield item


@pass_context
def _sum(context: Context, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    environment: Any = context.environment
    for item in _steps(work_of(context), _parts(context, value, attribute)):
        start = environment.call_binop(context, "+", start, item)
    return start


def _tojson(
    work: Work,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML."""
    options: dict[str, Any] = {"separators": separators, "sort_keys": sort_keys}
    if isinstance(indent, (int, str)) and (indent if isinstance(indent, int) else len(indent)) > 32:
        raise TemplateLimit("expected an indent of 32 at most, got more")
    longest = 6 + sum(map(len, separators or ()))
    size = weigh(work, value)
    work.scan(size)
    work.expect(longest * size * (2 if ensure_ascii else 1))
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, **options)
    if indent is None:
        return encoder.encode(value)
    parts = []
    for part in encoder.iterencode(value):
        work.make(len(part))
        parts.append(part)
    return "".join(parts)


def percent(work: Work, text: str, values: Any) -> str:
    """``text % values``."""
    if len(text) > MOST_FORMAT:
        raise TemplateLimit(f"expected a format of {MOST_FORMAT} characters at most, got more")
    work.step(1 + len(text) ** 2 // 2000)
    conversions = CONVERSION.findall(text)
    for number in (number for pair in conversions for number in pair):
        if number == "*" or len(number) > 4:
            raise TemplateLimit(f"expected widths of 9999 at most in a format, got {number[:20]}")
    work.expect(len(text) + len(conversions) * (10_000 + REPR * weigh(work, values)))
    formatted: str = text % values
    return formatted


class Formatter(SandboxedFormatter):
    """``str.format`` of a template."""

    def __init__(self, environment: Any, work: Work) -> None:
        super().__init__(environment)
        self._of = work

    def vformat(self, format_string: str, args: Any, kwargs: Mapping[str, Any]) -> str:
        if len(format_string) > MOST_FORMAT:
            raise TemplateLimit(f"expected a format of {MOST_FORMAT} characters at most, got more")
        return super().vformat(format_string, args, kwargs)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._of.step()
        self._of.expect(REPR * weigh(self._of, value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        if re.search(r"\d{5}", format_spec):
            raise TemplateLimit("expected widths of 9999 at most in a format, got more")
        self._of.readable(value)
        text = super().format_field(value, format_spec)
        self._of.make(len(text))
        return text


def _linear(work: Work, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A method whose result is no larger than what it is of."""
    owner: Any = method.__self__  # type: ignore[attr-defined]
    if isinstance(owner, str):
        work.scan(len(owner))
    elif method.__name__ in ("count", "index"):
        measured(work, owner)
    for arg in (*args, *kwargs.values()):
        key(work, arg)
    return method(*args, **kwargs)


def _split(work: Work, method: Any, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    text: str = method.__self__
    work.scan(len(text))
    work.expect(ITEM * (text.count(sep) if sep else len(text) // 2) + len(text))
    return list(method(sep, maxsplit))


def _splitlines(work: Work, method: Any, keepends: bool = False) -> list[str]:
    work.expect(ITEM * len(method.__self__))
    return list(method(keepends))


def _padding(_work: Work, method: Any, *args: Any) -> Any:
    _work.width(args[0] if args else 0)
    return method(*args)


def _expandtabs(work: Work, method: Any, tabsize: int = 8) -> str:
    work.width(tabsize)
    work.expect(len(method.__self__) + tabsize * method.__self__.count("\t"))
    return str(method(tabsize))


def _replace_method(work: Work, method: Any, old: str, new: str, *count: int) -> str:
    return _replaced(work, method.__self__, old, new, *count)


def _join_method(work: Work, method: Any, items: Iterable[str]) -> str:
    parts = list(_steps(work, items))
    between: str = method.__self__
    work.make(sum(map(len, parts)) + len(between) * len(parts))
    return between.join(parts)


def _bounded_methods() -> dict[tuple[type, str], Callable[..., Any]]:
    methods: dict[tuple[type, str], Callable[..., Any]] = {
        (kind, name): _linear for kind, names in LINEAR_METHODS.items() for name in names
    }
    for name in ("center", "ljust", "rjust", "zfill"):
        methods[str, name] = _padding
    methods[str, "expandtabs"] = _expandtabs
    methods[str, "split"] = methods[str, "rsplit"] = _split
    methods[str, "splitlines"] = _splitlines
    methods[str, "replace"] = _replace_method
    methods[str, "join"] = _join_method
    return methods


METHODS = _bounded_methods()
"""By type and name: called with the work, the bound method, and the arguments."""
FILTERS: dict[str, Callable[..., Any]] = {
    **{name: _filter(name) for name in (*SHALLOW, *DEEP, *ESCAPING)},
    "batch": _of_work(_batch),
    "center": _of_work(_center),
    "format": _of_work(_format),
    "indent": _of_work(_indent),
    "int": _of_work(_int),
    "join": _join,
    "list": _of_work(_list),
    "replace": _of_work(_replace),
    "round": _of_work(_round),
    "slice": _of_work(_slice),
    "sum": _sum,
    "tojson": _of_work(_tojson),
}
TESTS: dict[str, Callable[..., Any]] = {name: _test(name) for name in jinja_tests.TESTS}
