"""Tables and the plot come from the committed figures, all of them, by one command."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from bench import tables
from bench.harness import results
from bench.harness.places import README, RESULTS, RESULTS_PAGE
from bench.serving.soak import faults

PLOT = "decode.svg"
# Figures that another report's table shows.
SHOWN_ELSEWHERE = {"soak"}


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of the pages, to which the command writes instead."""
    for page in results.pages():
        shutil.copy(page, tmp_path)
    copied = [tmp_path / page.name for page in results.pages()]
    monkeypatch.setattr(results, "pages", lambda: copied)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return tmp_path


def same_matplotlib(one: Path, other: Path) -> bool:
    version = re.compile(r"Matplotlib v[\d.]+")
    return version.findall(one.read_text()) == version.findall(other.read_text())


def test_the_committed_tables_are_those_of_the_committed_figures(copies: Path) -> None:
    pytest.importorskip("matplotlib")
    tables.main([])
    for page in (README, RESULTS_PAGE, *RESULTS.glob("*.md")):
        assert (copies / page.name).read_text() == page.read_text(), page.name
    if same_matplotlib(copies / PLOT, RESULTS / PLOT):
        assert (copies / PLOT).read_bytes() == (RESULTS / PLOT).read_bytes()


def test_all_figures_are_shown() -> None:
    shown = {report.name for report in tables.reports()}
    assert {file.stem for file in RESULTS.glob("*.json")} == shown | SHOWN_ELSEWHERE
    for page in RESULTS.glob("*.md"):
        assert f"(results/{page.name})" in RESULTS_PAGE.read_text(), page.name


def test_the_soak_that_is_shown_found_nothing() -> None:
    (report,) = (report for report in tables.reports() if report.name == "soak_serve")
    assert faults(report.read()) == []
