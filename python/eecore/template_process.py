"""The workers that render chat templates, with the functions that transformers offers them.

A template comes with a model and is a program, in jinja2's language. jinja2's sandbox keeps it from
other objects; the kernel bounds its time and memory, and this module its output.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Answer = tuple[str | None, str, bool]
"""The text, or None; the reason for None; and whether the template itself raised it."""
# Makes Python load what it loads at first use: codecs, and how errors are shown.
TRIAL = r"{{ '\N{DIGIT ONE}\n' }}{{ strftime_now('%c') }}{{ [1]|tojson(indent=1) }}{{ a.b.c }}"
MAX_COMPILED = 8
"""Templates that are kept compiled."""
MAX_ERROR = 1000
"""Characters of an error."""


class _Refusal(TemplateError):
    """An error that a template raises itself."""


class _GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's part; its text is kept."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise _Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, since jinja2's own filter escapes for HTML."""
    options: dict[str, Any] = {"separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def prepared() -> Callable[[str, dict[str, Any] | None, int], Answer]:
    """The function that renders: see :class:`eecore.bounded_process.Workers`."""
    compiled = lru_cache(MAX_COMPILED)(_environment().from_string)
    _answer(compiled, TRIAL, {}, MAX_ERROR)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # it can open no file any more
    return lambda source, values, most: _answer(compiled, source, values, most)


def _answer(
    compiled: Callable[[str], Template], source: str, values: dict[str, Any] | None, most: int
) -> Answer:
    """The text of a template with values; with None, whether the template is valid."""
    try:
        template = compiled(source)
    except MemoryError:  # ends this process
        raise
    except Exception as error:  # of the parser, the compiler or Python's own
        return None, f"expected a template, got: {_in_words(error)}", False
    try:
        return "" if values is None else _rendered(template, values, most), "", False
    except MemoryError:
        raise
    except _Refusal as error:
        return None, str(error)[:MAX_ERROR], True
    except Exception as error:  # errors in the template's program
        return None, _in_words(error), False


def _rendered(template: Template, values: dict[str, Any], most: int) -> str:
    parts, size = [], 0
    for part in template.generate(values):
        size += len(part)
        if size > most:
            raise TemplateError(f"expected at most {most} characters, got more")
        parts.append(part)
    return "".join(parts)


def _in_words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it calls itself, or lies in itself, too deeply"
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"[:MAX_ERROR]
    text = str(error)[: MAX_ERROR // 2]
    return text if isinstance(error, TemplateError) and text else f"{type(error).__name__}: {text}"
