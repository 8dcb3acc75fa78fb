"""Rows of figures: dictionaries with the same keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def unique(rows: Sequence[Row], name: str) -> list[Any]:
    """The values of the rows under a name, each once, in the order of the rows."""
    return list(dict.fromkeys(row[name] for row in rows))


def is_at(row: Row, where: Row) -> bool:
    return all(row[name] == value for name, value in where.items())


def find(rows: Sequence[Row], **where: Any) -> Row | None:
    """The first row that has all of these values; None if there is none."""
    return next((row for row in rows if is_at(row, where)), None)
