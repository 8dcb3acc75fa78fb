"""Exit classifiers learn from models as eecore runs them, in their own bits too."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from safetensors import safe_open

import eecore
from eecore.cli.app import run
from eecore.cli.failures import MODEL
from eecore.models import model_digest
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
