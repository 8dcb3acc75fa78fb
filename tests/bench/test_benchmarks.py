"""Every benchmark can be imported and says how it is used; at night each runs at its smallest."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS
from bench.__main__ import main as run_benchmark
from bench.harness.places import README, RESULTS, RESULTS_PAGE, ROOT
from looped_models import write_looped
from tiny_models import write_byte_tokenizer

SHORT = "--rounds 1 --dry-run"
ONE = f"--batches 1 {SHORT}"
ANSWERS = "--prompts 1 --tokens 4 --dry-run"
ON_CPU = "--device cpu --json {folder}/rows.json"
SMALLEST = {
    "decode": "--quick",
    "gguf": f"{ONE} --threads 1 --tokens 4",
    "sizes": f"{ONE} --models LFM2-350M --weights int8 --threads 1 --tokens 4",
    "prefill": f"{SHORT} --threads 1 --prompt-tokens 16",
    "depth": f"{ONE} --models tiny --weights float32 --threads 1 --steps 2",
    "modes": f"{SHORT} --max-tokens 4",
    "checks": f"{ONE} --weights float32 --tokens 8",
    "drafts": f"{ANSWERS} --batches 1 --rounds 1 --weights int8",
    "auto": f"{ONE} --weights float32 --count 2",
    "replay": f"{ANSWERS} --batches 1 --weights int8 --kinds code",
    "intents": f"{SHORT} --data {{folder}} --count 2 --chunk 1 --skip-peers",
    "loops": f"{ONE} --model {{folder}}/looped --data {{folder}} --count 16 --shapes",
    "weights": "--dry-run --cache --tokens 64 --max-tokens 4",
    "same-text": "--count 2 --engines eecore --dry-run",
    "think": "--trajectories {folder}/thoughts.jsonl --splits 2 --dry-run",
    "transformers": f"{ONE} --count 2",
    "serve": "--quick --models intent",
    "soak-serve": "--minutes 0.1 --dry-run",
    "thoughts-served": "--servers eecore --dry-run",
    "attention": f"{SHORT} --queries 1 --prompts --bytes 1000000",
    "capabilities": f"{SHORT} --rows 1",
    "gpu": f"--tiny --rounds 1 --dtype float32 {ON_CPU}",
    "gpu-decode": f"--model tiny --batch 1 --rounds 1 --tokens 4 {ON_CPU}",
}
# Only tables, or what takes the installation of a peer or hundreds of megabytes.
NOT_RUN = {"tables", "ops-table", "overview", "peers", "vllm", "quality", "coder-files"}


def contents() -> dict[Path, bytes]:
    """All pages and figures."""
    return {path: path.read_bytes() for path in (README, RESULTS_PAGE, *RESULTS.iterdir())}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Data and models to measure; committed figures and pages must not change."""
    write_looped(tmp_path / "looped", vocab_size=260, eos_token_id=257)
    write_byte_tokenizer(tmp_path / "looped")
    record = json.dumps({"input": "light on", "target": "[on]"}) + "\n"
    (tmp_path / "test.jsonl").write_text(record * 16)
    probe = {"num_tokens": 48, "answer": "18", "confidence": 0.9}
    thought = {"id": "a", "full_tokens": 96, "full_answer": "18", "probes": [probe]}
    (tmp_path / "thoughts.jsonl").write_text(f"{json.dumps(thought)}\n" * 400)
    before = contents()
    yield tmp_path
    assert contents() == before


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name not in NOT_RUN])
def test_a_benchmark_runs(name: str, folder: Path) -> None:
    words = [word.format(folder=folder) for word in SMALLEST[name].split()]
    done = subprocess.run(
        [sys.executable, "-m", "bench", name, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_says_how_it_is_used(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert name in SMALLEST or name in NOT_RUN
    with pytest.raises(SystemExit) as ended:
        run_benchmark([name, "--help"])
    assert ended.value.code == 0
    assert f"python -m bench {name}" in capsys.readouterr().out


def test_the_microbenchmarks_can_be_imported() -> None:
    for path in sorted((ROOT / "bench" / "ops").glob("bench_*.py")):
        importlib.import_module(f"bench.ops.{path.stem}")


def test_the_plan_of_a_run_on_a_gpu_names_what_is_there() -> None:
    plan = subprocess.check_output([ROOT / "bench" / "gpu.sh", "--show"], text=True)
    steps = [line.split()[2] for line in plan.splitlines()]
    assert steps == ["build", "decode", "kernels", "ops", "decode", "decode"] + ["tests"] * 2 + [
        "memcheck"
    ]
    files = [word for word in plan.split() if word.startswith("tests/")]
    assert all((ROOT / file).exists() for file in files), files
