"""The model that ships with eecore: present, whole, and as good as its card says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import eecore
from eecore.cli.app import run
from eecore.errors import ModelNotFoundError
from eecore.files import builtin
from eecore.models import model_digest
from make_data import Sizes, make_data

MEASURES = ("softmax", "state", "classifier")
SAID = "turn the kitchen lights down to 20 percent"
MEANT = "[HassLightSet [area kitchen] [brightness 20] [domain light]]"


@pytest.fixture(scope="module")
def intent() -> eecore.Model:
    return eecore.load(dtype="float32", kv_cache_tokens=8192)


def calibrated(measure: str) -> eecore.ConfidentExit:
    directory = eecore.default_model()
    classifier = None
    if measure == "classifier":
        classifier = eecore.ExitClassifier.load(directory / "measures" / "classifier.safetensors")
    return eecore.ConfidentExit.calibrated(directory / f"calibration-{measure}.json", classifier)


def test_it_is_small_and_has_a_card() -> None:
    directory = eecore.default_model()
    assert sum(path.stat().st_size for path in directory.rglob("*.*")) < 20e6
    card = (directory / "README.md").read_text()
    for part in ("license: apache-2.0", "## Data", "## Recipe", "## Scores"):
        assert part in card
    about = json.loads((directory / "exits.json").read_text())
    assert about["model_sha256"] == model_digest(directory)
    # Other engines take every one here for weights.
    assert [path.name for path in directory.glob("*.safetensors")] == ["model.safetensors"]
    assert about["num_layers"] == 12


@pytest.mark.parametrize("asked", [None, "intent"])
def test_it_is_the_default(
    asked: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = eecore.load(asked, kv_cache_tokens=256)
    assert eecore.generate(model, SAID)[0].text == MEANT
    (tmp_path / "intent").mkdir()  # a directory of that name comes first
    if asked:
        with pytest.raises(eecore.ModelError, match=r"config\.json"):
            eecore.load(asked)


def test_every_lossless_mode_parses(intent: eecore.Model) -> None:
    for policy in (eecore.Full(), eecore.SelfSpeculative(3, 6), eecore.SelfSpeculative(2, 4)):
        assert eecore.generate(intent, SAID, exit=policy)[0].text == MEANT


@pytest.mark.parametrize("measure", MEASURES)
def test_it_is_calibrated(intent: eecore.Model, measure: str) -> None:
    policy = calibrated(measure)
    assert policy.threshold < 1  # a threshold passed
    said = [SAID, "lock the front door", "what time is it", "pause the music", "open the garage"]
    outputs = eecore.generate(intent, said, exit=policy)
    assert all(": calibrated (" in output.stats.contract for output in outputs)
    assert min(layer for output in outputs for layer in output.exit_layers) < 12


def test_held_out_utterances(intent: eecore.Model) -> None:
    utterances = make_data(0, Sizes(110_000, 3000))["test"][:200]
    assert not any(utterance.text == SAID for utterance in utterances)
    outputs = eecore.generate(intent, [utterance.text for utterance in utterances], max_tokens=96)
    right = [o.text == u.parse for o, u in zip(outputs, utterances, strict=True)]
    card = json.loads((eecore.default_model() / "exact_match.json").read_text())
    assert abs(sum(right) / len(right) - card["test"]["12"]) < 0.08  # three standard errors


def test_transformers_reads_it_too(intent: eecore.Model) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = eecore.default_model()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    inputs = tokenizer(SAID, return_tensors="pt")
    assert intent.tokenizer is not None
    assert inputs.input_ids[0].tolist() == intent.tokenizer.encode(SAID)
    written = network.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=32,
        do_sample=False,
        pad_token_id=0,
    )[0, inputs.input_ids.shape[1] :]
    assert tokenizer.decode(written, skip_special_tokens=True) == MEANT


def test_a_copy_without_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(builtin, "__file__", str(tmp_path / "builtin.py"))
    with pytest.raises(ModelNotFoundError, match="expected the model that ships with eecore"):
        eecore.load()


# On the command line


@pytest.mark.parametrize(
    "arguments", [[SAID], ["intent", SAID]], ids=["a prompt alone", "by its name"]
)
def test_generate_without_a_model(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["generate", *arguments]) == 0
    assert capsys.readouterr().out == f"{MEANT}\n"


@pytest.mark.parametrize("within", [True, False], ids=["in its folder", "beside the weights"])
def test_a_calibration_is_found_in_the_model(
    within: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    directory = eecore.default_model()
    if not within:
        directory = Path(shutil.copytree(directory, tmp_path / "model"))
        (directory / "measures" / "classifier.safetensors").rename(
            directory / "classifier.safetensors"
        )
    files = ["--calibration", "calibration-classifier.json", "--classifier"]
    command = ["generate", str(directory), SAID, "--exit", "confident", *files]
    command.append("classifier.safetensors")
    assert run([*command, "--json"]) == 0
    assert "calibrated" in json.loads(capsys.readouterr().out)["stats"]["contract"]
    assert run([*command[:-1], "nowhere.safetensors"]) != 0
    assert "nowhere.safetensors" in capsys.readouterr().err


def test_one_word_is_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "lights"]) == 3
    assert "lights: expected a model directory (config.json" in capsys.readouterr().err


def test_info_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["num_layers"] == 12
