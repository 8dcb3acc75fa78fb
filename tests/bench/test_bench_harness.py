"""What benchmarks share: the command, turns, figures and marked tables."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as command
from bench.harness import peers, results
from bench.harness.command import parser
from bench.harness.places import ROOT
from bench.harness.processes import EngineError, Process
from bench.harness.results import Report, insert
from bench.harness.smollm2 import WEIGHTS
from bench.harness.turns import TimedCall, batches_of, median_ratio, rotated, take_turns
from bench.harness.utterances import utterances
from bench.tables import reports


def test_each_name_says_in_a_line_what_it_is() -> None:
    lines = command.listing().splitlines()[2:]
    assert len(lines) == len(command.BENCHMARKS)
    for line, name in zip(lines, command.BENCHMARKS, strict=True):
        assert line.split(maxsplit=1)[0] == name
        assert line.endswith((".", ":"))
    assert len(set(command.BENCHMARKS.values())) == len(lines)


def test_the_list_imports_no_benchmark() -> None:
    program = (
        "import sys; from bench.__main__ import main; main(['--help']); "
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "python -m bench NAME" in done.stdout
    assert not {"torch", "eecore", "numpy"} & set(done.stderr.split())


def test_an_unknown_name_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["bench_auto"]) == 2
    assert "expected one of tables, " in capsys.readouterr().err


def test_words_go_to_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(["auto", "--help"])
    assert stopped.value.code == 0
    assert "usage: python -m bench auto" in capsys.readouterr().out


def test_options_that_a_benchmark_does_not_have_are_refused() -> None:
    made = parser("it", "About it.", rounds=3)
    assert made.parse_args([]).rounds == 3
    with pytest.raises(SystemExit):
        made.parse_args(["--threads", "2"])


# Turns


def test_each_name_has_a_turn_in_each_round_after_a_warm_up() -> None:
    took: list[str] = []

    def turn_of(name: str) -> Any:
        return lambda: (took.append(name), TimedCall(float(len(took)), name))[1]

    turns = take_turns({name: turn_of(name) for name in "ab"}, 2)
    assert took == list("ababab")
    assert [turn.seconds for turn in turns["a"]] == [3.0, 5.0]


def test_ratios_are_taken_within_a_round() -> None:
    assert median_ratio([1.0, 2.0, 4.0], [2.0, 2.0, 40.0]) == 2.0


def test_orders_and_groups() -> None:
    assert [rotated("abc", number) for number in (0, 1, 5)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
    ]
    assert batches_of([1, 2, 3], 2) == [[1, 2], [3]]


# Figures and tables


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    (tmp_path / "RESULTS.md").write_text("a\n<!-- it -->\nold\n<!-- end of it -->\nb\n")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "pages", lambda: [tmp_path / "RESULTS.md"])
    return Report("its", {"it": lambda figures: f"| {figures['x']} |"})


def test_figures_and_their_table_are_kept(report: Report, tmp_path: Path) -> None:
    report.finish({"x": 3}, Namespace(json=None, dry_run=False))
    assert report.read() == {"x": 3}
    page = (tmp_path / "RESULTS.md").read_text()
    assert page == "a\n<!-- it -->\n| 3 |\n<!-- end of it -->\nb\n"


@pytest.mark.parametrize("dry_run", [False, True])
def test_figures_for_another_file_change_no_table(
    report: Report, tmp_path: Path, dry_run: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    report.finish({"x": 3}, Namespace(json=tmp_path / "other.json", dry_run=dry_run))
    assert json.loads((tmp_path / "other.json").read_text()) == {"x": 3}
    assert not report.file.exists()
    assert "old" in (tmp_path / "RESULTS.md").read_text()
    assert capsys.readouterr().out == "| 3 |\n"


def test_a_dry_run_writes_nothing(report: Report, tmp_path: Path) -> None:
    report.finish({"x": 3}, Namespace(json=None, dry_run=True))
    assert [path.name for path in tmp_path.iterdir()] == ["RESULTS.md"]


CASES = [{"op": op, "case": str(n), "min": float(n)} for op in ("a", "b") for n in (1, 2)]
SAME = {"cpu": "A", "versions": {"x": "1", "y": "2"}, "speed": 3.0, "rows": CASES}
KEEPING = Namespace(json=None, dry_run=False, replace=False)
REPLACING = Namespace(json=None, dry_run=False, replace=True)


@pytest.fixture
def cases(report: Report) -> Report:
    """A benchmark with the figures of several cases, all of which are kept."""
    made = Report(
        report.name,
        {"it": lambda figures: f"| {[row['min'] for row in figures['rows']]} |"},
        cases={"rows": ("op", "case")},
        measured=("speed",),
        renewed=("commit",),
    )
    made.finish(SAME, REPLACING)
    return made


def test_a_run_of_some_cases_changes_those_alone(cases: Report, tmp_path: Path) -> None:
    fresh = [{"op": "b", "case": "1", "min": 7.0}, {"op": "c", "case": "1", "min": 8.0}]
    cases.finish({"cpu": "A", "versions": {"x": "1"}, "speed": 4.0, "rows": fresh}, KEEPING)
    kept = cases.read()
    assert [row["min"] for row in kept["rows"]] == [1.0, 2.0, 7.0, 2.0, 8.0]
    assert kept["versions"] == {"x": "1", "y": "2"}
    assert kept["speed"] == 3.0  # of most of the cases
    assert "| [1.0, 2.0, 7.0, 2.0, 8.0] |" in (tmp_path / "RESULTS.md").read_text()
    cases.finish({"cpu": "A", "versions": None, "speed": None, "rows": []}, KEEPING)
    assert cases.read() == kept
    rows = [{**row, "min": 9.0} for row in kept["rows"]]
    cases.finish({**SAME, "speed": 5.0, "rows": rows}, KEEPING)
    assert cases.read()["speed"] == 5.0
    assert {row["min"] for row in cases.read()["rows"]} == {9.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cpu": "B"}, "cpu: expected 'A', as the committed figures have, got 'B'"),
        ({"versions": {"x": "3"}}, "versions.x: expected '1', .* got '3'"),
        ({"by_batch": True}, "by_batch: expected None, .* got True"),
        ({"commit": "f", "rows": CASES[:1]}, "commit: expected None, .* got 'f'"),
    ],
)
def test_other_settings_change_nothing_unless_it_is_said(
    cases: Report,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(results, "PAGES", tmp_path / "build")
    page = (tmp_path / "RESULTS.md").read_text()
    cases.finish({**SAME, **change}, KEEPING)
    assert cases.read() == SAME
    assert (tmp_path / "RESULTS.md").read_text() == page
    assert json.loads((tmp_path / "build" / "its.json").read_text()) == {**SAME, **change}
    assert re.search(message, capsys.readouterr().err)
    cases.finish({**SAME, **change}, REPLACING)
    assert cases.read() == {**SAME, **change}


def test_all_cases_of_another_commit_replace_those_before(cases: Report) -> None:
    cases.finish({**SAME, "commit": "f"}, KEEPING)
    assert cases.read()["commit"] == "f"


COMMITTED = list(reports())


def rows_at(figures: Any, path: str) -> list[Any]:
    """The rows of a list of cases; empty if a run left them out."""
    for part in path.split("."):
        figures = (figures or {}).get(part)
    return figures or []


@pytest.mark.parametrize("report", COMMITTED, ids=lambda report: report.name)
def test_every_committed_case_is_told_apart(report: Report) -> None:
    figures = report.read()
    assert report.kept_with(figures, report.file) == figures
    for path, names in report.cases.items():
        rows = rows_at(figures, path)
        assert all(name in row for row in rows for name in names)
        is_each_once = len({results.case_of(row, names) for row in rows}) == len(rows)
        assert is_each_once or path == "ceilings"  # a row a round


@pytest.mark.parametrize("report", COMMITTED, ids=lambda report: report.name)
def test_a_run_of_the_first_cases_wipes_no_others(report: Report) -> None:
    figures = report.read()
    for path in report.cases:
        del rows_at(figures, path)[1:]
    assert report.cases or report.measured or report.name == "fuzz"
    whole = report.kept_with(figures, report.file)
    for path in set(report.cases) - {"ceilings"}:  # these have several rows per case
        assert rows_at(whole, path)[1:] == rows_at(report.read(), path)[1:]


def test_a_page_without_the_marks_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- it -->\n")
    with pytest.raises(ValueError, match="expected <!-- it --> and <!-- end of it -->"):
        insert(page, "it", "text")
    assert page.read_text() == "<!-- it -->\n"


# Others


def test_kinds_of_weights_are_named_alike_everywhere() -> None:
    assert list(WEIGHTS) == ["float32", "bfloat16", "int8", "int4"]


def test_more_utterances_than_there_are_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text('{"input": "a"}\n{"input": "b"}\n')
    assert utterances(1, tmp_path) == [{"input": "a"}]
    with pytest.raises(SystemExit, match=r"--count: expected at most 2 .* got 3"):
        utterances(3, tmp_path)


def test_utterances_that_cannot_be_made_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.harness.utterances.ROOT", tmp_path)  # a folder without the script
    with pytest.raises(SystemExit, match=r"expected a file, got nothing; .*'\.\[intents\]'"):
        utterances(1, tmp_path)


def test_a_process_that_ends_says_why() -> None:
    process = Process([sys.executable, "-c", "raise SystemExit('out of luck')"], 1)
    with pytest.raises(EngineError, match="out of luck"):
        process.answer(60)


def test_a_process_finds_this_checkout_and_what_it_is_given(tmp_path: Path) -> None:
    program = "import json, sys, bench; print(json.dumps({'path': sys.path}))"
    process = Process([sys.executable, "-c", program], 1, [tmp_path])
    try:
        assert process.answer(60)["path"][1:3] == [str(tmp_path), str(ROOT)]
    finally:
        process.close()


def test_a_peer_that_cannot_be_had_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        command = [sys.executable, "-c", "raise SystemExit('ERROR: no such package')"]
        peers.run("a step", command)

    monkeypatch.setattr(peers, "DIRECTORY", tmp_path)
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    getters = {"gone": ("gone==1", fail), "there": ("there==1", lambda: None)}
    monkeypatch.setattr(peers, "GETTERS", getters)
    made = peers.prepare()
    assert not made["gone"].available
    assert "ERROR: no such package" in made["gone"].reason
    assert made["there"].available
    assert peers.known() == made
