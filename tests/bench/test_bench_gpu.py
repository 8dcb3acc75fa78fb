"""The benchmarks of a GPU, on the CPU with tiny shapes, and what gpu.sh says. No time is judged."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from running import RunsBench

from bench.gpu import steps as gpu_steps
from bench.harness.places import ROOT
from eecore import ops


def run_on_cpu(
    run_bench: RunsBench, *words: object, folder: Path
) -> tuple[dict[str, Path], list[dict[str, Any]]]:
    """The files that it wrote, and its rows."""
    files = {name: folder / f"result.{name}" for name in ("json", "md")}
    where = ("--device", "cpu", "--json", files["json"], "--markdown", files["md"])
    done = run_bench(*words, *where)
    assert done.returncode == 0, done.stdout + done.stderr
    return files, json.loads(files["json"].read_text())["rows"]


def test_the_gpu_benchmark_runs_on_tiny_shapes_and_its_peers_agree(
    run_bench: RunsBench, tmp_path: Path
) -> None:
    files, rows = run_on_cpu(
        *(run_bench, "gpu", "--tiny", "--rounds", "1", "--dtype", "float32", "--dtype", "bfloat16"),
        folder=tmp_path,
    )
    assert {row["op"] for row in rows} == set(ops.OP_NAMES) - set(ops.CPU_ONLY_OPS)
    assert all(row["microseconds"] > 0 for row in rows)
    assert all("microseconds" in peer for row in rows for peer in row["peers"].values())

    steps = tmp_path / "steps.tsv"
    steps.write_text("build\tpassed\t12\t\ntests\tFAILED (1)\t34\t3 failed, 5 passed\n")
    gpu_steps.main(str(steps), str(files["json"]), str(files["md"]))
    assert json.loads(files["json"].read_text())["steps"][1]["outcome"] == "FAILED (1)"
    assert "| tests | FAILED (1) | 34 | 3 failed, 5 passed |" in files["md"].read_text()


def test_the_decoding_benchmark_of_a_gpu_runs_on_a_tiny_model(
    run_bench: RunsBench, tmp_path: Path
) -> None:
    files, rows = run_on_cpu(
        *(run_bench, "gpu-decode", "--model", "tiny", "--batch", "1", "2"),
        *("--tokens", "6", "--rounds", "1"),
        folder=tmp_path,
    )
    assert not [row["error"] for row in rows if "error" in row]
    # Of a peer it is the difference of two times, which a busy machine may turn around.
    peers = [row for row in rows if row["mode"].startswith("transformers")]
    assert all(row["tokens_per_s"] > 0 for row in rows if row not in peers)
    assert all(math.isfinite(row["tokens_per_s"]) for row in peers)
    depth = {row["mode"]: row["mean_exit_layer"] for row in rows if "mean_exit_layer" in row}
    assert depth["full"] == depth["a check that nobody passes"] == 8
    assert depth["fixed exit L/2"] == 4 < depth["confident exit L/2"] < 8  # a prompt is no exit
    modes = [row["mode"] for row in rows if row["batch"] == 2]
    assert "transformers generate" in modes
    assert "self-speculation L/4, d=8" in modes
    assert "| tiny | 1 | transformers assistant_early_exit |" in files["md"].read_text()


@pytest.mark.parametrize("what", ["body", "splits"])
def test_the_first_look_at_a_gpu_runs_on_the_cpu(run_bench: RunsBench, what: str) -> None:
    done = run_bench("gpu-first", what, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert " us" in done.stdout


def test_the_gpu_script_says_what_it_lacks(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        ["bash", ROOT / "bench" / "gpu.sh", tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert done.returncode == 2
    assert "expected a GPU that torch" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_gpu_script_knows_its_parts(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", ROOT / "bench" / "gpu.sh", tmp_path / "new", "tests", "tset"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    expected = "expected parts among first tests bench decode runtime memcheck racecheck, got tset"
    assert expected in done.stderr
    assert not (tmp_path / "new").exists()


def test_the_gpu_scripts_parts_share_their_table(tmp_path: Path) -> None:
    steps, result, table = (tmp_path / name for name in ("steps.tsv", "a.json", "a.md"))
    result.write_text('{"ops": 1}')
    table.write_text("# Times\n")
    for lines in ("build\tpassed\t9\t\ntests\tFAILED (1)\t3\t1 failed\n", "tests\tpassed\t4\t\n"):
        steps.write_text(lines)
        gpu_steps.main(str(steps), str(result), str(table))
    outcomes = {step["step"]: step["outcome"] for step in json.loads(result.read_text())["steps"]}
    assert outcomes == {"build": "passed", "tests": "passed"}
    assert table.read_text().count("| step |") == 1
    assert table.read_text().startswith("# Times\n\n| step |")
