"""The state of a run as a file: a file that the run did not write is refused without effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eecore.errors import ModelError, TrainingError
from eecore.lab.training import TokenData, TrainingConfig, state_path, train
from eecore.lab.training.loading import load_starting_point
from eecore.lab.training.run_state import read_state
from tiny_models import write_byte_tokenizer, write_model

Tensors = dict[str, torch.Tensor]
STEPS = 3
NAME = "model.layers.1.mlp.up_proj.weight"


class Stopped(Exception):
    """An error that stands for the end of the process."""


def settings() -> TrainingConfig:
    return TrainingConfig(
        steps=6, batch_size=8, warmup_steps=1, checkpoint_steps=STEPS, checkpoint_seconds=None
    )


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, make_model: Any, pairs: TokenData) -> Path:
    """A run that has been left after some steps."""
    out = tmp_path_factory.mktemp("run") / "out"
    train(make_model(), pairs, settings(), out, should_stop=iter([False, False, True]).__next__)
    return out


def spoilt(
    out: Path,
    place: Path,
    tensors: Callable[[Tensors], object] = lambda _: None,
    metadata: Callable[[dict[str, str]], object] = lambda _: None,
) -> Path:
    """A copy of a run with other tensors or metadata in its state."""
    path = state_path(place)
    path.parent.mkdir(parents=True)
    for log in state_path(out).parent.glob("*.csv"):
        (path.parent / log.name).write_bytes(log.read_bytes())
    held = load_file(state_path(out))
    with safe_open(str(state_path(out)), "pt") as file:
        header = dict(file.metadata())
    tensors(held)
    metadata(header)
    save_file(held, path, header)
    return place


def resume_is_refused(model: Any, data: TokenData, out: Path, message: str) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(TrainingError, match=message) as caught:
        train(model, data, settings(), out, resume=True)
    assert str(out) in str(caught.value)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


STEP, AVERAGE, SQUARES = (f"optimizer.{part}.{NAME}" for part in ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({AVERAGE: torch.zeros(3)}, r"exp_avg\..*: expected F32 \[24, 16\], got F32 \[3\]"),
        ({AVERAGE: torch.zeros(16, 24)}, r"exp_avg\..*: expected F32 \[24, 16\], got F32 \[16, 24"),
        ({SQUARES: torch.zeros(24, 16, dtype=torch.bfloat16)}, "expected F32 .*, got BF16"),
        ({STEP: torch.tensor(4.0)}, r"step\..*: expected 1\.\.3, the run's steps, got 4"),
        ({STEP: torch.tensor(0.0)}, r"step\..*: expected 1\.\.3, the run's steps, got 0"),
        ({STEP: torch.tensor(1.5)}, r"step\..*: expected 1\.\.3, the run's steps, got 1.5"),
        ({STEP: torch.tensor(float("nan"))}, r"step\..*: expected 1\.\.3, .* got nan"),
        ({STEP: torch.zeros(2)}, r"step\..*: expected F32 \[\], got F32 \[2\]"),
        ({STEP: torch.tensor(3)}, r"step\..*: expected F32 \[\], got I64 \[\]"),
        ({STEP: None}, "expected step, exp_avg, exp_avg_sq, got exp_avg, exp_avg_sq"),
        ({AVERAGE: None, SQUARES: None}, "expected step, exp_avg, exp_avg_sq, got step"),
        ({f"parameter.{NAME}": None}, "expected the trained weights of this model, got others"),
        ({f"parameter.{NAME}": torch.zeros(24)}, r"parameter\..*: expected F32 \[24, 16\], got"),
        ({f"parameter.{NAME}": torch.zeros(24, 16).half()}, "expected F32 .*, got F16"),
        ({"optimizer.exp_avg.no": torch.zeros(1)}, "optimizer.exp_avg.no: expected no such tensor"),
        ({"more": torch.zeros(1)}, "more: expected no such tensor"),
        ({"random.cpu": None}, "random.cpu: expected the state of the random numbers, got none"),
        (
            {"random.cpu": torch.zeros(7, dtype=torch.uint8)},
            r"random.cpu: expected U8 \[\d+\], got",
        ),
        ({"random.cpu": torch.zeros(5056)}, r"random.cpu: expected U8 \[\d+\], got F32"),
        (
            {"random.cpu": torch.full((5056,), 255, dtype=torch.uint8)},
            "random.cpu: expected the state of a generator, got",
        ),
    ],
)
def test_tensors_that_the_run_has_not_left(
    change: dict[str, torch.Tensor | None],
    message: str,
    stopped: Path,
    make_model: Any,
    pairs: TokenData,
    tmp_path: Path,
) -> None:
    def spoil(tensors: Tensors) -> None:
        for name, value in change.items():
            tensors.pop(name, None)
            if value is not None:
                tensors[name] = value

    resume_is_refused(make_model(), pairs, spoilt(stopped, tmp_path / "out", spoil), message)


def test_an_optimizer_that_has_done_fewer_steps(
    stopped: Path, make_model: Any, pairs: TokenData, tmp_path: Path
) -> None:
    def spoil(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("optimizer.step")]:
            tensors[name] = torch.tensor(2.0)

    out = spoilt(stopped, tmp_path / "out", spoil)
    resume_is_refused(make_model(), pairs, out, "expected an optimizer that has done the run's 3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "step: expected an integer of 0..6, got -1"),
        ({"step": 7}, "step: expected an integer of 0..6, got 7"),
        ({"step": "3"}, "step: expected an integer of 0..6, got '3'"),
        ({"step": 2}, "expected 1..2, the run's steps, got 3"),
        ({"tokens": -1}, "tokens: expected an integer of at least 0"),
        ({"tokens": 1e3}, "tokens: expected an integer of at least 0"),
        ({"data_digest": None}, "data_digest: expected a string"),
        (
            {"more": 1},
            "expected the fields config, data_digest, processes, seconds, step, tokens, got",
        ),
        ({"config": []}, r"config: expected the settings of TrainingConfig, got \[\]"),
        ({"config": None}, "config: expected the settings of TrainingConfig, got None"),
        (
            {"config": {"steps": "x", "warmup_steps": 2}},
            "steps: expected a whole number, .*, got 'x'",
        ),
        ({"config": {"steps": 10**30}}, "steps: expected a whole number, .*, got 1000"),
        ({"config": {"steps": 6, "loss": {"kind": []}}}, r"loss: expected one of .*, got \[\]"),
        ({"config": {"steps": 6, "loss": {"kind": "last", "x": 1}}}, "LastLayerLoss"),
        ({"config": {"steps": 6, "layer_dropout": {"rate": 1}}}, "LayerDropout"),
        ({"config": {"steps": 6, "lora": {"rank": {}}}}, r"LoraSettings.rank: .*, got \{\}"),
        ({"config": {"steps": 6, "beta1": "0.9"}}, "beta1: expected 0 up to below 1, got '0.9'"),
        ({"config": {}}, "TrainingConfig"),
    ],
)
def test_metadata_that_the_run_has_not_left(
    change: dict[str, Any],
    message: str,
    stopped: Path,
    make_model: Any,
    pairs: TokenData,
    tmp_path: Path,
) -> None:
    def spoil(header: dict[str, str]) -> None:
        header["state"] = json.dumps({**json.loads(header["state"]), **change})

    out = spoilt(stopped, tmp_path / "out", metadata=spoil)
    resume_is_refused(make_model(), pairs, out, message)


@pytest.mark.parametrize("state", ["", "[]", "nul", "[" * 10**5, '{"step": 1}', "9" * 5000])
def test_metadata_that_is_no_state(state: str, stopped: Path, tmp_path: Path) -> None:
    out = spoilt(stopped, tmp_path / "out", metadata=lambda header: header.update(state=state))
    with pytest.raises(TrainingError, match=r"state\.safetensors: expected"):
        read_state(state_path(out))


def test_logs_that_the_run_has_not_left(
    stopped: Path, make_model: Any, pairs: TokenData, tmp_path: Path
) -> None:
    for number, content in enumerate((b"\xff\xfe", b'"' + b"x" * 200_000, b"step\n1\n")):
        out = spoilt(stopped, tmp_path / str(number))
        (state_path(out).parent / "steps.csv").write_bytes(content)
        with pytest.raises(TrainingError, match=r"steps\.csv: expected"):
            train(make_model(), pairs, settings(), out, resume=True)
    out = spoilt(stopped, tmp_path / "words")
    log = state_path(out).parent / "steps.csv"
    header, *_ = log.read_text().splitlines()
    log.write_text(f"{header}\nx{',1' * header.count(',')}\n")
    with pytest.raises(TrainingError, match=r"steps\.csv: step: expected a number, got 'x'"):
        train(make_model(), pairs, settings(), out, resume=True)


# Where a run starts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected an integer of 1"),
        ({"num_hidden_layers": 4096, "hidden_size": 2**20}, "GiB, the machine's memory, got"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: expected"),
        ({"initializer_range": "x"}, "expected a model, got: "),
        ({"num_labels": 10**9}, "num_labels: expected an integer of 0"),
        ({"hidden_act": "gelu"}, "hidden_act: supported are silu"),
    ],
)
def test_a_config_that_nothing_can_start_from(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text()) | changes
    alone = tmp_path / "alone.json"
    alone.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_starting_point(alone, tokenizer=directory)


def test_a_model_whose_weights_are_not_those_of_its_config(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight missing"):
        load_starting_point(directory)


def test_places_that_are_no_model(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    for path in (tmp_path, tmp_path / "nothing", tmp_path / ("a" * 300), tmp_path / "a\0b"):
        with pytest.raises(ModelError, match="expected a file, got"):
            load_starting_point(path)
