"""Every op has a page, whose example runs and whose figures are those on record."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import op_pages
import ops_table
from eecore import ops

PAGES = op_pages.PAGES


@cache
def measured() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(ops_table.RECORD.read_text())
    return record


def section(path: Path, name: str) -> str:
    """What stands between the marks of a section."""
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
    assert f"\n::: eecore.ops.{op}\n" in text


def test_every_export_has_its_contract_on_one_page() -> None:
    """Each on one page, or a link to it would not know where to go."""
    named = [
        name
        for path in PAGES.glob("*.md")
        for name in re.findall(r"^::: eecore\.ops\.(\w+)$", path.read_text(), re.MULTILINE)
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
    times = [row["min"] for row in measured()["rows"] if op_pages.op_of(row["name"]) == op]
    assert times, f"{op} has not been measured"
    cells = re.findall(r"(?<=\| )[\d.]+(?= \|)", shown)
    for time in times:
        assert str(time) in cells


def test_every_case_on_record_is_on_one_page() -> None:
    lines = sum(section(PAGES / f"{op}.md", "figures").count("\n") - 3 for op in ops.OP_NAMES)
    cases = {
        (op, op_pages.peer_and_case(row, op)[1])
        for row in measured()["rows"]
        for op in [op_pages.op_of(row["name"])]
    }
    assert lines == len(cases)


def test_the_table_of_results_is_that_of_the_record() -> None:
    assert section(ops_table.RESULTS, "ops") == ops_table.table(measured())


def test_the_index_is_what_the_pages_say() -> None:
    assert section(PAGES / "index.md", "ops") == op_pages.index()
    assert section(PAGES / "index.md", "measured") == measured()["about"]


def test_a_record_holds_what_pytest_benchmark_measured() -> None:
    stats, rates = {"min": 1.26e-5, "median": 2e-5}, {"GB/s": 3.25, "of ceiling": 0.5}
    benchmark = {"name": "bench_kv_fill[torch-4-8]", "stats": stats, "extra_info": rates}
    ceilings = dict.fromkeys(("dram_read", "l3_read", "float32_multiply", "bfloat16_multiply"), 2e9)
    results = {"machine_info": {"ceilings": ceilings}, "benchmarks": [benchmark]}
    record = ops_table.record(results)
    assert record["rows"] == [
        {
            "name": "kv_fill",
            "case": "torch-4-8",
            "min": 12.6,
            "median": 20.0,
            "GB/s": 3.25,
            "GFLOP/s": None,
            "of ceiling": 0.5,
        }
    ]
    assert "memory read 2.0 GB/s" in record["about"]
    assert ops_table.table(record).splitlines()[-1] == (
        "| kv_fill | torch-4-8 | 12.6 | 20.0 | 3.25 |  | 0.5 |"
    )
