"""Docstrings for the site: ``:class:`eecore.Full``` becomes a link into the page of the API.

mkdocs.yml hands it to mkdocstrings as an extension of griffe.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|func|meth|mod):`~?([^`]+)`")


class Roles(griffe.Extension):
    """Sphinx's roles, as Markdown; a link where the name is one of eecore's public ones."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        public = set(pkg.exports or ())
        rewrite(pkg, {str(name) for name in public}, set())


def rewrite(thing: griffe.Object | griffe.Alias, public: set[str], seen: set[str]) -> None:
    """Of an object and of all within it."""
    if thing.is_alias or thing.path in seen:
        return
    seen.add(thing.path)
    if thing.docstring is not None:
        thing.docstring.value = ROLE.sub(
            lambda found: as_markdown(found[1], public), thing.docstring.value
        )
    for member in thing.members.values():
        rewrite(member, public, seen)


def as_markdown(name: str, public: set[str]) -> str:
    first, _, _ = name.removeprefix("eecore.").partition(".")
    if name.removeprefix("eecore.") == first and first in public:
        return f"[`{name}`][eecore.{first}]"
    return f"`{name}`"
