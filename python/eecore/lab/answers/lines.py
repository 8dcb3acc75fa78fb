"""A file of JSON lines that survives whatever ends the run that writes it.

The first line says of which model and settings the others are; each of these has a number of its
own and is put down as soon as it is finished. Half a line, which a kill leaves, is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from eecore.errors import RequestError
from eecore.files import write_text
from eecore.json_fields import JsonFields, parse_json
from eecore.readable import is_file, shown_path

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["LinesFile", "NumberedLine", "put_down"]


@dataclass(frozen=True)
class NumberedLine:
    """A line behind the first."""

    index: int
    fields: JsonFields
    where: str
    """``answers.jsonl:3``"""


@dataclass(frozen=True)
class LinesFile:
    """Such a file, which need not exist yet.

    Attributes:
        path: where it is.
        what: it holds, in the plural, as errors call it.
        settings: of all its lines; a file of others is refused.
    """

    path: Path
    what: str
    settings: DataclassInstance

    @property
    def format(self) -> str:
        """What its first line says that it is."""
        return f"eecore {self.what} 1"

    def begin(self) -> list[NumberedLine]:
        """What is in the file, which begins with its settings when this returns.

        Raises:
            RequestError: it is not such a file, or of other settings.
        """
        content = self.path.read_bytes() if is_file(self.path) else b""
        whole = content.rfind(b"\n") + 1
        if not whole:
            header = {"format": self.format, **asdict(self.settings)}
            write_text(self.path, json.dumps(header) + "\n")
            return []
        lines = list(self.lines())
        if whole < len(content):
            with self.path.open("r+b") as file:
                file.truncate(whole)
        return lines

    def lines(self) -> Iterator[NumberedLine]:
        """What has been put down so far, in the order in which it was finished.

        Raises:
            RequestError: it is not such a file, or of other settings.
        """
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise RequestError(f"{shown_path(self.path)}: {error.strerror or error}") from None
        first, *lines = content.split(b"\n")[:-1] or [b""]  # the last is empty, or half a line
        self._check_header(first)
        seen = set()
        for number, line in enumerate(lines, 2):
            where = f"{shown_path(self.path)}:{number}"
            fields = JsonFields.of(parse_json(line, where, RequestError), where, RequestError)
            index = fields.integer("index", 0)
            if index in seen:
                raise RequestError(f"{where}: index: expected each once, got {index} again")
            seen.add(index)
            yield NumberedLine(index, fields, where)

    def _check_header(self, line: bytes) -> None:
        got: Any = parse_json(line, f"{shown_path(self.path)}:1", RequestError)
        if not isinstance(got, dict) or got.get("format") != self.format:
            raise RequestError(
                f"{shown_path(self.path)}:1: expected a file of {self.what}, {self.format!r}"
            )
        for name, expected in asdict(self.settings).items():
            if got.get(name) != expected:
                raise RequestError(
                    f"{shown_path(self.path)}: {name}: expected {expected!r}, as this run has, got "
                    f"{got.get(name)!r}: of another run"
                )


def put_down(file: IO[str], index: int, **values: Any) -> None:
    """A line of such a file, that is there when this returns."""
    file.write(json.dumps({"index": index, **values}, separators=(",", ":")) + "\n")
    file.flush()
