"""The table of the microbenchmarks in bench/RESULTS.md, from pytest-benchmark's JSON.

python bench/ops_table.py build/bench.json
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from eecore import ops
from harness import describe_ceilings, insert

RESULTS = Path(__file__).parent / "RESULTS.md"


def row(benchmark: dict[str, Any]) -> str:
    """One line: which op and case, its times, its rates."""
    info = benchmark["extra_info"]
    times = (f"{benchmark['stats'][name] * 1e6:.1f}" for name in ("min", "median"))
    rates = (str(info.get(name, "")) for name in ("GB/s", "GFLOP/s", "of ceiling"))
    name, _, case = benchmark["name"].removeprefix("bench_").partition("[")
    return f"| {' | '.join([name, case.removesuffix(']'), *times, *rates])} |"


def table(results: dict[str, Any]) -> str:
    """Markdown, with what it was measured on."""
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
    head = "| op | case | min | median | GB/s | GFLOP/s | of ceiling |"
    lines = [row(benchmark) for benchmark in results["benchmarks"]]
    return "\n".join([about, "", head, "|---|---|---:|---:|---:|---:|---:|", *sorted(lines)])


if __name__ == "__main__":
    insert(RESULTS, "ops", table(json.loads(Path(sys.argv[1]).read_text())))
