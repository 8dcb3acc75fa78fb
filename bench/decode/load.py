"""Memory and processor time from a process's start to a model's first token.

python -m bench load [--rounds 5]

Each round starts a process for each kind of weights, and one that imports torch alone, in turns;
another round, not counted, compiles the modules. Writes bench/results/load.json and the table in
bench/results/decoding.md, in about a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.places import ROOT
from bench.harness.results import Figures, Report
from bench.harness.rows import Row, table_of
from bench.harness.smollm2 import WEIGHTS, get_smollm2, smollm2_file

RUN = """
import json, sys, time
import torch
path, options = json.loads(sys.argv[1])
if path:
    import eecore
    model = eecore.load(path, device="cpu", **options)
    eecore.generate(model, [1, 2, 3], max_tokens=1)
seconds = time.process_time()
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([int(status["VmHWM"].split()[0]) / 1024, seconds]))
"""
TORCH = "torch alone"


def measured(given: tuple[str | None, Figures], scratch: str) -> tuple[float, float]:
    """MiB of memory at most, and seconds of processor time, in a process of its own."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": scratch}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", RUN, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, check=True, env=environment, cwd=ROOT)
    peak, seconds = json.loads(done.stdout)
    return peak, seconds


def markdown(result: Figures) -> str:
    alone = next(row for row in result["rows"] if row["name"] == TORCH)

    def more(field: str, form: str, row: Row) -> str:
        return "" if row is alone else format(row[field] - alone[field], form)

    columns = [
        ("weights", "{name}"),
        ("MiB", "{peak_mib:.0f}"),
        ("MiB beyond torch", lambda row: more("peak_mib", ".0f", row)),
        ("processor s", "{cpu_s:.2f}"),
        ("s beyond torch", lambda row: more("cpu_s", ".2f", row)),
    ]
    about = (
        "SmolLM2-135M-Instruct from a process's start to its first token, imports included: "
        f"resident memory at most, processor time the least of {result['rounds']} rounds; "
        f"{result['threads']} threads. {in_words(result)}. `python -m bench load`"
    )
    return f"{table_of(columns, result['rows'])}\n\n{about}"


REPORTS = (Report("load", {"load": markdown}, {"rows": ("name",)}),)


def main(words: Sequence[str]) -> None:
    arguments = parser("load", __doc__, rounds=5).parse_args(words)
    with smollm2_file() as file, tempfile.TemporaryDirectory() as scratch:
        directory = get_smollm2(Path(scratch) / "model", file)
        cases: dict[str, tuple[str | None, Figures]] = {TORCH: (None, {}), "Q4_1": (str(file), {})}
        cases |= {name: (str(directory), options) for name, options in WEIGHTS.items()}
        runs = [
            {name: measured(given, scratch) for name, given in cases.items()}
            for _ in range(arguments.rounds + 1)
        ][1:]
    rows = []
    for name in cases:
        peaks, seconds = zip(*(run[name] for run in runs), strict=True)
        rows.append({"name": name, "peak_mib": max(peaks), "cpu_s": min(seconds)})
        say(rows[-1])
    threads = torch.get_num_threads()
    result = {**machine(), "rounds": arguments.rounds, "threads": threads, "rows": rows}
    REPORTS[0].finish(result, arguments)
