"""Calibration of a looped model: each measure's threshold, and its promise when it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import eecore
from eecore import ConfidentExit, ExitClassifier, ExitError
from eecore.calibration import Example
from eecore.calibration.procedure import calibrate
from eecore.cli.app import run
from looped_models import ENDS, LOOPS, STACK, write_looped, write_nanbeige
from tiny_models import write_byte_tokenizer

PROMPTS = [Example(f"{word}=", word) for word in ("ab", "cde", "fg", "hij", "k", "lm")]
GRIDS = {
    "gate": (1.0, 0.5, 0.0),
    "softmax": (1.0, 0.2, 0.1, 0.0),
    "state": (1.0, 0.3, 0.0),
    "classifier": (1.0, 0.5, 0.0),
}
LOAD: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
SETTINGS: dict[str, Any] = {"delta": 0.99, "epsilon": 0.4, "max_tokens": 4}
"""A delta so large that exits pass although a random model's tokens are not its last loop's."""


@pytest.fixture(scope="module", params=["ouro", "nanbeige"])
def looped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("looped")
    if request.param == "ouro":
        write_looped(place, vocab_size=260, eos_token_id=257)
        write_byte_tokenizer(place)
    else:
        write_nanbeige(place, vocab_size=260, num_hidden_layers=STACK, num_loops=LOOPS)
    (place / "data.jsonl").write_text(
        "".join(json.dumps({"input": e.prompt, "target": e.target}) + "\n" for e in PROMPTS)
    )
    return place


@pytest.fixture(scope="module")
def classifier(looped: Path) -> ExitClassifier:
    """One that was trained on the states after the loops."""
    words = ["train-classifier", str(looped), "--data", str(looped / "data.jsonl")]
    words += ["--out", str(looped / "classifier.safetensors"), "--steps", "20", "--device", "cpu"]
    assert run([*words, "--threads", "1"]) == 0
    return ExitClassifier.load(looped / "classifier.safetensors")


@pytest.fixture(scope="module")
def loaded(looped: Path) -> eecore.Model:
    return eecore.load(looped, **LOAD, kv_cache_tokens=1024)


@pytest.mark.parametrize("measure", GRIDS)
def test_a_threshold_is_found_and_keeps_its_promise(
    loaded: eecore.Model, measure: Any, classifier: ExitClassifier
) -> None:
    own = classifier if measure == "classifier" else None
    if measure == "gate" and loaded.config.gate_threshold is None:
        with pytest.raises(ExitError, match="expected a model with several loops and an exit gate"):
            calibrate(loaded, PROMPTS, measure=measure, **SETTINGS)
        return
    found = calibrate(
        loaded, PROMPTS, measure=measure, classifier=own, grid=GRIDS[measure], **SETTINGS
    )
    assert len(found.steps) > 1  # thresholds are tried until one fails
    depths = [step.mean_exit_layer for step in found.steps]
    assert depths[0] == ENDS[-1]
    # The first token comes from all loops; every other one exits after the first loop at last.
    assert depths == sorted(depths, reverse=True)
    assert depths[-1] is not None
    assert ENDS[0] < depths[-1] < ENDS[-1]
    passed = [step.threshold for step in found.steps if step.passed]
    assert found.threshold == min(passed) < 1.0
    policy = ConfidentExit.calibrated(found, own)
    prompts = [example.prompt for example in PROMPTS]
    outputs = eecore.generate(loaded, prompts, exit=policy, max_tokens=4)
    layers = [layer for out in outputs for layer in out.exit_layers]
    assert sum(layers) / len(layers) == depths[len(passed) - 1]
    assert all(found.promise in out.stats.contract for out in outputs)
