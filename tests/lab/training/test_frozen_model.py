"""Exit classifiers learn from models as eecore runs them, in their own bits too."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open

import eecore
from eecore.cli.app import run
from eecore.cli.failures import MODEL
from eecore.errors import TrainingError
from eecore.lab.training import ExitModel, load_starting_point
from eecore.lab.training.frozen_model import RunningModel, load_running_model
from eecore.models import LlamaModel, load_model, model_digest
from quantised_models import Quantisation, write_quantised
from tiny_gguf import write_gguf
from tiny_models import write_model


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("frozen") / "model", num_hidden_layers=3)


@pytest.fixture
def quantised(request: pytest.FixtureRequest, original: Path, tmp_path: Path) -> Path:
    if request.param == "gguf":
        kind = gguf.GGMLQuantizationType.Q8_0
        return write_gguf(tmp_path / "model.gguf", original, quantization=kind)
    write_quantised(original, tmp_path / "model", Quantisation(request.param, 8))
    return tmp_path / "model"


def test_states_and_head_are_those_of_transformers(original: Path) -> None:
    config, network, tokenizer = load_model(original, "cpu", "float32")
    assert isinstance(network, LlamaModel)
    assert tokenizer is not None
    running = RunningModel(network, tokenizer, 257)
    other = ExitModel.of(load_starting_point(original).model)
    ids = torch.randint(config.vocab_size, (3, 11), generator=torch.Generator().manual_seed(0))
    ids[1, 7:] = 0  # padding
    with torch.no_grad(), other.frozen():
        states, expected = running.states({"input_ids": ids}), other.states({"input_ids": ids})
        assert len(states) == len(expected) == running.num_layers == other.num_layers
        for got, wanted in zip(states, expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
        heads = running.head(states[1].flatten(0, 1)), other.head(expected[1].flatten(0, 1))
        torch.testing.assert_close(*heads, atol=1e-3, rtol=1e-3)
    assert (running.hidden_size, running.device) == (other.hidden_size, other.device)
    with pytest.raises(TrainingError, match="expected at most the model's 512 tokens, got 513"):
        running.states({"input_ids": torch.zeros(1, 513, dtype=torch.long)})


@pytest.mark.parametrize("quantised", ["gguf", "gptq", "plain"], indirect=True)
def test_the_command_on_a_quantised_model(
    quantised: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "classifier.safetensors"
    pairs = [{"input": f"{n} and", "target": f" {n} more"} for n in range(8)]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    command = ["train-classifier", str(quantised), "--data", str(data), "--steps", "12"]
    assert run([*command, "--batch-size", "2", "--out", str(out), "--threads", "1"]) == 0
    assert "wrote" in capsys.readouterr().out
    with safe_open(str(out), "pt") as file:
        assert file.metadata() == {
            "format": "pt", "model_sha256": model_digest(quantised), "num_layers": "3"
        }  # fmt: skip
    classifier = eecore.ExitClassifier.load(out)
    policy = eecore.ConfidentExit(0.5, measure="classifier", classifier=classifier)
    outputs = eecore.generate(eecore.load(quantised), "3 and", exit=policy, max_tokens=4)
    assert outputs[0].error is None


@pytest.mark.parametrize("quantised", ["gguf", "gptq"], indirect=True)
def test_training_the_model_itself_needs_floats(
    quantised: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"input": "a", "target": "b"}) + "\n")
    command = ["train", str(quantised), "--data", str(data), "--out", str(tmp_path / "out")]
    assert run(command) == MODEL
    error = capsys.readouterr().err
    wanted = "convert it first" if quantised.suffix else "supported are weights in floats to train"
    assert wanted in error


def test_a_model_without_a_tokenizer(original: Path, tmp_path: Path) -> None:
    write_quantised(original, tmp_path / "model", Quantisation("gptq"))
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(TrainingError, match="expected a model with a tokenizer, got none"):
        load_running_model(tmp_path / "model")


@pytest.mark.parametrize("quantised", ["gguf", "gptq"], indirect=True)
def test_evaluations_take_quantised_models(
    quantised: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"input": "{n} a", "target": "b"}}\n' for n in range(3)))
    words = [str(quantised), "--data", str(data), "--max-tokens", "2", "--threads", "1"]
    rounds = ["--rounds", "1"]
    assert run(["evaluate", "layerskip", *words, *rounds, "--mode", "speculative:1,2"]) == 0
    assert "| SelfSpeculative(1, 2) |" in capsys.readouterr().out
    assert run(["evaluate", "calm", *words, *rounds, "--batch-size", "2", "--batch", "each"]) == 0
    assert run(["sweep", *words, *rounds, "--exit-layers", "1", "--num-drafts", "2"]) == 0
    calibrate = ["--delta", "0.9", "--grid", "1", "--out", str(tmp_path / "c.json")]
    assert run(["calibrate", *words, *calibrate]) == 0
    assert run(["exits", str(quantised), "3 a", "--max-tokens", "2", "--exit", "fixed:1"]) == 0
