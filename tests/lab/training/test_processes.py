"""Two processes on the CPU learn the same as one, and stop and resume together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eecore.errors import TrainingError
from eecore.lab.training import (
    CalmLoss,
    LayerDropout,
    LoraSettings,
    TrainingConfig,
    TrainingResult,
    state_path,
    train,
)
from eecore.lab.training.run_files import last_checkpoint
from tiny_models import write_model
from tiny_training import history, make_model, make_pairs

SIZE = 2
STEPS = 5
COMMON: dict[str, Any] = {
    # 40 pairs: the last batch of an epoch has four, fewer than there are pieces of a batch.
    "batch_size": 9,
    "learning_rate": 3e-3,
    "evaluate_steps": 4,
    "checkpoint_seconds": None,
    "layer_dropout": LayerDropout(0.7),
}
RUNS: dict[str, dict[str, Any]] = {
    "whole": {"accumulate": 3, "packing": 24},
    "checkpointing": {"gradient_checkpointing": True},
    "t5": {"loss": CalmLoss(), "relative_rate": True, "lora": LoraSettings(2)},
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(SIZE)]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


def run_of(name: str, out: Path, changes: dict[str, Any], **options: Any) -> TrainingResult:
    config = TrainingConfig(steps=STEPS, **{**COMMON, **RUNS[name], **changes})
    tied = {} if name == "t5" else {"tie_word_embeddings": True}
    model = make_model("t5" if name == "t5" else "llama", **tied)
    return train(model, make_pairs(), config, out, held_out=make_pairs(), **options)


def all_runs(folder: Path) -> None:
    """What each of two processes does."""
    torch.set_num_threads(1)
    for name in RUNS:
        assert run_of(name, folder / name, {}).finished
    asked: list[int] = []

    def third_time() -> bool:
        asked.append(1)
        return len(asked) == 3 and os.environ["RANK"] == "1"  # the second process alone

    out = folder / "stopped"
    if os.environ["RANK"] == "1":
        time.sleep(1)  # the first process has made the directory by now
    result = run_of("whole", out, {}, should_stop=third_time)
    assert (result.finished, result.step) == (False, 3)
    left = (state_path(out) / "run.json").read_bytes()
    result = run_of("whole", out, {}, resume=True)
    assert (result.finished, result.step) == (True, STEPS)
    (folder / "left.json").write_bytes(left)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that two processes have written."""
    folder = tmp_path_factory.mktemp("processes")
    paths = [str(Path(__file__).parents[2]), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, __file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_learn_what_one_learns(folder: Path, tmp_path: Path, name: str) -> None:
    assert run_of(name, tmp_path / "alone", {"accumulate": 1}).finished
    for evaluations in (False, True):
        logs = (
            history(path, evaluations=evaluations) for path in (folder / name, tmp_path / "alone")
        )
        for two, one in zip(*logs, strict=True):
            assert two == pytest.approx(one, rel=1e-4, abs=1e-6)
    saved = [load_file(path / "model.safetensors") for path in (folder / name, tmp_path / "alone")]
    assert saved[0].keys() == saved[1].keys()
    for key, tensor in saved[0].items():
        torch.testing.assert_close(tensor, saved[1][key], rtol=1e-3, atol=1e-4)
    configs = [(path / "config.json").read_bytes() for path in (folder / name, tmp_path / "alone")]
    assert configs[0] == configs[1]


def test_one_that_is_told_to_stop_stops_both_and_they_go_on(folder: Path) -> None:
    whole, stopped = folder / "whole", folder / "stopped"
    assert history(stopped) == history(whole)
    assert (stopped / "model.safetensors").read_bytes() == (
        whole / "model.safetensors"
    ).read_bytes()


def test_a_run_goes_on_with_as_many_processes(folder: Path, tmp_path: Path) -> None:
    place = state_path(tmp_path / "out")
    place.mkdir(parents=True)
    (place / "run.json").write_bytes((folder / "left.json").read_bytes())
    with pytest.raises(TrainingError, match="processes: expected 2, as the run began with, got 1"):
        run_of("whole", tmp_path / "out", {}, resume=True)


def test_what_several_processes_need_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TrainingError, match=r"accumulate: expected 1\.\.batch_size=9, got 10"):
        run_of("whole", tmp_path / "out", {"accumulate": 10})
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    message = "batch_size: expected 12 or more, for 4 processes and accumulate=3"
    with pytest.raises(TrainingError, match=message):
        run_of("whole", tmp_path / "out", {"accumulate": 3})
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_torchrun_trains_and_ctrl_c_of_one_process_ends_all(tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    model = write_model(tmp_path / "model", num_hidden_layers=3)
    lines = [{"input": f"{word}=", "target": word[::-1]} for word in ("ab", "cde", "fg", "hij")]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = [*TORCHRUN, "-m", "eecore"]
    command += ["train", str(model), "--data", str(tmp_path / "data.jsonl"), "--out", str(out)]
    command += ["--steps", "200", "--batch-size", "4", "--device", "cpu"]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as launcher:
        try:
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
            while "0/200" not in log.read_text():
                assert launcher.poll() is None, log.read_text()
                time.sleep(0.1)
            os.kill(int(children.read_text().split()[-1]), signal.SIGINT)
            assert launcher.wait(120) != 0
        finally:
            launcher.kill()
    assert log.read_text().count("\nschedule: cosine\n") == 1  # the first process alone speaks
    _, step = last_checkpoint(state_path(out))
    assert 1 <= step < 200
    assert f"interrupted after step {step} of 200" in log.read_text()
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {step} of 200" in done.stderr
    assert done.stdout == f"wrote {out}\n"
    assert (out / "model.safetensors").is_file()


if __name__ == "__main__":
    all_runs(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
