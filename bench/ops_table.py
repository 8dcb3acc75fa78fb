"""The microbenchmarks, from pytest-benchmark's JSON: bench/results/ops.json, and what shows it.

python bench/ops_table.py build/bench.json     # a new record, then the table and the pages
python bench/ops_table.py                      # the table and the pages, from the record
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import op_pages
from eecore import ops
from harness import describe_ceilings, insert

RESULTS = Path(__file__).parent / "RESULTS.md"
RECORD = Path(__file__).parent / "results" / "ops.json"
RATES = ("GB/s", "GFLOP/s", "of ceiling")


def row(benchmark: dict[str, Any]) -> dict[str, Any]:
    """Which op and case, its times in microseconds, its rates where it has them."""
    name, _, case = benchmark["name"].removeprefix("bench_").partition("[")
    times = {time: round(benchmark["stats"][time] * 1e6, 1) for time in ("min", "median")}
    rates = {rate: benchmark["extra_info"].get(rate) for rate in RATES}
    return {"name": name, "case": case.removesuffix("]"), **times, **rates}


def record(results: dict[str, Any]) -> dict[str, Any]:
    """What was measured, and what on."""
    info = ops.build_info()
    cpu = results["machine_info"].get("cpu", {}).get("brand_raw", platform.processor())
    ceilings = describe_ceilings(results["machine_info"]["ceilings"])
    about = (
        f"{cpu}, {os.environ.get('OMP_NUM_THREADS', torch.get_num_threads())} thread(s), "
        f"{info['cpu_capability']} kernels, torch {torch.__version__}. {ceilings}. "
        "Times in microseconds; rates and shares by the fastest round; a share is of the read "
        "bandwidth (or, where it is larger, of the multiply-add rate) measured right after the "
        "case. Small cases are bound by the cost of a call; weights of 60 to 130 MB come from a "
        "large L3 in part, so shares of memory bandwidth can pass 1. `OMP_NUM_THREADS=1 make bench`"
    )
    return {"about": about, "rows": [row(benchmark) for benchmark in results["benchmarks"]]}


def table(measured: dict[str, Any]) -> str:
    """Markdown of a record."""
    head = "| op | case | min | median | GB/s | GFLOP/s | of ceiling |"
    cells = (["" if v is None else str(v) for v in row.values()] for row in measured["rows"])
    lines = sorted(f"| {' | '.join(row)} |" for row in cells)
    return "\n".join([measured["about"], "", head, "|---|---|---:|---:|---:|---:|---:|", *lines])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measured = record(json.loads(Path(sys.argv[1]).read_text()))
        RECORD.write_text(json.dumps(measured, indent=1) + "\n")
    measured = json.loads(RECORD.read_text())
    insert(RESULTS, "ops", table(measured))
    op_pages.write(measured)
