"""Tables and the plot come from the committed figures, all of them, by one command."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from bench import overview, tables
from bench.calm import tables as calm_tables
from bench.harness import results
from bench.harness.places import README, RESULTS, RESULTS_PAGE
from bench.ops import table as ops_table
from bench.serving.tables import faults

PLOT = "decode.svg"
MACHINE = ("cpu", "cpu_capability", "torch")
# Figures that another report's table shows.
SHOWN_ELSEWHERE = {"soak"}


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of the pages, to which the command writes instead."""
    for page in (README, *results.pages()):
        shutil.copy(page, tmp_path)
    copied = [tmp_path / page.name for page in results.pages()]
    monkeypatch.setattr(results, "pages", lambda: copied)
    monkeypatch.setattr(tables, "README", tmp_path / README.name)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(calm_tables, "PAGES", tmp_path / "pages")
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
    pages = {path.name for path in (copies / "pages").iterdir()}
    names = [report.name for report in calm_tables.REPORTS]
    assert pages == {
        f"{name}{end}" for name in names for end in (".md", "-latency.svg", "-throughput.svg")
    }


def test_a_changed_figure_changes_its_table(copies: Path) -> None:
    report = next(report for report in tables.reports() if report.name == "auto")
    figures = report.read()
    figures["count"] += 1
    report.write_tables(figures)
    page = (copies / "drafts.md").read_text()
    assert f"on {figures['count']} held-out utterances" in page
    assert page != (RESULTS / "drafts.md").read_text()


def test_one_microbenchmark_changes_its_own_line(
    copies: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last step of ``make bench ARGS="-k accept_mask"``."""
    before = json.loads((RESULTS / "ops.json").read_text())
    shutil.copy(RESULTS / "ops.json", copies)
    monkeypatch.setattr(results, "RESULTS", copies)
    monkeypatch.setattr(ops_table, "machine", lambda: {name: before[name] for name in MACHINE})
    monkeypatch.setenv("OMP_NUM_THREADS", str(before["threads"]))
    stats = {"min": 123.4e-6, "median": 125e-6}
    timed = {"name": "bench_accept_mask[8]", "stats": stats, "extra_info": {}}
    recorded = copies / "bench.json"
    recorded.write_text(
        json.dumps({"benchmarks": [timed], "machine_info": {"ceilings": before["ceilings"]}})
    )
    ops_table.main([str(recorded)])
    rows = json.loads((copies / "ops.json").read_text())["rows"]
    changed = [now for now, old in zip(rows, before["rows"], strict=True) if now != old]
    assert [(row["op"], row["case"], row["min"]) for row in changed] == [
        ("accept_mask", "8", 123.4)
    ]
    lines = (copies / "ops.md").read_text().splitlines()
    old_lines = (RESULTS / "ops.md").read_text().splitlines()
    assert sum(now != old for now, old in zip(lines, old_lines, strict=True)) == 1
    capsys.readouterr()
    with pytest.raises(SystemExit):
        ops_table.main([str(copies / "missing.json")])
    assert "expected a record of pytest-benchmark" in capsys.readouterr().err


def test_all_figures_are_shown() -> None:
    shown = {report.name for report in tables.reports()}
    assert {file.stem for file in RESULTS.glob("*.json")} == shown | SHOWN_ELSEWHERE


def test_figures_and_the_plot_of_the_readme_alone_are_kept() -> None:
    others = {file.name for file in RESULTS.iterdir() if file.suffix not in (".json", ".md")}
    assert {name for name in others if not name.startswith("gpu-")} == {
        PLOT,
        "calm-synopsis-training.csv",
    }
    assert f"bench/results/{PLOT}" in README.read_text()
    assert "calm-synopsis-training.csv" in (RESULTS / "tasks.md").read_text()


def test_the_page_of_results_is_short_and_leads_to_all_others() -> None:
    text = RESULTS_PAGE.read_text()
    assert len(text.splitlines()) <= 150
    assert len(re.findall(r"(?m)^## .*\?$", text)) == len(re.findall(r"(?m)^## ", text)) == 5
    for page in RESULTS.glob("*.md"):
        assert f"(results/{page.name})" in text, page.name


def test_a_section_stands_in_one_page(copies: Path) -> None:
    with pytest.raises(ValueError, match="expected one page with this mark, got none"):
        results.page_with("nothing of this name")
    with (copies / "ops.md").open("a") as page:
        page.write("<!-- decode -->")
    with pytest.raises(ValueError, match=r"got RESULTS\.md, ops\.md"):
        results.page_with("decode")


def test_the_soak_that_is_shown_found_nothing() -> None:
    (report,) = (report for report in tables.reports() if report.name == "soak_serve")
    assert faults(report.read()) == []


def test_the_overview_is_short_and_says_where_it_was_measured() -> None:
    kept = {report.name: report.read() for report in tables.reports()}
    text = overview.markdown(kept)
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 6
    assert {len(row) for row in rows} == {6}
    assert kept["gguf"]["cpu"] in text
    file = overview.find(kept["gguf"]["rows"], file=overview.CHAT_FILE, threads=1, batch=8)
    assert file is not None
    (row,) = (row for row in rows if row[:2] == [f"| {overview.CHAT}", "8"])
    assert row[2] == f"{file['tokens_per_s']:.0f}"
    assert row[4:] == ["", f"{file['ratio']:.2f}x |"]


def test_what_was_not_measured_is_left_empty() -> None:
    line = overview.Line("it", 32, 1200.4, None, None, None)
    assert line.cells() == ["it", "32", "1200", "", "", ""]
