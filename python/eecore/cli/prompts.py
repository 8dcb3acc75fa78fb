"""Where prompts come from: the argument, a file of them, or stdin."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from eecore.cli.failures import UsageError
from eecore.errors import RequestError
from eecore.files.texts import STDIN, JsonLine, has_json_lines, json_lines, name_of, read_text

Prompt = str | list[int]


def read_prompts(argument: str | None, file: Path | None) -> list[Prompt]:
    """The prompts of a command line, at least one.

    The argument is a single prompt; ``-``, or no argument when text is piped in, makes all of stdin
    one prompt. A file has one prompt per line; a ``.jsonl`` file has JSON strings, lists of token
    ids, or objects with a ``prompt``. Blank lines are skipped. ``--file -`` reads lines from stdin.
    """
    if argument is not None and file is not None:
        raise UsageError("PROMPT: expected it or --file, got both")
    if file is not None:
        prompts: list[Prompt]
        if has_json_lines(file):
            prompts = [_prompt(line) for line in json_lines(file)]
        else:
            prompts = [line for line in read_text(file).splitlines() if line.strip()]
        if not prompts:
            raise RequestError(f"{name_of(file)}: expected at least one prompt, got none")
        return prompts
    if argument is None and sys.stdin.isatty():
        raise UsageError("PROMPT: expected one, or --file, or text on stdin, got none")
    if argument is None or argument == "-":
        text = read_text(STDIN).rstrip("\n")
    else:
        text = _as_utf8(argument)
    if not text.strip():
        raise RequestError("prompt: expected some text, got an empty one")
    return [text]


def _as_utf8(text: str) -> str:
    """An argument's text, its bytes decoded as UTF-8 whatever the locale is."""
    try:
        return os.fsencode(text).decode() if not text.isascii() else text
    except UnicodeError:
        raise RequestError(f"prompt: expected UTF-8 text, got {text[:80]!r}") from None


def _prompt(line: JsonLine) -> Prompt:
    value = line.value
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    raise RequestError(
        f'{line.where}: expected a string, token ids, or an object with a "prompt", '
        f"got {line.shown}"
    )
