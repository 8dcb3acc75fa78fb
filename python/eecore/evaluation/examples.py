"""Examples from JSON lines: a prompt and, where there is one, the text that should follow it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from eecore.errors import RequestError

__all__ = ["Example", "read_examples"]


@dataclass(frozen=True)
class Example:
    """One line of a file."""

    prompt: str
    target: str | None = None


def read_examples(
    path: str | Path, *, limit: int | None = None, needs_target: bool = False
) -> list[Example]:
    """Read ``{"input": text, "target": text}`` lines; ``target`` may be missing.

    Args:
        path: a JSON-lines file.
        limit: how many to read at most.
        needs_target: whether a line without a target is an error.

    Raises:
        RequestError: the file cannot be read, has no example, or a line is malformed; with its
            number.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: expected UTF-8 text, got {error}") from None
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None
    examples = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            examples.append(_example(line, f"{path}:{number}", needs_target))
        if limit is not None and len(examples) >= limit:
            break
    if not examples:
        raise RequestError(f"{path}: expected at least one example, got none")
    return examples


def _example(line: str, where: str, needs_target: bool) -> Example:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where}: expected JSON, got: {error}") from None
    fields = value if isinstance(value, dict) else {}
    prompt, target = fields.get("input"), fields.get("target")
    has_target = isinstance(target, str) or (target is None and not needs_target)
    if isinstance(prompt, str) and prompt and has_target:
        return Example(prompt, target)
    expected = '{"input": text, "target": text}' if needs_target else '{"input": text, ...}'
    shown = line.strip() if len(line) < 80 else f"{line.strip()[:77]}..."
    raise RequestError(f"{where}: expected {expected}, got {shown}")
