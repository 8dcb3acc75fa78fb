"""The page at ``/docs``: the schema of ``/openapi.json`` as text, without scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from starlette.responses import HTMLResponse

from eecore.serving.page_files import HEADERS

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { font-size: 1.1rem; margin-top: 2.5rem; }
table { border-collapse: collapse; width: 100%; }
td, th { border-top: 1px solid #8886; padding: .3rem .6rem; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; }
td:first-child { overflow-wrap: normal; }
"""
# The page runs no script and fetches nothing; its style is inline.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"


def docs_page(schema: Mapping[str, Any]) -> HTMLResponse:
    """A page of the endpoints of a schema and their fields."""
    name = escape(f"{schema['info']['title']} {schema['info']['version']}")
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>',
        f"<h1>{name}</h1>",
        '<p>For programs: <a href="openapi.json">openapi.json</a>.</p>',
    ]
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            parts += _operation(method, path, operation)
    return HTMLResponse("".join(parts), headers={**HEADERS, "content-security-policy": POLICY})


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    yield f"<p>{escape(operation.get('description', ''))}</p>"
    body = operation.get("requestBody")
    if body is not None:
        (content,) = body["content"].values()
        yield from _fields(content["schema"])
    statuses = ", ".join(f"<code>{escape(str(each))}</code>" for each in operation["responses"])
    yield f"<p>Statuses: {statuses}</p>"


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    """A table of the fields of a body."""
    needed = schema.get("required", ())
    yield "<table><tr><th>field<th>kind<th>"
    for name, field in schema["properties"].items():
        must = " <small>required</small>" if name in needed else ""
        words = escape(field.get("description", ""))
        yield f"<tr><td><code>{escape(name)}</code>{must}<td>{escape(_kind(field))}<td>{words}"
    yield "</table>"


def _kind(field: Mapping[str, Any]) -> str:
    """The values that a field takes, in words."""
    if "anyOf" in field:
        kinds = [_kind(each) for each in field["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in field:
        return ", ".join(json.dumps(each) for each in field["enum"])
    kind = str(field.get("type", "any"))
    if kind == "array" and "items" in field:
        return f"list of {_kind(field['items'])}"
    low, high = field.get("minimum"), field.get("maximum")
    return kind if low is None and high is None else f"{kind} {_range(low, high)}"


def _range(low: float | None, high: float | None) -> str:
    return "..".join("" if each is None else f"{each:g}" for each in (low, high))
