"""What docs/ops shows of the benchmarks of the ops, and the table of ops that its pages fill.

bench/ops_table.py writes both.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from eecore import ops
from harness import insert

PAGES = Path(__file__).resolve().parents[1] / "docs" / "ops"
# Who a case is timed with stands before its name; the longer name first where one begins another.
PEERS = ("eecore", "sdpa-grouped", "sdpa", "single ops", "torch")


def op_of(name: str) -> str:
    """The op that a benchmark is of, whose name its own begins with."""
    return max((op for op in ops.OP_NAMES if name.startswith(op)), key=len)


def peer_and_case(row: dict[str, Any], op: str) -> tuple[str, str]:
    """Who was timed, and the case, alike for all who were timed in it."""
    peer = next((peer for peer in PEERS if row["case"].startswith(f"{peer}-")), None)
    case = row["case"] if peer is None else row["case"].removeprefix(f"{peer}-")
    kind = row["name"].removeprefix(op).strip("_").replace("_", " ")
    case = f"{kind}: {case}" if kind else case
    return peer or "eecore", case.replace("torch.", "")


def by_numbers(case: str) -> list[tuple[int, str]]:
    """A key to sort by: 8 comes before 64."""
    return [
        (int(part or -1), "") if i % 2 else (-1, part)
        for i, part in enumerate(re.split(r"(\d+)", case))
    ]


def figures(measured: dict[str, Any], op: str) -> str:
    """A table of an op's cases: times of all who were timed, rates of eecore's."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in measured["rows"]:
        if op_of(row["name"]) == op:
            peer, case = peer_and_case(row, op)
            cases.setdefault(case, {})[peer] = row
    timed = [peer for peer in PEERS if any(peer in rows for rows in cases.values())]
    rates = [
        rate
        for rate in ("GB/s", "GFLOP/s", "of ceiling")
        if any(rows["eecore"][rate] is not None for rows in cases.values())
    ]
    columns = ["case", *(f"{peer}, µs" for peer in timed), *rates]
    lines = [f"| {' | '.join(columns)} |", f"|---{'|---:' * (len(columns) - 1)}|"]
    for case in sorted(cases, key=by_numbers):
        rows = cases[case]
        cells = [rows[peer]["min"] if peer in rows else None for peer in timed]
        cells += [rows["eecore"][rate] for rate in rates]
        shown = ["" if cell is None else str(cell) for cell in cells]
        lines.append(f"| {' | '.join([case, *shown])} |")
    return "\n".join(["Of the fastest round; [how it was measured](index.md#figures).", "", *lines])


def summary(op: str) -> str:
    """The first paragraph of an op's page."""
    return (PAGES / f"{op}.md").read_text().split("\n\n", 2)[1]


def index() -> str:
    """The table of all ops."""
    lines = ["| op | what | CPU | CUDA |", "|---|---|---|---|"]
    for op in ops.OP_NAMES:
        cuda = "no" if op in ops.CPU_ONLY_OPS else "yes"
        lines.append(f"| [`{op}`]({op}.md) | {summary(op).removesuffix('.')} | yes | {cuda} |")
    return "\n".join(lines)


def write(measured: dict[str, Any]) -> None:
    """Bring the pages up to a record."""
    for op in ops.OP_NAMES:
        insert(PAGES / f"{op}.md", "figures", figures(measured, op))
    insert(PAGES / "index.md", "ops", index())
    insert(PAGES / "index.md", "measured", measured["about"])
