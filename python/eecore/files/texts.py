"""Text and JSON lines from files, with errors that name the file and the line."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from eecore.errors import RequestError
from eecore.files.json_fields import parse_json
from eecore.files.readable import shown_path

STDIN = Path("-")
MAX_SHOWN = 80
"""Characters of a line that errors show."""
MAX_FROM_PIPE = 1 << 30
"""Bytes of a pipe or device, which may never end."""


class JsonLine(NamedTuple):
    """A line that is not blank."""

    where: str
    """``data.jsonl:3``"""
    value: Any
    shown: str
    """The line, cut where it is long."""

    def fields(self, *names: str) -> list[Any]:
        """Values by name; None for a missing one, and all None where the line is no object."""
        fields = self.value if isinstance(self.value, dict) else {}
        return [fields.get(name) for name in names]


def has_json_lines(path: Path) -> bool:
    """Whether a file's name says that it holds JSON lines."""
    return path.suffix in (".jsonl", ".ndjson")


def name_of(path: Path) -> str:
    """The name of a file in errors; ``-`` is stdin."""
    return "stdin" if path == STDIN else shown_path(path)


def read_text(path: Path, error: type[RequestError] = RequestError) -> str:
    """A file's UTF-8 text, without a byte order mark; ``-`` is stdin.

    Raises:
        RequestError: or ``error``; the file cannot be read.
    """
    try:
        if path == STDIN:
            return _bounded(sys.stdin.buffer, error, path).decode("utf-8-sig")
        with path.open("rb") as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read() if is_regular else _bounded(file, error, path)
            return content.decode("utf-8-sig")
    except error:
        raise
    except UnicodeDecodeError as caught:
        raise error(f"{name_of(path)}: expected UTF-8 text, got {caught}") from None
    except OSError as caught:
        raise error(f"{name_of(path)}: {caught.strerror or caught}") from None
    except ValueError:  # a NUL, or letters that no file system has
        raise error(f"{name_of(path)}: expected the name of a file") from None


def _bounded(file: BinaryIO, error: type[RequestError], path: Path) -> bytes:
    """All bytes of a pipe or device, up to a limit."""
    content = file.read(MAX_FROM_PIPE + 1)
    if len(content) > MAX_FROM_PIPE:
        raise error(f"{name_of(path)}: expected at most {MAX_FROM_PIPE} bytes, got more")
    return content


def json_lines(path: Path, error: type[RequestError] = RequestError) -> Iterator[JsonLine]:
    """A file's lines that are not blank, one by one.

    Raises:
        RequestError: or ``error``; the file cannot be read, or a line is not JSON.
    """
    for number, line in enumerate(read_text(path, error).split("\n"), 1):
        if not line.strip():
            continue
        where, shown = f"{name_of(path)}:{number}", line.strip()
        value = parse_json(line, where, error)
        if len(shown) >= MAX_SHOWN:
            shown = f"{shown[: MAX_SHOWN - 3]}..."
        yield JsonLine(where, value, shown)
