"""The figures of docs/ops, from the benchmarks of ops, and the table of ops, from its pages.

python scripts/op_pages.py         # from bench/results/ops.json
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from eecore import ops
from eecore.files import write_text
from eecore.lab.evaluation.tables import markdown_table

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "ops"
RECORD = ROOT / "bench" / "results" / "ops.json"
# A case begins with one of these names; a name precedes all names that it begins with.
PEERS = ("eecore", "sdpa-grouped", "sdpa", "single ops", "torch")
RATES = ("GB/s", "GFLOP/s", "of ceiling")


def op_of(name: str) -> str:
    """The op of a benchmark: the name of the benchmark begins with the name of its op."""
    return max((op for op in ops.OP_NAMES if name.startswith(op)), key=len)


def peer_and_case(row: dict[str, Any], op: str) -> tuple[str, str]:
    """(peer, case): eecore or the peer that was timed, and the case that all of them share."""
    peer = next((peer for peer in PEERS if row["case"].startswith(f"{peer}-")), None)
    case = row["case"] if peer is None else row["case"].removeprefix(f"{peer}-")
    kind = row["op"].removeprefix(op).strip("_").replace("_", " ")
    case = f"{kind}: {case}" if kind else case
    return peer or "eecore", case.replace("torch.", "")


def by_numbers(case: str) -> list[tuple[int, str]]:
    """A key to sort by: 8 comes before 64."""
    parts = re.findall(r"\d+|\D+", case)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def figures(measured: dict[str, Any], op: str) -> str:
    """A table of an op's cases: times of eecore and its peers, rates of eecore."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in measured["rows"]:
        if op_of(row["op"]) == op:
            peer, case = peer_and_case(row, op)
            cases.setdefault(case, {})[peer] = row
    timed = [peer for peer in PEERS if any(peer in rows for rows in cases.values())]
    rates = [
        rate for rate in RATES if any(r["eecore"].get(rate) is not None for r in cases.values())
    ]
    lines = []
    for case in sorted(cases, key=by_numbers):
        rows = cases[case]
        cells = [rows[peer]["min"] if peer in rows else None for peer in timed]
        cells += [rows["eecore"][rate] for rate in rates]
        lines.append([case, *("" if cell is None else str(cell) for cell in cells)])
    head = ["case", *(f"{peer}, µs" for peer in timed), *rates]
    table = markdown_table(head, lines, text_columns=1)
    return (
        "Times are those of the fastest round; [how they were measured](index.md#figures)."
        f"\n\n{table}"
    )


def about(measured: dict[str, Any]) -> str:
    """The machine that the figures of all pages were measured on."""
    ceilings = {name: rate / 1e9 for name, rate in measured["ceilings"].items()}
    return (
        f"{measured['cpu']}, {measured['threads']} thread(s), {measured['cpu_capability']} "
        f"kernels, torch {measured['torch']}. There memory is read at {ceilings['dram_read']:.1f} "
        f"GB/s and L3 at {ceilings['l3_read']:.1f}; multiply-adds are done at "
        f"{ceilings['float32_multiply']:.0f} GFLOP/s in float32 and at "
        f"{ceilings['bfloat16_multiply']:.0f} in bfloat16. A share of the ceiling refers "
        "to one of these rates, measured again after each case. Cases of a few microseconds are "
        "bound by the cost of a call from Python, which a tape or a graph does not pay."
    )


def summary(op: str) -> str:
    """The first paragraph of an op's page."""
    return (PAGES / f"{op}.md").read_text().split("\n\n", 2)[1]


def index() -> str:
    """The table of all ops."""
    lines = []
    for op in ops.OP_NAMES:
        cuda = "no" if op in ops.CPU_ONLY_OPS else "yes"
        lines.append([f"[`{op}`]({op}.md)", summary(op).removesuffix("."), "yes", cuda])
    return markdown_table(["op", "what", "CPU", "CUDA"], lines, text_columns=4)


def fill(page: Path, section: str, text: str) -> None:
    """Put a text between the marks of a section."""
    marks = re.compile(
        f"(?<=<!-- {re.escape(section)} -->\n).*?(?=<!-- end of {re.escape(section)} -->)",
        re.DOTALL,
    )
    filled, count = marks.subn(lambda _: f"{text}\n", page.read_text())
    if count != 1:
        raise ValueError(f"{page}: expected one section {section} between marks, got {count}")
    write_text(page, filled)


def main() -> None:
    measured = json.loads(RECORD.read_text())
    for op in ops.OP_NAMES:
        fill(PAGES / f"{op}.md", "figures", figures(measured, op))
    fill(PAGES / "index.md", "ops", index())
    fill(PAGES / "index.md", "measured", about(measured))


if __name__ == "__main__":
    main()
