"""Signatures and docstrings of eecore's exports, as Markdown, in docs/api.md and docs/ops.

python scripts/api_pages.py        # after a change of a signature or docstring

A page has the text of a name between two marks, ``<!-- eecore.load -->`` and ``<!-- end of
eecore.load -->``, so that it reads the same in the repository and in the manual.
"""

from __future__ import annotations

import ast
import inspect
import posixpath
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import eecore
from eecore import ops
from op_pages import ROOT, fill

DOCS = ROOT / "docs"
API = DOCS / "api.md"
WIDTH = 100
MARK = re.compile(r"^<!-- (eecore\.[\w.]+) -->$", re.MULTILINE)
SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$")
ITEM = re.compile(r"^(\*{0,2}[\w.]+): ?(.*)$")
ROLE = re.compile(r":(attr|class|data|func|meth|mod):`~?([^`]+)`")
DOUBLE = re.compile(r"``([^`]+)``")
TITLES = {"Args": "Arguments", "Raises": "Errors"}


def pages() -> list[Path]:
    """The pages with contracts."""
    return [API, *sorted((DOCS / "ops").glob("*.md"))]


def marked(page: Path) -> list[str]:
    """The names whose contracts a page has."""
    return MARK.findall(page.read_text())


@cache
def places() -> dict[str, Path]:
    """The page of each name."""
    return {name: page for page in pages() for name in marked(page)}


def exported(name: str) -> Any:
    """The object ``eecore.NAME`` or ``eecore.ops.NAME``; ValueError if it is not exported."""
    home, own = (ops, name[11:]) if name.startswith("eecore.ops.") else (eecore, name[7:])
    if own not in home.__all__:
        raise ValueError(f"{name}: expected a name that eecore exports, got {own}")
    return getattr(home, own)


# Signatures


def resolved(annotation: Any, module: str) -> str:
    """An annotation as written in the source, without the constraints of ``Annotated``."""
    if annotation is inspect.Parameter.empty:
        return ""
    if not isinstance(annotation, str):
        annotation = inspect.formatannotation(annotation)
    tree = ast.parse(annotation, mode="eval")
    return ast.unparse(Plain(module).visit(tree)).replace("'", '"')


class Plain(ast.NodeTransformer):
    """Replaces ``Annotated[type, rule]``, or a module's name for one, by the type."""

    def __init__(self, module: str) -> None:
        self.names = vars(sys.modules[module])

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self.names.get(node.id)
        if get_origin(value) is not Annotated:
            return node
        return ast.parse(inspect.formatannotation(get_args(value)[0]), mode="eval").body

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "Annotated":
            assert isinstance(node.slice, ast.Tuple)
            return self.visit(node.slice.elts[0])  # type: ignore[no-any-return]
        return self.generic_visit(node)


def parameters(thing: Any) -> tuple[list[str], str]:
    """The parameters of a call, each with its type and default, and the type of its result."""
    signature = inspect.signature(thing)
    module = inspect.unwrap(thing).__module__
    written: list[str] = []
    star = False
    for parameter in signature.parameters.values():
        if parameter.name == "self" or parameter.name.startswith("_"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            written.append("*")
        star |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        annotation = resolved(parameter.annotation, module)
        text = f"{prefix.get(parameter.kind, '')}{parameter.name}"
        text += f": {annotation}" if annotation else ""
        if parameter.default is not parameter.empty:
            equals = " = " if annotation else "="
            text += f"{equals}{default(parameter.default)}"
        written.append(text)
    return written, resolved(signature.return_annotation, module)


def default(value: Any) -> str:
    """A default value as source code."""
    if isinstance(value, str):
        return f'"{value}"'
    written = repr(value)
    # The text describes defaults that are made for each call, and long lists.
    return "..." if written.startswith("<") or len(written) > WIDTH // 2 else written


def call(name: str, thing: Any, returns: bool = True) -> str:
    """A call on one line, or with one parameter on each line."""
    name = f"async {name}" if inspect.iscoroutinefunction(thing) else name
    given, back = parameters(thing)
    end = f") -> {back}" if returns and back else ")"
    line = f"{name}({', '.join(given)}{end}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in given), end])


def signature(name: str, thing: Any) -> str:
    """A function's signature, a class's constructor, or a tuple's name."""
    if not inspect.isclass(thing):
        return call(name, thing)
    if issubclass(thing, tuple):
        return f"class {name}(NamedTuple)"
    if issubclass(thing, Exception) and "__init__" not in vars(thing):
        return f"class {name}({', '.join(base.__name__ for base in thing.__bases__)})"
    return call(name, thing, returns=False)


# Docstrings


def linked(text: str, page: Path) -> str:
    """A text with Sphinx roles as links to the names, and code between single backticks."""

    def link(found: re.Match[str]) -> str:
        role, name = found.groups()
        for full in (name, f"eecore.{name}", f"eecore.ops.{name}"):
            # A method can have the name of a function: eecore.stream, AsyncEngine.stream.
            if role != "meth" and (place := places().get(full)) is not None:
                target = posixpath.relpath(place, page.parent) if place != page else ""
                return f"[`{name}`]({target}#{anchor(full)})"
        return f"`{name}`"

    text = DOUBLE.sub(r"`\1`", ROLE.sub(link, text))
    return re.sub("::$", ":", text, flags=re.MULTILINE)  # before a block of code


def anchor(name: str) -> str:
    """The anchor of a heading, on GitHub and in the manual."""
    return name.lower().replace(".", "")


def described(docstring: str, page: Path) -> str:
    """A docstring of Google's style, its sections as lists."""
    blocks: list[str] = []
    paragraph: list[str] = []
    lines = iter(linked(inspect.cleandoc(docstring), page).splitlines())
    for line in lines:
        section = SECTION.match(line)
        if line.strip() and section is None:
            paragraph.append(line)
            continue
        if paragraph:
            blocks.append("\n".join(paragraph))
            paragraph = []
        if section is not None:
            inside = textwrap.dedent("\n".join(indented(lines)))
            blocks += [f"{TITLES.get(section[1], section[1])}:", items(inside)]
    if paragraph:
        blocks.append("\n".join(paragraph))
    return "\n\n".join(blocks)


def indented(lines: Iterator[str]) -> Iterator[str]:
    """The lines of a section, up to an empty line."""
    for line in lines:
        if not line.strip():
            return
        yield line


def items(section: str) -> str:
    """The entries of a section as a list; a section without entries as text."""
    found: list[str] = []
    for line in section.splitlines():
        entry = ITEM.match(line)
        if entry is not None:
            found.append(f"- `{entry[1]}`: {entry[2]}")
        elif found:
            found[-1] += f" {line.strip()}"
        else:
            return section
    return "\n".join(found)


def fields(thing: type, page: Path) -> str:
    """The fields of a class, each with its docstring; with types only for tuples.

    Other classes have the types in the signature.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    assert isinstance(tree, ast.ClassDef)
    found = []
    for statement, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        text = name = statement.target.id
        if issubclass(thing, tuple):
            text += f": {resolved(ast.unparse(statement.annotation), thing.__module__)}"
            text += f" = {ast.unparse(statement.value)}" if statement.value else ""
        words = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            words = linked(inspect.cleandoc(str(after.value.value)).replace("\n", " "), page)
        if not name.startswith("_") and (words or issubclass(thing, tuple)):
            found.append(f"- `{text}`: {words}" if words else f"- `{text}`")
    return "\n".join(found)


def members(thing: type) -> Iterator[tuple[str, Any, Any]]:
    """(name, attribute, function) of a class's public methods and properties with docstrings."""
    for name, stored in vars(thing).items():
        function = stored.__func__ if isinstance(stored, staticmethod | classmethod) else stored
        function = function.fget if isinstance(function, property) else function
        function = function.func if isinstance(function, cached_property) else function
        if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
            yield name, stored, function


def contract(name: str, page: Path) -> str:
    """The Markdown of an export: heading, signature, docstring; of a class also its members."""
    thing = exported(name)
    own = name.rpartition(".")[2]
    parts = [f"### {name}", code(signature(own, thing)), described(thing.__doc__ or "", page)]
    if inspect.isclass(thing):
        if thing.__init__.__doc__ and "__init__" in vars(thing):
            is_plain = thing.__init__.__doc__.startswith("Initialize self")
            parts += [] if is_plain else [described(thing.__init__.__doc__, page)]
        # If the docstring describes fields by name, their types are in the signature.
        described_already = re.search(r"^\s*(Args|Attributes):$", thing.__doc__ or "", re.MULTILINE)
        if not described_already and (listed := fields(thing, page)):
            parts += ["Fields:", listed]
        for member, stored, function in members(thing):
            parts.append(f"#### {own}.{member}")
            if isinstance(stored, property | cached_property):
                back = resolved(inspect.signature(function).return_annotation, function.__module__)
                parts.append(code(f"{member}: {back}"))
            else:
                prefix = f"{own}." if isinstance(stored, staticmethod | classmethod) else ""
                bound = getattr(thing, member) if prefix else function
                parts.append(code(call(f"{prefix}{member}", bound)))
            parts.append(described(function.__doc__, page))
    return "\n\n".join(part for part in parts if part)


def code(text: str) -> str:
    """A block that is highlighted as Python; blocks marked ``python`` are examples that run."""
    return f"```py\n{text}\n```"


def section(name: str, page: Path) -> str:
    """The text between the marks of a name."""
    return f"\n{contract(name, page)}\n"


def main() -> None:
    for page in pages():
        for name in marked(page):
            fill(page, name, section(name, page))


if __name__ == "__main__":
    main()
