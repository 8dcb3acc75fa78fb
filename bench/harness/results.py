"""Results of benchmarks: figures in bench/results, and tables that are made from them alone.

A table is between the marks of its section in bench/RESULTS.md, in bench/results/*.md or in
README.md. A run of some cases changes only these cases. A run with other settings or on another
machine changes nothing without ``--replace``: its figures go to build/bench.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.command import say
from bench.harness.places import PAGES, README, RESULTS, RESULTS_PAGE
from eecore.files.whole import write_text

Figures = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """The figures of one benchmark and the tables that show them.

    Args:
        name: NAME of bench/results/NAME.json.
        tables: functions that make the text of each section of bench/RESULTS.md and
            bench/results/*.md, by section.
        cases: the lists of rows among the figures, and the names of the fields that identify a
            row's case. Without lists a run replaces the previous run.
        measured: other figures that each run measures; all further fields are settings.
    """

    name: str
    tables: Mapping[str, Callable[[Figures], str]] = field(default_factory=dict)
    cases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    measured: Sequence[str] = ()

    @property
    def file(self) -> Path:
        return RESULTS / f"{self.name}.json"

    def read(self) -> Figures:
        """The kept figures."""
        return dict(json.loads(self.file.read_text()))

    def text(self, figures: Figures) -> str:
        """All tables, as text to print."""
        return "\n\n".join(table(figures) for table in self.tables.values())

    def write_tables(self, figures: Figures) -> None:
        for section, table in self.tables.items():
            insert(page_with(section), section, table(figures))

    def finish(self, figures: Figures, arguments: argparse.Namespace) -> None:
        """Print the tables, and keep the figures as :func:`bench.harness.command.parser` says."""
        print(self.text(figures))
        if arguments.json is not None:
            write_json(arguments.json, figures)
        if arguments.json is not None or arguments.dry_run:
            return
        if self.cases and self.file.exists() and not arguments.replace:
            kept = self.read()
            figures = self.joined(kept, figures)
            changing = (*self.cases, *self.measured)
            others = [n for n in figures if n not in changing and figures[n] != kept.get(n)]
            if others:
                write_json(PAGES / self.file.name, figures)
                say(
                    f"{self.file.name}: {', '.join(others)} differ: it is left as it is, the new "
                    f"figures are in {PAGES / self.file.name}; --replace replaces all kept figures"
                )
                return
        write_json(self.file, figures)
        self.write_tables(figures)

    def joined(self, kept: Figures, now: Figures) -> Figures:
        """The figures of a new run, with the kept rows of cases that it left out."""
        rows = {
            name: joined_rows(kept.get(name, ()), now.get(name, ()), keys)
            for name, keys in self.cases.items()
        }
        is_whole = all(len(own) == len(now.get(name, ())) for name, own in rows.items())
        before = {} if is_whole else {name: kept[name] for name in self.measured if name in kept}
        return {**now, **before, **rows}


def joined_rows(
    kept: Sequence[Figures], now: Sequence[Figures], names: Sequence[str]
) -> list[Figures]:
    """The rows of ``kept``, those of cases in ``now`` replaced; new cases come last."""
    by_case: list[dict[tuple[Any, ...], list[Figures]]] = [{}, {}]
    for found, rows in zip(by_case, (kept, now), strict=True):
        for row in rows:
            found.setdefault(case_of(row, names), []).append(row)
    return [row for each in {**by_case[0], **by_case[1]}.values() for row in each]


def case_of(row: Figures, names: Sequence[str]) -> tuple[Any, ...]:
    """The values that identify a row's case."""
    return tuple(row.get(name) for name in names)


def write_json(file: Path, figures: Figures) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(figures, indent=1) + "\n")


def pages() -> list[Path]:
    """The pages of tables: README.md, bench/RESULTS.md and bench/results/*.md."""
    return [README, RESULTS_PAGE, *sorted(RESULTS.glob("*.md"))]


def page_with(section: str) -> Path:
    """The one page that has the marks of a section."""
    found = [page for page in pages() if f"<!-- {section} -->" in page.read_text()]
    if len(found) != 1:
        names = ", ".join(page.name for page in found) or "none"
        raise ValueError(f"<!-- {section} -->: expected one page with this mark, got {names}")
    return found[0]


def insert(page: Path, section: str, text: str) -> None:
    """Replace the text between the marks of a section in a Markdown file."""
    begin, end = f"<!-- {section} -->\n", f"\n<!-- end of {section} -->"
    before, _, rest = page.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_end:
        raise ValueError(f"{page}: expected {begin.strip()} and {end.strip()}")
    write_text(page, f"{before}{begin}{text}{end}{after}")
