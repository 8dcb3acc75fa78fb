"""Plain words: docstrings are sentences or noun phrases of their own, in the terms of the field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLAIN = {
    "behind": "after",
    "besides": "also",
    "of late": "recently",
    "in vain": "without result",
    "whoever": "the caller, the request, the worker",
    "nobody": "the caller, the request, the worker",
    "(?:come|comes|came|coming) to": "reach",
    "draft(?:s|ed)?[^.;:]{0,60} (?:stand|stands|stood)": "accepted",
    "rows? (?:leave|leaves|left)": "exit",
}
"""What is not written, as a pattern, and what is written for it."""
OPENINGS = ("Of", "That", "Those", "Its", "It")
"""First words of docstrings that only the line above makes sense of."""
NAME = re.compile(r"\b_?(?:MOST|LEAST)_\w+|\bclass (?:Ear|Turn|Bell|Mail|Rest|Pace)\b")
"""Names for which the field has others: MAX_ and MIN_, listener, owner, event, message."""


def word_pattern(words: str) -> re.Pattern[str]:
    """Words in prose and in names, also where a line or a comment's line ends between them."""
    spaced = words.replace(" ", r"\s+(?:#\s*)?")
    return re.compile(rf"(?<![a-z])(?:{spaced})(?![a-z])", re.I)


PATTERNS = {word_pattern(words): plain for words, plain in PLAIN.items()}


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The line and text of each docstring: a module's, class's, function's or attribute's."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield statement.lineno, text


def findings(source: str) -> list[str]:
    """What is not plain in a module, each with its line."""
    found = [
        (line, f"a docstring begins with {opening[0]}")
        for line, text in docstrings(source)
        if (opening := text.split()) and opening[0].rstrip(".,:") in OPENINGS
    ]
    found += words_in(source)
    for match in NAME.finditer(source):
        found.append((source.count("\n", 0, match.start()) + 1, f"the name {match[0]}"))
    return [f"line {line}: {what}" for line, what in sorted(found)]


def words_in(text: str) -> list[tuple[int, str]]:
    """The line of each word of a text that is not plain, and what is expected for it."""
    return [
        (
            text.count("\n", 0, match.start()) + 1,
            f"{' '.join(match[0].split())!r}: expected {plain}",
        )
        for pattern, plain in PATTERNS.items()
        for match in pattern.finditer(text)
    ]


TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)
"""A comment or a literal of C++."""
SOURCE_NAME = re.compile(r"\b(?:k\w*(?:Most|Least)(?![a-z])\w*|(?:MOST|LEAST)_\w+)")
"""Names of C++ constants that are kMax.. and kMin.. instead."""
SOURCE_OPENING = re.compile(rf"//\s*(?:{'|'.join(OPENINGS)})\b")


def prose_of(source: str) -> str:
    """The comments and literals of C++, each at its place; semicolons stand for the code."""
    code = re.compile(r"\S")
    parts, end = [], 0
    for token in TOKEN.finditer(source):
        parts.append(code.sub(";", source[end : token.start()]))
        parts.append(re.sub(r"^//", "  ", token[0]))
        end = token.end()
    parts.append(code.sub(";", source[end:]))
    return "".join(parts)


def source_findings(source: str) -> list[str]:
    """What is not plain in C++ or CUDA, each with its line."""
    found = words_in(prose_of(source))
    for match in SOURCE_NAME.finditer(source):
        found.append((source.count("\n", 0, match.start()) + 1, f"the name {match[0]}"))
    is_open = False  # the line before is a comment that goes on
    for number, line in enumerate(source.splitlines(), 1):
        opening = None if is_open else SOURCE_OPENING.search(line)
        if opening is not None:
            found.append((number, f"a comment begins with {opening[0].split()[-1]}"))
        is_open = re.search(r"//\s*\S", line) is not None
    return [f"line {line}: {what}" for line, what in sorted(found)]


KERNELS = re.compile("early_behind_condition|merge_without_fence_behind")
"""Names of tests/emulator/faulty_kernels.cu that tests have to repeat."""
FOLDERS = {folder: {".py", ".md"} for folder in ("python", "bench", "scripts", "tests", "docs")}
FOLDERS |= {folder: {".cpp", ".cu", ".cuh", ".h"} for folder in ("csrc", "include")}
FILES: dict[str, list[Path]] = {".": sorted(ROOT.glob("*.md"))}
for folder, suffixes in FOLDERS.items():
    for file in sorted((ROOT / folder).rglob("*")):
        if file.suffix in suffixes and file != Path(__file__):
            FILES.setdefault(file.parent.relative_to(ROOT).as_posix(), []).append(file)


def findings_in(file: Path) -> list[str]:
    """What is not plain in a module, a page or a C++ source."""
    text = file.read_text()
    if file.suffix == ".py":
        return findings(KERNELS.sub("kernel", text) if "tests" in file.parts else text)
    if file.suffix == ".md":
        return [f"line {line}: {what}" for line, what in words_in(text)]
    return source_findings(text)


@pytest.mark.parametrize("folder", FILES)
def test_words_are_plain(folder: str) -> None:
    found = [f"{file.name}: {each}" for file in FILES[folder] for each in findings_in(file)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""Of the rows."""',
        'class Row:\n    """A row."""\n\n    size: int\n    """Its size."""',
        "# what was tried of\n# late",
        "drop_behind = 3",
        "def f(rows: int = _LEAST_ROWS) -> None: ...",
        '"""How many of the drafts of a round have stood."""',
    ],
)
def test_unplain_words_are_found(source: str) -> None:
    assert findings(source)
    assert not findings('"""The rows."""\n# where the prompt stands\nALMOST_ONE, TEXT = 1, "Of"')


@pytest.mark.parametrize(
    "source",
    [
        "int rows;  // what came to\n// the cache",
        "/* One block,\n   and others besides. */",
        'throw Error("expected none where nobody asks");',
        "int rows;\n//\n// Its rows.",
        "constexpr int kHeadMostTiles = 4;",
        "#define LEAST_ROWS 4",
    ],
)
def test_unplain_sources_are_found(source: str) -> None:
    assert source_findings(source)
    plain = "int behind = 3;  // rows, and those\n// Of nothing.\nconstexpr int kMostly = 2;"
    assert not source_findings(plain)
