"""Plain words: docstrings are sentences or noun phrases of their own, in the terms of the field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "eecore"
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


def package_of(module: Path) -> str:
    """The package of a module: the first folder under python/eecore, or eecore itself."""
    parts = module.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "eecore"


PACKAGES = sorted({package_of(module) for module in PACKAGE.rglob("*.py")})


@pytest.mark.parametrize("package", PACKAGES)
def test_words_are_plain(package: str) -> None:
    found = [
        f"{module.relative_to(PACKAGE)}: {each}"
        for module in sorted(PACKAGE.rglob("*.py"))
        if package_of(module) == package
        for each in findings(module.read_text())
    ]
    assert not found, "\n".join(found)


TOOLS = sorted(tool for folder in ("bench", "scripts") for tool in (ROOT / folder).rglob("*.py"))


def folder_of(source: Path) -> str:
    """The folder of a source, from the root of the repository on."""
    return source.relative_to(ROOT).parent.as_posix()


@pytest.mark.parametrize("folder", sorted({folder_of(tool) for tool in TOOLS}))
def test_tools_are_plain(folder: str) -> None:
    found = [
        f"{tool.relative_to(ROOT)}: {each}"
        for tool in TOOLS
        if folder_of(tool) == folder
        for each in findings(tool.read_text())
    ]
    assert not found, "\n".join(found)


def group_of(page: Path) -> str:
    """The name of a page; docs/ops is one."""
    name = page.relative_to(ROOT).as_posix()
    return "docs/ops" if name.startswith("docs/ops/") else name


FOLDERS = ("docs", "bench", "python", "scripts", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for f in FOLDERS for page in (ROOT / f).rglob("*.md"))])


@pytest.mark.parametrize("group", sorted({group_of(page) for page in PAGES}))
def test_pages_are_plain(group: str) -> None:
    found = [
        f"{page.relative_to(ROOT)}: line {line}: {what}"
        for page in PAGES
        if group_of(page) == group
        for line, what in words_in(page.read_text())
    ]
    assert not found, "\n".join(found)


SOURCES = sorted(
    source
    for folder in ("csrc", "include")
    for source in (ROOT / folder).rglob("*")
    if source.suffix in {".cpp", ".cu", ".cuh", ".h"}
)
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


@pytest.mark.parametrize("folder", sorted({folder_of(source) for source in SOURCES}))
def test_sources_are_plain(folder: str) -> None:
    found = [
        f"{source.relative_to(ROOT)}: {each}"
        for source in SOURCES
        if folder_of(source) == folder
        for each in source_findings(source.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""Of the rows."""',
        'class Row:\n    """A row."""\n\n    size: int\n    """Its size."""',
        'def rows() -> None:\n    """It is a row."""',
        "# what comes behind it",
        "# so many, and others\n# besides",
        "# what was tried of\n# late",
        "behind = 3",
        "drop_behind = 3",
        "MOST_ROWS = 3",
        "def f(rows: int = _LEAST_ROWS) -> None: ...",
        "class Turn: ...",
        '"""How many of the drafts of a round have stood."""',
        '"""Rows leave after this layer."""',
        'ERROR = f"{name}: whoever asks waits"',
    ],
)
def test_unplain_words_are_found(source: str) -> None:
    assert findings(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""The rows of a program."""',
        'TEXT = "Of the rows."',
        "# drafts are accepted. Where the prompt stands is another matter.",
        "ALMOST_ONE = 1 - 2**-24",
        "become_to = 1",
    ],
)
def test_plain_words_pass(source: str) -> None:
    assert findings(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "// The block behind it.",
        "int rows;  // what came to\n// the cache",
        "/* One block,\n   and others besides. */",
        'throw Error("expected none where nobody asks");',
        "// Rows leave after this layer.",
        "// Whether a draft\n// stands.",
        "// Of a row: its tokens.",
        "int rows;\n//\n// Its rows.",
        "constexpr int kMostRows = 8;",
        "constexpr int kHeadMostTiles = 4;",
        "constexpr int kMost = 4;",
        "#define LEAST_ROWS 4",
    ],
)
def test_unplain_sources_are_found(source: str) -> None:
    assert source_findings(source)


@pytest.mark.parametrize(
    "source",
    [
        "// The block after it.",
        "int behind = 3;  // rows",
        "// All rows, and those\n// Of nothing.",
        "const char quote = '\"';  // a quote\nint behind = '\"';",
        "int draft;  // a token\nint stand;  // and another one",
        "constexpr int kAlmostOne = 1, kMostly = 2;",
        'const char* url = "https://example.org";  // an address',
    ],
)
def test_plain_sources_pass(source: str) -> None:
    assert source_findings(source) == []


TESTS = sorted(each for each in (ROOT / "tests").rglob("*.py") if each != Path(__file__))
KERNELS = re.compile("early_behind_condition|merge_without_fence_behind")
"""Names of tests/emulator/faulty_kernels.cu that tests have to repeat."""


@pytest.mark.parametrize("folder", sorted({folder_of(module) for module in TESTS}))
def test_tests_are_plain(folder: str) -> None:
    found = [
        f"{module.relative_to(ROOT)}: {each}"
        for module in TESTS
        if folder_of(module) == folder
        for each in findings(KERNELS.sub("kernel", module.read_text()))
    ]
    assert not found, "\n".join(found)
