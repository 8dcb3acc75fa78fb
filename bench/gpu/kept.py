"""Rows of a benchmark on a GPU, in a file that is complete after each row.

An interrupted run keeps its rows, and the next run of the same commit, device and settings
continues after them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
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


def said_by(*command: str) -> str:
    """The output of a command; "unknown" if it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()
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


def about(device: torch.device, **settings: Any) -> dict[str, Any]:
    """The fields that all rows of a file have in common."""
    on_gpu = device.type == "cuda"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    commit = os.environ.get("EECORE_COMMIT")
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "driver": said_by(*query).split()[0] if on_gpu else "unknown",
        "torch": torch.__version__,
        "commit": commit or said_by("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "sources": sources(),
        **settings,
    }


def parser(name: str, doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """The options of a benchmark on a GPU; see :func:`bench.harness.command.parser`."""
    made = argparse.ArgumentParser(
        f"python -m bench {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", type=Path, help="the file for the rows")
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--seconds", type=float, default=150, help="no case starts after this time")
    return made


class Kept:
    """The figures of one run.

    Args:
        file: the file that is written after each row; None: none.
        common: the fields of :func:`about`. A file with different fields is replaced.
        names: the fields that identify a row's case.
        seconds: the time after which no case starts.
    """

    def __init__(
        self,
        file: Path | None,
        common: dict[str, Any],
        names: Sequence[str],
        seconds: float = 0.0,
    ) -> None:
        self._file, self._names = file, names
        self._begin, self._seconds = time.monotonic(), seconds
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
        """Add a row in the place of an earlier one of its case, and write the file."""
        case = case_of(row, self._names)
        self.rows[:] = [*(r for r in self.rows if case_of(r, self._names) != case), row]
        self.write()
        return row

    def measure(self, case: Row, run: Callable[[], Row]) -> Row | None:
        """The row of a case, measured unless it is there; None if no time is left for it.

        A case that fails has a row with the reason.
        """
        found = self.find(**case)
        if found is not None:
            return found
        what = " ".join(map(str, case.values()))
        spent = time.monotonic() - self._begin
        if spent > self._seconds:
            self.figures["not_run"].append(what)
            return None
        print(f"{spent:6.1f} s  {what}", file=sys.stderr, flush=True)
        try:
            return self.add(case | run())
        except Exception as error:  # a case that this GPU or torch does not support
            text = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
            return self.add(case | {"error": text})

    def write(self) -> None:
        if self._file is not None:
            write_json(self._file, self.figures)

    def close(self, table: Callable[[dict[str, Any]], str]) -> int:
        """Print the table; returns the exit code."""
        self.write()
        print(table(self.figures))
        return UNFINISHED if self.figures["not_run"] else 0


def figures_of(file: Path | None) -> dict[str, Any] | None:
    """The figures in the file of a run; None without a file that can be read."""
    try:
        return None if file is None else dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        return None
