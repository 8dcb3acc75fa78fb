"""What benchmarks leave behind: figures in bench/results, and tables that are made of them alone.

A table stands between the marks of its section, in bench/RESULTS.md or README.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.places import RESULTS, RESULTS_PAGE
from eecore.files import write_text

Figures = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """The figures of one benchmark and the tables that show them.

    Args:
        name: of bench/results/NAME.json.
        tables: what makes the text of each section of bench/RESULTS.md.
    """

    name: str
    tables: Mapping[str, Callable[[Figures], str]] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return RESULTS / f"{self.name}.json"

    def read(self) -> Figures:
        """The figures of the last run that was kept."""
        return dict(json.loads(self.file.read_text()))

    def text(self, figures: Figures) -> str:
        """All tables, as they are printed."""
        return "\n\n".join(table(figures) for table in self.tables.values())

    def write_tables(self, figures: Figures) -> None:
        for section, table in self.tables.items():
            insert(RESULTS_PAGE, section, table(figures))

    def finish(self, figures: Figures, arguments: argparse.Namespace) -> None:
        """Print the tables, and keep the figures as :func:`bench.harness.command.parser` says."""
        print(self.text(figures))
        if arguments.json is not None:
            write_json(arguments.json, figures)
        elif not arguments.dry_run:
            write_json(self.file, figures)
            self.write_tables(figures)


def write_json(file: Path, figures: Figures) -> None:
    write_text(file, json.dumps(figures, indent=1) + "\n")


def insert(page: Path, section: str, text: str) -> None:
    """Replace what stands between the marks of a section in a Markdown file.

    Raises:
        ValueError: the file has no such marks.
    """
    begin, end = f"<!-- {section} -->", f"<!-- end of {section} -->"
    before, found_begin, rest = page.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{page}: expected {begin} and {end}")
    write_text(page, f"{before}{begin}\n{text}\n{end}{after}")
