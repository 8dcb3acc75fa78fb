"""The extension of griffe for this repository, which mkdocs.yml loads for ``make docs``.

Signatures show types without the rules of ``Annotated``, and no private fields. Roles in docstrings
(``:func:`name` ``) become links to what the manual describes, and stay code for other names.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import (
    Attribute,
    Class,
    Expr,
    ExprName,
    ExprSubscript,
    ExprTuple,
    Extension,
    Function,
    Module,
    NameResolutionError,
    Object,
)

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")


class Readable(Extension):
    """Types and docstrings as the manual shows them."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Change a package once it is read, before dataclasses get their constructors."""
        change(pkg)


def change(thing: Object) -> None:
    """Change an object and all that is defined in it."""
    if thing.docstring is not None:
        thing.docstring.value = linked(thing.docstring.value, thing)
    if isinstance(thing, Attribute):
        thing.annotation = plain(thing.annotation, thing)
    if isinstance(thing, Function):
        for parameter in thing.parameters:
            parameter.annotation = plain(parameter.annotation, thing)
    for name, member in list(thing.members.items()):
        if isinstance(thing, Class) and isinstance(member, Attribute) and name.startswith("_"):
            del thing.members[name]
        elif not member.is_alias:
            change(member)


def plain(annotation: str | Expr | None, of: Object) -> str | Expr | None:
    """The type in ``Annotated[type, rule]``, also where a name of the module stands for it."""
    written = annotation
    if isinstance(annotation, ExprName):
        named = of.module.members.get(annotation.name)
        written = named.value if isinstance(named, Attribute) else None
    if isinstance(written, ExprSubscript) and written.canonical_path == "typing.Annotated":
        assert isinstance(written.slice, ExprTuple)
        return written.slice.elements[0]
    return annotation


def linked(docstring: str, of: Object) -> str:
    """A docstring with its roles as links, and one colon before a block of code."""

    def link(role: re.Match[str]) -> str:
        first, dot, rest = role[1].partition(".")
        try:
            first = of.resolve(first)
        except NameResolutionError:
            first = f"eecore.{first}" if first in of.package.members else first
        return f'<autoref optional identifier="{first}{dot}{rest}"><code>{role[1]}</code></autoref>'

    return re.sub("::$", ":", ROLE.sub(link, docstring), flags=re.MULTILINE)
