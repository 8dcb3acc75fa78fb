"""Examples in JSON lines: prompts, some with the text that should follow."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from eecore.errors import RequestError
from eecore.files.readable import path_of
from eecore.files.texts import JsonLine, json_lines


@dataclass(frozen=True)
class Example:
    """A line of a file."""

    prompt: str
    target: str | None = None


FIELDS = ("input", "target")


def read_examples(
    path: str | Path,
    *,
    limit: int | None = None,
    needs_target: bool = False,
    fields: tuple[str, str] = FIELDS,
) -> list[Example]:
    """Read ``{"input": text, "target": text}`` lines; ``target`` may be missing.

    Args:
        path: a JSON-lines file.
        limit: examples to read, at most.
        needs_target: whether a line without a target is an error.
        fields: the names of the two fields.

    Raises:
        RequestError: the file cannot be read, has no example, or a line is malformed; the message
            has its number.
    """
    path = path_of(path, RequestError)
    lines = itertools.islice(json_lines(path), limit)
    examples = [_example(line, needs_target, fields) for line in lines]
    if not examples:
        raise RequestError(f"{path}: expected at least one example, got none")
    return examples


def _example(line: JsonLine, needs_target: bool, fields: tuple[str, str]) -> Example:
    prompt, target = line.fields(*fields)
    has_target = isinstance(target, str) or (target is None and not needs_target)
    if isinstance(prompt, str) and prompt and has_target:
        return Example(prompt, target)
    more = f'"{fields[1]}": text' if needs_target else "..."
    expected = f'{{"{fields[0]}": text, {more}}}'
    raise RequestError(f"{line.where}: expected {expected}, got {line.shown}")
