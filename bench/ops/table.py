"""The table of the ops' microbenchmarks, from pytest-benchmark's JSON.

python -m bench ops-table build/bench.json

``make bench`` runs it after the microbenchmarks. Writes bench/results/ops.json and the table in
bench/results/ops.md; cases that were not run keep their figures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness.ceilings import describe_ceilings
from bench.harness.command import parser
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.rows import Columns, table_of

RATES = ("GB/s", "GFLOP/s", "of ceiling")


def row_of(benchmark: dict[str, Any]) -> dict[str, Any]:
    """A row: op and case, times in microseconds, and the reported rates."""
    name, _, case = benchmark["name"].removeprefix("bench_").partition("[")
    times = {kind: round(benchmark["stats"][kind] * 1e6, 1) for kind in ("min", "median")}
    rates = {rate: benchmark["extra_info"].get(rate) for rate in RATES}
    return {"op": name, "case": case.removesuffix("]"), **times, **rates}


def figures_of(recorded: dict[str, Any]) -> Figures:
    """The figures of a run that pytest-benchmark recorded on this machine."""
    return {
        **machine(),
        "threads": int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())),
        "ceilings": recorded["machine_info"]["ceilings"],
        "rows": [row_of(benchmark) for benchmark in recorded["benchmarks"]],
    }


def markdown(result: Figures) -> str:
    """The table, with a sentence on the measurement and a line for each case."""
    about = (
        f"{result['threads']} thread(s), {in_words(result)}. "
        f"{describe_ceilings(result['ceilings'], result['threads'])}. "
        "Times in microseconds; rates and shares by the fastest round; a share is of the read "
        "bandwidth (or of the multiply-add rate, if that share is larger) measured right after the "
        "case. Small cases are bound by the cost of a call; a large L3 holds a part of weights of "
        "60 to 130 MB, so shares of memory bandwidth can exceed 1. `OMP_NUM_THREADS=1 make bench`"
    )
    columns: Columns = (
        ("op", "{op}"),
        ("case", "{case}"),
        ("min", "{min:.1f}"),
        ("median", "{median:.1f}"),
        *(
            (rate, lambda row, rate=rate: "" if row[rate] is None else str(row[rate]))
            for rate in RATES
        ),
    )
    rows = sorted(result["rows"], key=lambda row: (row["op"], row["case"]))
    return f"{about}\n\n{table_of(columns, rows, text_columns=2)}"


REPORTS = (Report("ops", {"ops": markdown}, {"rows": ("op", "case")}, ("ceilings",)),)


def main(words: Sequence[str]) -> None:
    made = parser("ops-table", __doc__)
    made.add_argument("recorded", type=Path, help="by --benchmark-json")
    arguments = made.parse_args(words)
    try:
        figures = figures_of(json.loads(arguments.recorded.read_text()))
    except (OSError, ValueError, KeyError) as error:
        made.error(f"{arguments.recorded}: expected a record of pytest-benchmark, got: {error!r}")
    REPORTS[0].finish(figures, arguments)
