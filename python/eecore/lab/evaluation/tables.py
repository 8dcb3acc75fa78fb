"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Row = TypeVar("Row")


def markdown_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1
) -> str:
    """A table with a header row; columns after the first ``text_columns`` are numbers."""
    marks = ["---" if column < text_columns else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, marks, *rows])


def table_of(
    columns: Mapping[str, Callable[[Row], str]], rows: Iterable[Row], *, text_columns: int = 1
) -> str:
    """A table with a row for each object; ``columns`` maps a header to the text of its cells."""
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    return markdown_table(list(columns), cells, text_columns=text_columns)


def number(value: float | None, form: str = ".2f") -> str:
    """A formatted number; an empty text for None."""
    return "" if value is None else format(value, form)
