"""Files that docs/design and docs/extending name exist, as do the names in them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import eecore
import test_house

ROOT = test_house.ROOT
DOCS = ROOT / "docs"
PAGES = sorted([*(DOCS / "design").glob("*.md"), *(DOCS / "extending").glob("*.md")])
SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh")
FILE = re.compile(r"[\w./-]+\.(?:py|cpp|h|cu|cuh|md|json|txt|toml|sh|yml)|Makefile")
NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*\))?")


def blocks(page: Path) -> Iterator[str]:
    """Paragraphs, list items and table rows, without code and parts that other tests compare."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- (\w+) -->.*?<!-- end of \1 -->", "", text, flags=re.DOTALL)
    yield from re.split(r"\n(?= *\n| *- | *\d+\. |\|)", text)


def found(name: str, page: Path) -> Path:
    """A file by its path from the root or from the package, or by a unique name."""
    for base in (ROOT, test_house.PACKAGE):
        if (base / name).is_file():
            return base / name
    alike = [path for path in tracked() if path.name == name]
    assert len(alike) == 1, f"{page.name}: expected one file {name}, got {len(alike)}"
    return alike[0]


@cache
def tracked() -> list[Path]:
    return test_house.tracked_files()


@cache
def words(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", path.read_text()))


@cache
def words_of_all() -> frozenset[str]:
    paths = [path for path in tracked() if path.suffix in SOURCES]
    return frozenset().union(*map(words, paths))


@cache
def members(path: Path) -> dict[str, set[str]]:
    """The methods and fields of each class of a module."""
    classes: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            names = classes.setdefault(node.name, set())
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(inner.name)
                elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                    names.add(inner.target.id)
                elif isinstance(inner, ast.Assign):
                    names |= {t.id for t in inner.targets if isinstance(t, ast.Name)}
    return classes


def is_in(name: str, path: Path) -> bool:
    """Whether a file defines a name, or a class of it that member."""
    first, _, rest = name.partition(".")
    if rest:
        return path.suffix == ".py" and rest in members(path).get(first, ())
    return first in words(path)


def is_exported(name: str) -> bool:
    thing: object = eecore
    for part in name.split(".")[1:]:
        thing = getattr(thing, part, None)
    return name.startswith("eecore.") and thing is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_what_a_page_names_is_there(page: Path) -> None:
    """A name in backticks is in a file that its paragraph names; where that names none, in the one
    named last; before any was named, somewhere.
    """
    files: list[Path] = []
    for block in blocks(page):
        tokens = re.findall(r"`([^`]+)`", block)
        files = [found(t, page) for t in tokens if FILE.fullmatch(t)] or files[-1:]
        for token in tokens:
            match = NAME.fullmatch(token)
            if match is None or FILE.fullmatch(token):
                continue
            name = match[1]
            there = any(is_in(name, path) for path in files)
            if not files:
                there = set(name.split(".")) <= words_of_all()
            where = [str(path.relative_to(ROOT)) for path in files]
            assert there or is_exported(name), f"{page.name}: {name} is not in {where}"


def test_a_name_that_is_not_there_is_noticed() -> None:
    path = test_house.PACKAGE / "engine" / "engine.py"
    assert is_in("Engine.step", path)
    assert is_in("step", path)
    assert not is_in("Engine.stride", path)
    assert not is_in("stride", path)
    assert is_exported("eecore.generate")
    assert not is_exported("eecore.degenerate")


def numbers(path: Path) -> dict[str, float]:
    """The constants of a module that are numbers."""
    return {
        node.targets[0].id: float(node.value.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, int | float)
    }


def test_the_constants_of_auto_are_those_of_the_code() -> None:
    text = (DOCS / "design" / "planning.md").read_text()
    rows = re.findall(r"^\| `([A-Z_]+)` \| `(planning/\w+\.py)` \| ([\d.]+) \|", text, re.MULTILINE)
    described = {(file, name): float(value) for name, file, value in rows}
    files = [f"planning/{name}.py" for name in ("auto", "odds", "costs", "planner")]
    assert described == {
        (file, name): value
        for file in files
        for name, value in numbers(test_house.PACKAGE / file).items()
    }


def test_the_table_of_floors_is_the_one_that_is_held() -> None:
    text = (DOCS / "design" / "index.md").read_text()
    table = text.partition("<!-- floors -->\n")[2].partition("<!-- end of floors -->")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    floors = {name.strip().strip("`"): re.findall(r"`(\w+)`", seen) for name, _, seen in rows}
    assert list(floors) == list(reversed(test_house.FLOORS))
    assert {name: set(seen) for name, seen in floors.items()} == {
        name: set(seen.split()) for name, seen in test_house.FLOORS.items()
    }
    everybodys = re.search(r"every module may use (.*?)\.\s", text, re.DOTALL)
    assert everybodys
    assert set(re.findall(r"`(\w+)`", everybodys[1])) == test_house.EVERYBODYS
