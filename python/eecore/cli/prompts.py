"""Where prompts come from: the argument, a file of them, or stdin."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from eecore.cli.failures import UsageError
from eecore.errors import RequestError

__all__ = ["Prompt", "read_prompts"]

Prompt = str | list[int]


def read_prompts(argument: str | None, file: Path | None) -> list[Prompt]:
    """The prompts of a command line, at least one.

    The argument (``-``, or none when text is piped in: all of stdin) is a single prompt. A file has
    one a line; a ``.jsonl`` file has JSON strings, lists of token ids, or objects with a
    ``prompt``. Blank lines are skipped. ``--file -`` reads lines from stdin.
    """
    if argument is not None and file is not None:
        raise UsageError("PROMPT: expected it or --file, got both")
    if file is not None:
        name = "stdin" if str(file) == "-" else str(file)
        lines = _text(file).splitlines()
        as_json = file.suffix in (".jsonl", ".ndjson")
        prompts = [
            _from_json(line, f"{name}:{number}") if as_json else line
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
        if not prompts:
            raise RequestError(f"{name}: expected at least one prompt, got none")
        return prompts
    if argument is None and sys.stdin.isatty():
        raise UsageError("PROMPT: expected one, or --file, or text on stdin, got none")
    text = _text(Path("-")).rstrip("\n") if argument in (None, "-") else argument
    assert text is not None
    if not text.strip():
        raise RequestError("prompt: expected some text, got an empty one")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"prompt: expected UTF-8 text, got {text!r}") from None
    return [text]


def _text(path: Path) -> str:
    name = "stdin" if str(path) == "-" else str(path)
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: expected UTF-8 text, got {error}") from None
    except OSError as error:
        raise RequestError(f"{name}: {error.strerror}") from None


def _from_json(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where}: expected JSON, got: {error}") from None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    raise RequestError(
        f'{where}: expected a string, token ids, or an object with a "prompt", got {line.strip()}'
    )
