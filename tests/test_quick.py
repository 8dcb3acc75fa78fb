"""Every part of the project has quick tests."""

from __future__ import annotations

import ast

import quick


def names_of(file: str) -> list[str]:
    """The names of a file's tests."""
    tree = ast.parse((quick.TESTS / file).read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def test_the_quick_tests_are_there() -> None:
    for file, begins in quick.QUICK.items():
        names = names_of(file)
        for begin in begins:
            assert any(name.startswith(begin) for name in names), f"{file} has no {begin}..."


# The emulator may have to be compiled; the others are of no floor.
WITHOUT = ("across_ops", "bench", "docs", "emulator")


def test_every_folder_has_quick_tests() -> None:
    folders = {path.parent for path in quick.TESTS.rglob("test_*.py")}
    for folder in folders - {quick.TESTS / name for name in WITHOUT}:
        assert any(quick.has_quick(path) for path in folder.glob("test_*.py")), folder
