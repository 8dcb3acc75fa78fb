"""Two processes on the CPU learn the same as one, and stop and resume together."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed

from eecore.errors import TrainingError
from eecore.lab.training import (
    CalmLoss,
    LayerDropout,
    LoraSettings,
    TrainingConfig,
    TrainingResult,
    train,
)
from eecore.lab.training.harness import STATE_FILE
from eecore.lab.training.processes import launched
from eecore.lab.training.run_log import read_logs
from eecore.lab.training.run_state import read_state
from tiny_models import write_model
from tiny_training import make_model, make_pairs

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
    "sharded": {"shard": True, "accumulate": 3, "gradient_checkpointing": True},
    "t5": {"shard": True, "loss": CalmLoss(), "relative_rate": True, "lora": LoraSettings(2)},
}
ALONE = {"shard": False, "accumulate": 1}
"""Settings with which one process learns the same."""
STOPPED = ("whole", "sharded")


def run_of(name: str, out: Path, changes: dict[str, Any], **options: Any) -> TrainingResult:
    config = TrainingConfig(steps=STEPS, **{**COMMON, **RUNS[name], **changes})
    tied = {} if name == "t5" else {"tie_word_embeddings": True}
    model = make_model("t5" if name == "t5" else "llama", **tied)
    return train(model, make_pairs(), config, out, held_out=make_pairs(), **options)


def in_a_process(rank: int, folder: Path, main: Callable[[int, Path], None]) -> None:
    torch.set_num_threads(1)
    method = f"file://{folder}/meeting-point"
    distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=SIZE)
    try:
        main(rank, folder)
    finally:
        distributed.destroy_process_group()


def all_runs(rank: int, folder: Path) -> None:
    for name in RUNS:
        assert run_of(name, folder / name, {}).finished
    for name in STOPPED:
        out = folder / f"{name}, stopped"
        asked: list[int] = []

        def third_time(asked: list[int] = asked) -> bool:
            asked.append(rank)
            return asked == [1, 1, 1]  # the second process alone

        result = run_of(name, out, {}, should_stop=third_time)
        assert (result.finished, result.step) == (False, 3)
        assert read_state(out / "training" / STATE_FILE).processes == SIZE
    if rank == 0:
        left = folder / "left"
        left.mkdir()
        for name in STOPPED:
            state = folder / f"{name}, stopped" / "training" / STATE_FILE
            (left / name).write_bytes(state.read_bytes())
    for name in STOPPED:
        result = run_of(name, folder / f"{name}, stopped", {}, resume=True)
        assert (result.finished, result.step) == (True, STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that two processes have written, this one included."""
    folder = tmp_path_factory.mktemp("processes")
    other = multiprocessing.get_context("spawn").Process(
        target=in_a_process, args=(1, folder, all_runs)
    )
    other.start()
    try:
        in_a_process(0, folder, all_runs)
    finally:
        other.join(60)
    assert other.exitcode == 0
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_learn_what_one_learns(folder: Path, tmp_path: Path, name: str) -> None:
    assert run_of(name, tmp_path / "alone", ALONE).finished
    steps, evaluations = read_logs(folder / name / "training")
    for two, one in zip(
        (steps, evaluations), read_logs(tmp_path / "alone" / "training"), strict=True
    ):
        assert two.keys() == one.keys()
        for column, values in one.items():
            there = [value is not None for value in values]
            assert [value is not None for value in two[column]] == there
            expected = [value for value in values if value is not None]
            got = [value for value in two[column] if value is not None]
            assert got == pytest.approx(expected, rel=1e-4, abs=1e-6), column
    saved = [load_file(path / "model.safetensors") for path in (folder / name, tmp_path / "alone")]
    assert saved[0].keys() == saved[1].keys()
    for key, tensor in saved[0].items():
        torch.testing.assert_close(tensor, saved[1][key], rtol=1e-3, atol=1e-4)
    configs = [(path / "config.json").read_bytes() for path in (folder / name, tmp_path / "alone")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", STOPPED)
def test_one_that_is_told_to_stop_stops_both_and_they_go_on(folder: Path, name: str) -> None:
    whole, stopped = folder / name, folder / f"{name}, stopped"
    assert read_logs(stopped / "training") == read_logs(whole / "training")
    assert (stopped / "model.safetensors").read_bytes() == (
        whole / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("name", STOPPED)
def test_a_run_goes_on_with_as_many_processes(folder: Path, tmp_path: Path, name: str) -> None:
    state = tmp_path / "out" / "training" / STATE_FILE
    state.parent.mkdir(parents=True)
    state.write_bytes((folder / "left" / name).read_bytes())
    with pytest.raises(
        TrainingError,
        match=r"processes: expected 2, as the run began with, got 1|shard: expected several",
    ):
        run_of(name, tmp_path / "out", {}, resume=True)


def test_what_several_processes_need_is_said(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"shard: expected several processes \(torchrun\), got"):
        run_of("sharded", tmp_path / "out", {})
    with pytest.raises(TrainingError, match=r"accumulate: expected 1\.\.batch_size=9, got 10"):
        run_of("whole", tmp_path / "out", {"accumulate": 10})
    assert not (tmp_path / "out").exists()


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with (
        pytest.raises(TrainingError, match="processes: expected at most 2 here, one a GPU, got 4"),
        launched("cuda"),
    ):
        pass


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--shard",)])
def test_torchrun_trains_and_ctrl_c_of_one_process_ends_all(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    model = write_model(tmp_path / "model", num_hidden_layers=3)
    lines = [{"input": f"{word}=", "target": word[::-1]} for word in ("ab", "cde", "fg", "hij")]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(SIZE)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "eecore"]
    command += ["train", str(model), "--data", str(tmp_path / "data.jsonl"), "--out", str(out)]
    command += ["--steps", "200", "--batch-size", "4", "--device", "cpu", *options]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as launcher:
        try:
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
            while "step 1/200" not in log.read_text():
                assert launcher.poll() is None, log.read_text()
                time.sleep(0.1)
            os.kill(int(children.read_text().split()[-1]), signal.SIGINT)
            assert launcher.wait(120) != 0
        finally:
            launcher.kill()
    assert log.read_text().count("\nschedule: cosine\n") == 1  # the first process alone speaks
    step = read_state(out / "training" / STATE_FILE).step
    assert 1 <= step < 200
    assert f"interrupted after step {step} of 200" in log.read_text()
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {step} of 200" in done.stderr
    assert done.stdout == f"wrote {out}\n"
    assert (out / "model.safetensors").is_file()
