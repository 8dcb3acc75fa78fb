"""Questions to a chat model: from built-in templates, from a user's file, or about a user's
texts.

Of the built-in questions, 60 % are everyday ones, 25 % ask for code, and 15 % give a text or code
to summarise or rewrite. A user's files are cut into passages: Python files into functions, classes
and docstrings, other texts into runs of paragraphs.
"""

from __future__ import annotations

import ast
import inspect
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from eecore.errors import RequestError
from eecore.files.readable import is_file, kind_of, shown_path
from eecore.files.texts import has_json_lines, json_lines, name_of, read_text

DATA = Path(__file__).resolve().parents[2] / "data" / "prompts"
CODE_CHANGES, TEXT_CHANGES = "code_changes", "text_changes"
SHARES = {"chat": 0.60, "code": 0.25, "rewriting": 0.15}
CODE_TO_CHANGE = 0.3
"""Share of code in what is to be rewritten; the rest is text."""
MAX_REPEATS = 1000
"""Repeated questions in a row after which the templates count as used up."""
SHORTEST = 300
"""Characters of the shortest passage."""
LONGEST = 2000
"""Characters of the longest passage."""
CODE_SUFFIXES = (".py", ".pyi")
TEXT_SUFFIXES = (".txt", ".md", ".rst")
"""Suffixes of texts that are read in a directory, as Python code is; a named file is always
read.
"""
BLANK_LINES = re.compile(r"\n[ \t]*\n\s*")
ENDS_OF_SENTENCES = re.compile(r"(?<=[.!?])\s+")
MAX_MARKS = 0.3
"""Share of characters other than letters and spaces in a passage, at most: tables are not text."""


def builtin_questions(seed: int) -> Iterator[str]:
    """Questions without end, or until the templates give no new one; the same for the same seed."""
    chance = random.Random(seed)
    makers = {"chat": _chat, "code": _code, "rewriting": _rewriting}
    given: set[str] = set()
    repeats = 0
    while repeats < MAX_REPEATS:
        (kind,) = chance.choices(list(SHARES), list(SHARES.values()))
        question = makers[kind](chance)
        repeats = repeats + 1 if question in given else 0
        if question not in given:
            given.add(question)
            yield question


def read_questions(path: Path) -> list[str]:
    """The questions of a file: one a line, or JSON lines of strings or objects with a
    ``prompt``.

    Raises:
        RequestError: the file cannot be read, has no questions, or has other JSON.
    """
    if has_json_lines(path):
        questions = []
        for line in json_lines(path):
            (prompt,) = line.fields("prompt") if isinstance(line.value, dict) else (line.value,)
            if not isinstance(prompt, str) or not prompt.strip():
                raise RequestError(
                    f'{line.where}: expected a string, or an object with a "prompt", '
                    f"got {line.shown}"
                )
            questions.append(prompt)
    else:
        questions = [line for line in read_text(path).splitlines() if line.strip()]
    if not questions:
        raise RequestError(f"{name_of(path)}: expected at least one question, got none")
    return questions


@cache
def templates(name: str) -> tuple[str, ...]:
    """The lines of a built-in file; ``{}`` is a place for a word, and ``\\n`` a new line."""
    text = (DATA / f"{name}.txt").read_text(encoding="utf-8")
    return tuple(line.replace("\\n", "\n") for line in text.splitlines() if line.strip())


@cache
def _snippets() -> tuple[str, ...]:
    text = (DATA / "code_snippets.txt").read_text(encoding="utf-8")
    return tuple(part.strip("\n") for part in text.split("%%\n"))


@cache
def _words() -> dict[str, list[str]]:
    pairs = (line.split(": ", 1) for line in templates("words"))
    return {name: choices.split(" | ") for name, choices in pairs}


def _chat(chance: random.Random) -> str:
    return chance.choice(templates("questions")).replace("{}", chance.choice(templates("topics")))


def _code(chance: random.Random) -> str:
    return about(chance, "code_requests", chance.choice(templates("code_tasks")))


def _rewriting(chance: random.Random) -> str:
    if chance.random() < CODE_TO_CHANGE:
        return about(chance, CODE_CHANGES, chance.choice(_snippets()))
    return about(chance, TEXT_CHANGES, _text(chance))


def about(chance: random.Random, kind: str, text: str) -> str:
    """A question of one kind, such as :data:`CODE_CHANGES`, about a text."""
    return chance.choice(templates(kind)).replace("{}", text)


def _text(chance: random.Random) -> str:
    """A few sentences about the same people."""
    words = {name: chance.choice(choices) for name, choices in _words().items()}
    sentences = chance.sample(templates("sentences"), chance.randint(3, 9))
    return " ".join(_capital(sentence.format(**words)) for sentence in sentences)


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


# Passages


class Passage(NamedTuple):
    """A text that a model can be asked about."""

    text: str
    is_code: bool
    """Whether the text is Python code."""


def read_passages(paths: Iterable[Path]) -> list[Passage]:
    """All passages of files and of directories, each once, in the order of their names.

    Args:
        paths: files of UTF-8 text or of Python code, or directories, of which files named ``.txt``,
            ``.md``, ``.rst``, ``.py`` or ``.pyi`` are read, and unreadable files skipped.

    Raises:
        RequestError: a path is neither a file nor a directory, a file cannot be read, or there is
            no passage.
    """
    given = list(paths)
    found: dict[Passage, None] = {}
    for path in given:
        for passage in _in_directory(path) if path.is_dir() else _in_file(path):
            found.setdefault(passage)
    if not found:
        where = ", ".join(map(shown_path, given))
        raise RequestError(
            f"{where}: expected texts or Python code with passages of {SHORTEST} to {LONGEST} "
            "characters, got none"
        )
    return list(found)


def questions_about(passages: Sequence[Passage], seed: int) -> Iterator[str]:
    """Questions about each passage: to summarise, to rewrite, to explain, ...

    Code and text take turns as long as there are both. Each passage is used once before one is used
    again with another question, until all questions have been asked; the seed sets the order.
    """
    chance = random.Random(seed)
    kinds = [[each for each in passages if each.is_code is is_code] for is_code in (False, True)]
    asks = [_about(kind, chance) for kind in kinds if kind]
    while asks:
        for ask in list(asks):
            question = next(ask, None)
            if question is None:
                asks.remove(ask)
            else:
                yield question


def _about(passages: Sequence[Passage], chance: random.Random) -> Iterator[str]:
    """Questions about passages of one kind."""
    changes = templates(CODE_CHANGES if passages[0].is_code else TEXT_CHANGES)
    firsts = [chance.randrange(len(changes)) for _ in passages]
    for turn in range(len(changes)):
        for i in chance.sample(range(len(passages)), len(passages)):
            change = changes[(firsts[i] + turn) % len(changes)]
            yield change.replace("{}", passages[i].text)


def _in_directory(directory: Path) -> Iterator[Passage]:
    for path in sorted(directory.rglob("*")):
        if path.suffix in CODE_SUFFIXES + TEXT_SUFFIXES and is_file(path):
            try:
                yield from _in_file(path)
            except RequestError:
                continue


def _in_file(path: Path) -> Iterator[Passage]:
    if not is_file(path):
        raise RequestError(
            f"{shown_path(path)}: expected a file or a directory of texts, got {kind_of(path)}"
        )
    text = read_text(path).replace("\r\n", "\n")
    yield from _of_python(text, path) if path.suffix in CODE_SUFFIXES else _of_text(text)


def _of_text(text: str) -> Iterator[Passage]:
    """Paragraphs, joined up to the length of a passage; a longer paragraph is cut into
    sentences.
    """
    for part in _together(BLANK_LINES.split(text.strip()), "\n\n"):
        if len(part) <= LONGEST:
            yield from _passage(part)
        else:
            for sentences in _together(ENDS_OF_SENTENCES.split(part), " "):
                yield from _passage(sentences)


def _together(parts: Iterable[str], between: str) -> Iterator[str]:
    """Parts, joined up to the length of a passage; a longer part stays alone."""
    joined = ""
    for part in parts:
        longer = f"{joined}{between}{part}" if joined else part
        if joined and len(longer) > LONGEST:
            yield joined
            longer = part
        joined = longer
    yield joined


def _of_python(source: str, path: Path) -> Iterator[Passage]:
    """Functions and classes, methods where a class is too long, and docstrings."""
    try:
        with warnings.catch_warnings():  # about invalid escapes in strings
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RequestError(f"{shown_path(path)}: expected Python code, got {error}") from None
    yield from _docstrings(tree)
    yield from _definitions(tree.body, source.splitlines())


def _docstrings(tree: ast.Module) -> Iterator[Passage]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield from _of_text(text)


def _definitions(nodes: Iterable[ast.stmt], lines: Sequence[str]) -> Iterator[Passage]:
    for node in nodes:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        code = inspect.cleandoc("\n" + "\n".join(lines[first - 1 : node.end_lineno]))
        if SHORTEST <= len(code) <= LONGEST:
            yield Passage(code, is_code=True)
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, lines)


def _passage(text: str) -> Iterator[Passage]:
    """The text as a passage, where it has the length of one and consists mostly of words."""
    text = text.strip()
    words = sum(each.isalpha() or each.isspace() for each in text)
    if SHORTEST <= len(text) <= LONGEST and words >= (1 - MAX_MARKS) * len(text):
        yield Passage(text, is_code=False)
