"""Rows of figures, and tables in Markdown that are made from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from eecore.lab.evaluation.tables import markdown_table

Row = dict[str, Any]
Cell = str | Callable[[Row], str]
"""A cell of a row: a text with the row's fields, such as ``{speedup:.2f}x``, or a function.

Where a field that the text formats is missing or None, the cell is empty.
"""

Columns = Sequence[tuple[str, Cell]]
"""The headers and cells of a table."""


def table_of(columns: Columns, rows: Iterable[Row], *, text_columns: int = 1) -> str:
    """A table with a line for each row."""
    lines = [[cell_of(cell, row) for _, cell in columns] for row in rows]
    return markdown_table([head for head, _ in columns], lines, text_columns=text_columns)


def cell_of(cell: Cell, row: Row) -> str:
    """The text of a row's cell."""
    if not isinstance(cell, str):
        return cell(row)
    try:
        return cell.format_map(row)
    except (KeyError, TypeError):
        return ""


def unique(rows: Sequence[Row], name: str) -> list[Any]:
    """The values of the rows under a name, each once, in the order of the rows."""
    return list(dict.fromkeys(row[name] for row in rows))


def is_at(row: Row, where: Row) -> bool:
    return all(row[name] == value for name, value in where.items())


def find(rows: Sequence[Row], **where: Any) -> Row | None:
    """The first row that has all of these values; None if there is none."""
    return next((row for row in rows if is_at(row, where)), None)
