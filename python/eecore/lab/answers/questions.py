"""Questions to a chat model: from built-in templates, or from a user's file.

Of the built-in questions, 60 % are everyday ones, 25 % ask for code, and 15 % give a text or code
to summarise or rewrite.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from eecore.errors import RequestError
from eecore.files.texts import has_json_lines, json_lines, name_of, read_text

DATA = Path(__file__).resolve().parents[2] / "data" / "prompts"
SHARES = {"chat": 0.60, "code": 0.25, "rewriting": 0.15}
CODE_TO_CHANGE = 0.3
"""Share of code in what is to be rewritten; the rest is text."""
MAX_REPEATS = 1000
"""Repeated questions in a row after which the templates count as used up."""


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
def _templates(name: str) -> tuple[str, ...]:
    """The lines of a built-in file; ``{}`` is a place for a word, and ``\\n`` a new line."""
    text = (DATA / f"{name}.txt").read_text(encoding="utf-8")
    return tuple(line.replace("\\n", "\n") for line in text.splitlines() if line.strip())


@cache
def _snippets() -> tuple[str, ...]:
    text = (DATA / "code_snippets.txt").read_text(encoding="utf-8")
    return tuple(part.strip("\n") for part in text.split("%%\n"))


@cache
def _words() -> dict[str, list[str]]:
    pairs = (line.split(": ", 1) for line in _templates("words"))
    return {name: choices.split(" | ") for name, choices in pairs}


def _chat(chance: random.Random) -> str:
    return chance.choice(_templates("questions")).replace("{}", chance.choice(_templates("topics")))


def _code(chance: random.Random) -> str:
    return _about(chance, "code_requests", chance.choice(_templates("code_tasks")))


def _rewriting(chance: random.Random) -> str:
    if chance.random() < CODE_TO_CHANGE:
        return _about(chance, "code_changes", chance.choice(_snippets()))
    return _about(chance, "text_changes", _text(chance))


def _about(chance: random.Random, kind: str, text: str) -> str:
    """A question of one kind, such as ``code_changes``, about a text."""
    return chance.choice(_templates(kind)).replace("{}", text)


def _text(chance: random.Random) -> str:
    """A few sentences about the same people."""
    words = {name: chance.choice(choices) for name, choices in _words().items()}
    sentences = chance.sample(_templates("sentences"), chance.randint(3, 9))
    return " ".join(_capital(sentence.format(**words)) for sentence in sentences)


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
