"""Questions to a chat model: made of templates that ship, or a user's own.

Of the built-in ones 60 % are everyday questions, 25 % ask for code, 15 % are texts and code to
summarise or to rewrite, the texts made of sentences.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from eecore.errors import RequestError
from eecore.textfiles import has_json_lines, json_lines, name_of, read_text

__all__ = [
    "CODE_CHANGES",
    "TEXT_CHANGES",
    "about_code",
    "about_text",
    "builtin_questions",
    "openings",
    "read_questions",
    "templates",
]

DATA = Path(__file__).resolve().parents[2] / "data" / "prompts"
CODE_CHANGES, TEXT_CHANGES = "code_changes", "text_changes"
SHARES = {"chat": 0.60, "code": 0.25, "rewriting": 0.15}
CODE_TO_CHANGE = 0.3
"""Of what is to be rewritten; the rest is text."""
MOST_REPEATS = 1000
"""As many in a row, and there is nothing new to be had."""


def builtin_questions(seed: int) -> Iterator[str]:
    """Questions without end, or until the templates give no other; the same for the same seed."""
    chance = random.Random(seed)
    makers = {"chat": _chat, "code": _code, "rewriting": _rewriting}
    given: set[str] = set()
    repeats = 0
    while repeats < MOST_REPEATS:
        (kind,) = chance.choices(list(SHARES), list(SHARES.values()))
        question = makers[kind](chance)
        repeats = repeats + 1 if question in given else 0
        if question not in given:
            given.add(question)
            yield question


def read_questions(path: Path) -> list[str]:
    """One a line, or of JSON lines the strings, or the ``prompt`` of each object.

    Raises:
        RequestError: the file cannot be read, has no questions, or something else in it.
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
    """Lines of a file that ships; ``{}`` is a place in them, and ``\\n`` a new line."""
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
    task = chance.choice(templates("code_tasks"))
    return chance.choice(templates("code_requests")).replace("{}", task)


def _rewriting(chance: random.Random) -> str:
    if chance.random() < CODE_TO_CHANGE:
        return about_code(chance, chance.choice(_snippets()))
    return about_text(chance, _text(chance))


def about_code(chance: random.Random, code: str) -> str:
    """One of the questions about code, with this one."""
    return chance.choice(templates(CODE_CHANGES)).replace("{}", code)


def about_text(chance: random.Random, text: str) -> str:
    """One of the questions about a text, with this one."""
    return chance.choice(templates(TEXT_CHANGES)).replace("{}", text)


def openings() -> tuple[str, ...]:
    """What a question may begin with."""
    return templates("openings")


def _text(chance: random.Random) -> str:
    """A few sentences about the same people."""
    words = {name: chance.choice(choices) for name, choices in _words().items()}
    sentences = chance.sample(templates("sentences"), chance.randint(3, 9))
    return " ".join(_capital(sentence.format(**words)) for sentence in sentences)


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
