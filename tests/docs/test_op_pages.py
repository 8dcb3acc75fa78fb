"""Every op has a page, whose example runs and whose figures are those on record."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import op_pages
from eecore import ops

PAGES = op_pages.PAGES


@cache
def measured() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(op_pages.RECORD.read_text())
    return record


def section(path: Path, name: str) -> str:
    """The text between the marks of a section."""
    text = path.read_text()
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    assert text.count(begin) == text.count(end) == 1, f"{path.name}: {name}"
    return text.partition(begin)[2].partition(end)[0]


def test_every_op_has_a_page_and_every_page_an_op() -> None:
    assert sorted(path.stem for path in PAGES.glob("*.md")) == sorted(["index", *ops.OP_NAMES])


@pytest.mark.parametrize("op", ops.OP_NAMES)
def test_a_page_has_its_parts(op: str) -> None:
    text = (PAGES / f"{op}.md").read_text()
    assert text.startswith(f"# {op}\n\n")
    assert "\n" not in op_pages.summary(op)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    parts = ["What it computes", "When to use it", "Contract", "Errors", "Example", "Figures"]
    assert headings == parts
    contract = text.partition("\n## Contract\n")[2].partition("\n## Errors\n")[0]
    assert f"\n<!-- eecore.ops.{op} -->\n" in contract


def test_every_export_has_its_contract_on_one_page() -> None:
    """Each export is on one page, so that links to it have one target."""
    named = [
        name
        for path in PAGES.glob("*.md")
        for name in re.findall(r"^<!-- eecore\.ops\.(\w+) -->$", path.read_text(), re.MULTILINE)
    ]
    constants = {"BLOCK_FORMATS", "CPU_ONLY_OPS", "FLOAT_BLOCK_FORMATS", "OP_NAMES"}
    assert sorted(named) == sorted(set(ops.__all__) - constants)


@pytest.mark.parametrize("op", ops.OP_NAMES)
def test_the_example_runs(op: str) -> None:
    path = PAGES / f"{op}.md"
    codes = re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    assert codes
    for code in codes:
        assert f"ops.{op}(" in code
        assert "assert" in code
        exec(compile(code, str(path), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("op", ops.OP_NAMES)
def test_the_figures_are_those_on_record(op: str) -> None:
    shown = section(PAGES / f"{op}.md", "figures")
    assert shown == op_pages.figures(measured(), op)
    times = [row["min"] for row in measured()["rows"] if op_pages.op_of(row["op"]) == op]
    assert times, f"{op} has not been measured"
    cells = re.findall(r"(?<=\| )[\d.]+(?= \|)", shown)
    for time in times:
        assert str(time) in cells


def test_every_case_on_record_is_on_one_page() -> None:
    lines = sum(section(PAGES / f"{op}.md", "figures").count("\n") - 3 for op in ops.OP_NAMES)
    cases = {
        (op, op_pages.peer_and_case(row, op)[1])
        for row in measured()["rows"]
        for op in [op_pages.op_of(row["op"])]
    }
    assert lines == len(cases)


def test_the_index_is_what_the_pages_say() -> None:
    assert section(PAGES / "index.md", "ops") == op_pages.index()
    assert section(PAGES / "index.md", "measured") == op_pages.about(measured())


def test_a_page_without_its_marks_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- figures -->\nold\n<!-- end of figures -->\n")
    op_pages.fill(page, "figures", "new")
    assert page.read_text() == "<!-- figures -->\nnew\n<!-- end of figures -->\n"
    with pytest.raises(ValueError, match="expected one section ops between marks, got 0"):
        op_pages.fill(page, "ops", "new")


def test_peers_stand_beside_each_other_and_cases_in_order() -> None:
    rates = {"GB/s": 2.5, "GFLOP/s": None, "of ceiling": 0.5}
    rows = [
        {"op": "kv_fill", "case": f"{peer}-{size}", "min": size / 2, "median": 9.0, **rates}
        for peer in ("torch", "eecore")
        for size in (64, 8)
    ]
    lines = op_pages.figures({"rows": rows}, "kv_fill").splitlines()
    assert lines[2] == "| case | eecore, µs | torch, µs | GB/s | of ceiling |"
    assert lines[4:] == ["| 8 | 4.0 | 4.0 | 2.5 | 0.5 |", "| 64 | 32.0 | 32.0 | 2.5 | 0.5 |"]
