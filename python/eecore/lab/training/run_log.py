"""The logs of a run: a row for each step and a row for each evaluation.

They are CSV files, and TensorBoard's where asked for.

Rows have no times, and numbers in full precision: two runs that learn alike write the same bytes.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eecore.errors import TrainingError
from eecore.files.readable import regular_file
from eecore.files.whole import replacing
from eecore.lab.training.libraries import library
from eecore.values import shown

STEPS, EVALUATIONS = "steps", "evaluations"


class CsvLog:
    """A CSV file whose first column is the step; rows after ``resume_at`` are cut off first."""

    def __init__(self, path: Path, columns: Sequence[str], resume_at: int) -> None:
        kept = _rows_until(path, columns, resume_at) if path.is_file() else []
        with replacing(path) as partial, partial.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([columns, *kept])
        self._file = path.open("a", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")

    def write(self, row: Sequence[int | float | None]) -> None:
        """Append a row, which is on disk when this returns; None leaves a field empty."""
        self._writer.writerow(["" if value is None else repr(value) for value in row])
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _rows_until(path: Path, columns: Sequence[str], step: int) -> list[list[str]]:
    header, *rows = _read_rows(path) or [[]]
    if header and header != list(columns):
        raise TrainingError(
            f"{path}: expected columns {','.join(columns)}, got {shown(','.join(header))}"
        )
    # A killed run may leave half a row, of a step that will be repeated.
    whole = [row for row in rows if len(row) == len(columns)]
    for row in whole:
        if not (row[0].isdecimal() and len(row[0]) < 20):
            raise TrainingError(f"{path}: step: expected a number, got {shown(row[0])}")
    return [row for row in whole if int(row[0]) <= step]


def _read_rows(path: Path) -> list[list[str]]:
    regular_file(path, TrainingError)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise TrainingError(f"{path}: expected the log of a run, got: {error}") from None


class RunLog:
    """All logs of a run, in a directory: the columns of each by name, of which the first is a
    step.
    """

    def __init__(
        self,
        directory: Path,
        columns: Mapping[str, Sequence[str]],
        resume_at: int,
        tensorboard: bool = False,
    ) -> None:
        self._columns = columns
        # Made first, since TensorBoard may not be installed.
        self._board = _board(directory, resume_at) if tensorboard else None
        self._logs = {
            name: CsvLog(directory / f"{name}.csv", own, resume_at) for name, own in columns.items()
        }

    def write(self, name: str, row: Sequence[int | float | None]) -> None:
        """Append a row to a log; None leaves a field empty."""
        self._logs[name].write(row)
        if self._board is not None:
            for column, value in zip(self._columns[name][1:], row[1:], strict=True):
                if value is not None:
                    self._board.add_scalar(f"{name}/{column}", value, row[0])

    def close(self) -> None:
        for log in (*self._logs.values(), *([] if self._board is None else [self._board])):
            log.close()


def _board(directory: Path, resume_at: int) -> Any:
    """A TensorBoard writer."""
    writer = tensorboard_writer()
    return writer(str(directory / "tensorboard"), purge_step=resume_at or None)


def tensorboard_writer() -> Any:
    """TensorBoard's class of writers; a TrainingError says what to install for it."""
    library("tensorboard", "tensorboard")
    return library("torch.utils.tensorboard", "tensorboard").SummaryWriter


Columns = dict[str, list[float | None]]


def read_logs(directory: Path) -> tuple[Columns, Columns]:
    """The logs of a run's steps and evaluations."""
    return read_log(directory / f"{STEPS}.csv"), read_log(directory / f"{EVALUATIONS}.csv")


def read_log(path: Path) -> Columns:
    """The columns of a log by name; None where a field is empty."""
    try:
        header, *rows = _read_rows(path)
        return {
            name: [float(row[column]) if row[column] else None for row in rows]
            for column, name in enumerate(header)
        }
    except (ValueError, IndexError) as error:
        raise TrainingError(f"{path}: expected the log of a run, got: {error}") from None
