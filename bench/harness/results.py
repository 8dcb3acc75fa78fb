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
EMPTY: tuple[Any, ...] = (None, [], {})
"""Values of a part that a run left out."""


class OtherSettings(ValueError):
    """Figures whose settings differ from those of the kept figures."""


@dataclass(frozen=True)
class Report:
    """The figures of one benchmark and the tables that show them.

    Args:
        name: NAME of bench/results/NAME.json.
        tables: functions that make the text of each section of bench/RESULTS.md and
            bench/results/*.md, by section.
        cases: the lists of rows among the figures (``a.b`` for a list b in a), and the names of the
            fields that identify a row's case. Without lists a run replaces the previous run.
        measured: other figures that each run measures; all further fields are settings.
        renewed: settings that a run of all cases may change.
    """

    name: str
    tables: Mapping[str, Callable[[Figures], str]] = field(default_factory=dict)
    cases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    measured: Sequence[str] = ()
    renewed: Sequence[str] = ()

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
        elif not arguments.dry_run:
            keeps = (self.cases or self.measured) and not arguments.replace
            whole = self.kept_with(figures, self.file) if keeps else figures
            if whole is not None:
                write_json(self.file, whole)
                self.write_tables(whole)

    def kept_with(self, figures: Figures, file: Path) -> Figures | None:
        """The figures of a file, updated with those of a new run.

        None if their settings differ; the new figures are then in build/bench.
        """
        if not file.exists():
            return figures
        kept = dict(json.loads(file.read_text()))
        try:
            return self._joined(kept, figures, "", self._leaves_out(kept, figures))
        except OtherSettings as error:
            PAGES.mkdir(parents=True, exist_ok=True)
            write_json(PAGES / file.name, figures)
            say(
                f"{file.name}: {error}. It is left as it is, and this run's figures are in "
                f"{PAGES / file.name}; --replace replaces all kept figures with them"
            )
            return None

    def _leaves_out(self, kept: Figures, now: Figures, path: str = "") -> bool:
        """Whether a run left out a part of the kept figures."""
        for name, before in kept.items():
            got, place = now.get(name), path + name
            if got in EMPTY and before not in EMPTY:
                return True
            if place in self.cases:
                keys = self.cases[place]
                if {case_of(row, keys) for row in before} - {case_of(row, keys) for row in got}:
                    return True
            elif (
                isinstance(before, dict)
                and isinstance(got, dict)
                and self._leaves_out(before, got, f"{place}.")
            ):
                return True
        return False

    def _joined(self, kept: Figures, now: Figures, path: str, leaves_out: bool) -> Figures:
        whole = {}
        for name in {**kept, **now}:
            before, got, place = kept.get(name), now.get(name), path + name
            if got in EMPTY:
                whole[name] = before
            elif place in self.cases:
                whole[name] = joined_rows(before or [], got, self.cases[place])
            elif place in self.measured:
                whole[name] = before if leaves_out else got
            elif isinstance(before, dict) and isinstance(got, dict):
                whole[name] = self._joined(before, got, f"{place}.", leaves_out)
            elif before == got or (place in self.renewed and not leaves_out):
                whole[name] = got
            else:
                raise OtherSettings(
                    f"{place}: expected {before!r}, as the committed figures have, got {got!r}"
                )
        return whole


def case_of(row: Figures, names: Sequence[str]) -> tuple[Any, ...]:
    """The values that identify a row's case."""
    return tuple(row.get(name) for name in names)


def joined_rows(
    kept: Sequence[Figures], now: Sequence[Figures], names: Sequence[str]
) -> list[Figures]:
    """The rows of ``kept``, those of cases in ``now`` replaced; new cases come last."""
    fresh: dict[tuple[Any, ...], list[Figures]] = {}
    for row in now:
        fresh.setdefault(case_of(row, names), []).append(row)
    rows: dict[tuple[Any, ...], list[Figures]] = {}
    for row in kept:
        rows.setdefault(case_of(row, names), []).append(row)
    return [row for each in {**rows, **fresh}.values() for row in each]


def write_json(file: Path, figures: Figures) -> None:
    write_text(file, json.dumps(figures, indent=1) + "\n")


def pages() -> list[Path]:
    """The pages of tables: README.md, bench/RESULTS.md and bench/results/*.md."""
    return [README, RESULTS_PAGE, *sorted(RESULTS.glob("*.md"))]


def page_with(section: str) -> Path:
    """The page that has the marks of a section.

    Raises:
        ValueError: not exactly one page has them.
    """
    found = [page for page in pages() if f"<!-- {section} -->" in page.read_text()]
    if len(found) != 1:
        names = ", ".join(page.name for page in found) or "none"
        raise ValueError(f"<!-- {section} -->: expected one page with this mark, got {names}")
    return found[0]


def insert(page: Path, section: str, text: str) -> None:
    """Replace the text between the marks of a section in a Markdown file.

    Raises:
        ValueError: the file has no such marks.
    """
    begin, end = f"<!-- {section} -->", f"<!-- end of {section} -->"
    before, found_begin, rest = page.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{page}: expected {begin} and {end}")
    write_text(page, f"{before}{begin}\n{text}\n{end}{after}")
