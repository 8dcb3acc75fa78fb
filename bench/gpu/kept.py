"""Rows of a benchmark on a GPU, in a file that is complete after each row.

An interrupted run keeps its rows, and the next run of the same commit, device and settings
continues after them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness.places import ROOT
from bench.harness.results import case_of, write_json

Row = dict[str, Any]
UNFINISHED = 3
"""Exit code of a benchmark that did not have time for all of its cases."""
SOURCES = ("CMakeLists.txt", "csrc", "include", "python", "bench", "tests")
SUFFIXES = (".py", ".cpp", ".h", ".cu", ".cuh", ".txt")


def commit() -> str:
    """EECORE_COMMIT, or the commit of the checkout, with a mark when it has changes."""
    if given := os.environ.get("EECORE_COMMIT"):
        return given
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def sources() -> str:
    """The beginning of a SHA-256 of all sources, as a copy of a checkout may have no commit."""
    digest = hashlib.sha256()
    for name in SOURCES:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in SUFFIXES and file.is_file():
                digest.update(f"{file.relative_to(ROOT)}\0".encode())
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def driver() -> str:
    """The version of the GPU's driver."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def about(device: torch.device, **settings: Any) -> dict[str, Any]:
    """The fields that all rows of a file have in common."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "driver": driver() if on_gpu else "unknown",
        "torch": torch.__version__,
        "commit": commit(),
        "sources": sources(),
        **settings,
    }


class Kept:
    """The figures of one run.

    Args:
        file: the file that is written after each row; None: none.
        common: the fields of :func:`about`. A file with different fields is replaced.
        names: the fields that identify a row's case.
        finish: makes the table, which is printed at the end.
    """

    def __init__(
        self,
        file: Path | None,
        common: dict[str, Any],
        names: Sequence[str],
        finish: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        self._file, self._names, self._finish = file, names, finish
        self.figures: dict[str, Any] = {**common, "not_run": [], "rows": []}
        before = figures_of(file)
        if before is not None and all(before.get(name) == common[name] for name in common):
            # Failed cases are tried again.
            rows = [row for row in before.get("rows", ()) if "error" not in row]
            self.figures = {**before, "not_run": [], "rows": rows}

    @property
    def rows(self) -> list[Row]:
        """All rows, including those of an earlier run."""
        rows: list[Row] = self.figures["rows"]
        return rows

    def find(self, **case: Any) -> Row | None:
        """The row of a case; None if there is none."""
        wanted = case_of(case, self._names)
        return next((row for row in self.rows if case_of(row, self._names) == wanted), None)

    def add(self, row: Row) -> Row:
        """Add a row and write the file."""
        self.rows.append(row)
        self.write()
        return row

    def skip(self, what: str) -> None:
        """Record a case for which no time was left."""
        if what not in self.figures["not_run"]:
            self.figures["not_run"].append(what)

    def note(self, **fields: Any) -> None:
        """Record figures of the whole run."""
        self.figures |= fields

    def write(self) -> None:
        """Write the file and its table."""
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._file, self.figures)

    def close(self) -> int:
        """Print the table; returns the exit code."""
        self.write()
        print("" if self._finish is None else self._finish(self.figures))
        return UNFINISHED if self.figures["not_run"] else 0


def figures_of(file: Path | None) -> dict[str, Any] | None:
    """The figures in the file of a run; None without a file that can be read."""
    try:
        return None if file is None else dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        return None
