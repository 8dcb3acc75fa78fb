"""The benchmarks of a GPU, on the CPU with tiny shapes, and what gpu.sh says. No time is judged."""

from __future__ import annotations

import itertools
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

from bench.gpu import decode as gpu_decode
from bench.gpu import kept, peers
from bench.gpu import run as gpu_run
from bench.gpu import steps as gpu_steps
from bench.harness.places import RESULTS, ROOT
from eecore import ops


def run_on_cpu(
    run_bench: RunsBench, *words: object, folder: Path
) -> tuple[str, list[dict[str, Any]]]:
    """The output of a benchmark, and its rows."""
    file = folder / "result.json"
    done = run_bench(*words, "--device", "cpu", "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(file.read_text())["rows"]


def test_the_gpu_benchmark_runs_on_tiny_shapes_and_its_peers_agree(
    run_bench: RunsBench, tmp_path: Path
) -> None:
    _, rows = run_on_cpu(
        *(run_bench, "gpu", "--tiny", "--rounds", "1", "--dtype", "float32", "--dtype", "bfloat16"),
        folder=tmp_path,
    )
    assert {row["op"] for row in rows} == set(ops.OP_NAMES) - set(ops.CPU_ONLY_OPS)
    assert all(row["microseconds"] > 0 for row in rows)
    assert all("microseconds" in peer for row in rows for peer in row["peers"].values())


def test_the_decoding_benchmark_of_a_gpu_runs_on_a_tiny_model(
    run_bench: RunsBench, tmp_path: Path
) -> None:
    text, rows = run_on_cpu(
        *(run_bench, "gpu-decode", "--model", "tiny", "--batch", "1", "2"),
        *("--tokens", "6", "--rounds", "1"),
        folder=tmp_path,
    )
    assert not [row["error"] for row in rows if "error" in row]
    # A peer's time is the difference of two times, which a busy machine may make negative.
    peers = [row for row in rows if row["mode"].startswith("transformers")]
    prompts = [row for row in rows if row["mode"].startswith("first token")]
    assert [row["seconds_to_first_token"] > 0 for row in prompts] == [True] * 3
    own = [row for row in rows if row not in peers and row not in prompts]
    assert all(row["tokens_per_s"] > 0 for row in own)
    assert all(row["gpu_seconds"] > 0 and row["launch_seconds"] > 0 for row in own)
    assert all(row["limit"] in ("GPU", "host") for row in own if "seconds_per_iteration" in row)
    assert all(math.isfinite(row["tokens_per_s"]) for row in peers)
    depth = {row["mode"]: row["mean_exit_layer"] for row in rows if "mean_exit_layer" in row}
    assert depth["full"] == depth["a check that no row passes"] == 8
    assert depth["fixed exit L/2"] == 4 < depth["confident exit L/2"] < 8  # a prompt is no exit
    modes = [row["mode"] for row in rows if row["batch"] == 2]
    assert "transformers generate" in modes
    assert "self-speculation L/4, d=8" in modes
    assert "| tiny | 1 | transformers assistant_early_exit |" in text


def test_kernels_of_a_step_are_read(run_bench: RunsBench, tmp_path: Path) -> None:
    text, rows = run_on_cpu(
        *(run_bench, "gpu-kernels", "--model", "tiny", "--batch", "1", "--tokens", "6"),
        folder=tmp_path,
    )
    assert [row["mode"] for row in rows] == ["full", "a check that no row passes"]
    assert not [row for row in rows if "error" in row]
    assert "| model | batch | mode | kernel |" in text


def test_the_host_or_the_gpu_is_the_limit() -> None:
    times = {"seconds_per_iteration": 1e-3}
    assert gpu_decode.limit_of(times | {"gpu_seconds": 0.95e-3})["limit"] == "GPU"
    assert gpu_decode.limit_of(times | {"gpu_seconds": 0.4e-3}) == {"of_wall": 0.4, "limit": "host"}
    assert gpu_decode.limit_of(times) == gpu_decode.limit_of({"gpu_seconds": 1e-3}) == {}
    said = gpu_decode.note(times | {"gpu_seconds": 0.4e-3, "of_wall": 0.4, "limit": "host"})
    assert said == "the host is the limit, the GPU at work 40% of the time"


def test_a_benchmark_goes_on_where_it_was_cut_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each row is in the file before the next begins; only the remaining rows are run again."""
    file, done = tmp_path / "rows.json", []

    def measured(work: peers.Work, *_: Any) -> dict[str, Any]:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(work.case)
        case = {name: getattr(work, name) for name in peers.NAMES}
        return case | ({"error": "broken"} if len(done) == 2 else {"microseconds": 1.0})

    monkeypatch.setattr(peers, "measured", measured)
    words = ["--device", "cpu", "--model", "tiny", "--only", "products", "--json", str(file)]
    with pytest.raises(KeyboardInterrupt):
        peers.main(words)
    first = [row["case"] for row in json.loads(file.read_text())["rows"]]
    assert first == done
    assert len(first) == 3
    done.clear()
    monkeypatch.setattr(
        peers,
        "measured",
        lambda work, *_: (
            done.append(work.case) or {name: getattr(work, name) for name in peers.NAMES}
        ),
    )
    assert peers.main([*words, "--seconds", "0"]) == kept.UNFINISHED
    figures = json.loads(file.read_text())
    assert len(figures["rows"]) == 2  # one had failed
    assert len(figures["not_run"]) == 3
    assert peers.main(words) == 0
    assert len(json.loads(file.read_text())["rows"]) == 5
    assert first[1] in done  # what failed is tried again
    assert not {first[0], first[2]} & set(done)
    done.clear()
    monkeypatch.setenv("EECORE_COMMIT", "another")
    assert peers.main(words) == 0
    assert len(done) == 5
    capsys.readouterr()


def test_the_gpu_script_says_what_it_lacks(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = gpu_script(tmp_path / "new")
    assert done.returncode == 1
    assert "expected a GPU that torch" in done.stderr
    assert not (tmp_path / "new").exists()


def test_the_gpu_script_knows_its_parts(tmp_path: Path) -> None:
    done = gpu_script(tmp_path / "new", "tests", "tset")
    assert done.returncode == 2
    assert "expected parts among peers build decode kernels ops tests memcheck" in done.stderr
    assert not (tmp_path / "new").exists()


def gpu_script(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "bench" / "gpu.sh"), *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )


def test_the_plan_is_nine_minutes_of_what_tells_most(tmp_path: Path) -> None:
    """Where the modules have been built before."""
    every = gpu_run.plan(tmp_path, "a-gpu", "90-real")
    usual = gpu_run.chosen(every, [])
    assert sum(step.seconds for step in usual if step.part != "build") <= gpu_run.SECONDS == 540
    assert [step.part for step in usual][:3] == ["peers", "build", "decode"]
    assert {step.part for step in every} - {step.part for step in usual} == {*gpu_run.BY_NAME_ALONE}
    assert [step.part for step in gpu_run.chosen(every, ["ops"])] == ["build", "ops"]
    for step in every:
        limit = [int(b) for a, b in itertools.pairwise(step.words) if a == "--seconds"]
        assert all(seconds < step.seconds for seconds in limit), step.name
        for word in step.words:
            assert not word.startswith("tests/") or (ROOT / word).exists(), word


def test_a_second_call_runs_what_the_first_did_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(name: str, code: str, seconds: int = 60) -> gpu_run.Step:
        return gpu_run.Step(name, name, seconds, (sys.executable, "-c", code))

    steps = [
        said("good", "print('3 passed in 1s')"),
        said("bad", "raise SystemExit('it broke')"),
        said("unfinished", f"raise SystemExit({kept.UNFINISHED})"),
        said("endless", "import time; print('begun', flush=True); time.sleep(600)", 2),
        said("missing", ""),
    ]
    steps[-1] = gpu_run.Step("missing", "missing", 60, (str(tmp_path / "none"),))
    file, log = tmp_path / "steps.json", tmp_path / "log"
    record = gpu_run.Record(file, "a GPU", "a commit")
    assert not gpu_run.run_all(steps, record, log, 300)
    assert "it broke" in capsys.readouterr().err
    outcomes = {step["step"]: step["outcome"] for step in json.loads(file.read_text())["steps"]}
    assert outcomes == {
        "good": "passed",
        "bad": "FAILED (1)",
        "unfinished": "no time was left for all of it",
        "endless": "not finished in 2 s",
        "missing": "FAILED (No such file or directory)",
    }
    assert "begun" in log.read_text()

    ran = []
    monkeypatch.setattr(
        gpu_run, "run_step", lambda step, *_: (ran.append(step.name) or "passed", "")
    )
    again = gpu_run.Record(file, "a GPU", "a commit")
    assert gpu_run.run_all(steps, again, log, 300)
    assert ran == ["bad", "unfinished", "endless", "missing"]
    assert gpu_run.run_all(steps, again, log, 300)
    assert len(ran) == 4
    other = gpu_run.Record(file, "a GPU", "another commit")
    assert gpu_run.run_all(steps, other, log, 1)  # no time is left for anything
    assert len(ran) == 4
    assert gpu_run.run_all(steps, other, log, 300)
    assert len(ran) == 9


def test_a_build_that_fails_ends_the_run(tmp_path: Path) -> None:
    words = (sys.executable, "-c", "raise SystemExit(1)")
    steps = [gpu_run.Step("build", "build", 60, words), gpu_run.Step("ops", "ops", 60, words)]
    record = gpu_run.Record(tmp_path / "steps.json", "a GPU", "a commit")
    with pytest.raises(SystemExit, match=r"the build FAILED \(1\)"):
        gpu_run.run_all(steps, record, tmp_path / "log", 300)
    assert [*record.steps] == ["build"]


def test_all_tables_of_a_run_stand_on_one_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for suffix in ("", "-decode"):
        name = f"gpu-nvidia-h100-80gb-hbm3{suffix}.json"
        (tmp_path / f"gpu-it{suffix}.json").write_bytes((RESULTS / name).read_bytes())
    record = gpu_run.Record(tmp_path / "gpu-it-steps.json", "it", "a commit")
    record.add(gpu_run.Step("ops", "ops", 9, ()), "passed", 8.0, "3 passed")
    gpu_steps.main(str(tmp_path), "it")
    page = (tmp_path / "gpu-it.md").read_text()
    assert page.startswith("| step | outcome | s | |")
    assert "| ops | passed | 8 | 3 passed |" in page
    assert "| op | case | dtype |" in page
    assert "| model | batch | mode | way |" in page
    assert capsys.readouterr().out.strip() == page.strip()
