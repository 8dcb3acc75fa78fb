"""Calibrations of thoughts: saved whole, read with clear errors, for one model and tokenizer."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import eecore
from eecore import ExitError
from eecore.calibration_file import ThoughtCalibration
from eecore.models import Tokenizer
from eecore.thought_stop import ThoughtStop


@pytest.fixture
def found(model: eecore.Model) -> ThoughtCalibration:
    source, tokenizer = model.network.source, model.tokenizer
    assert source is not None
    assert tokenizer is not None
    return ThoughtCalibration(
        stop=ThoughtStop(0.75, agreeing=2, every=48, stem="So:", max_answer=8, hopeless=0.5),
        max_loss=0.02,
        confidence=0.9,
        loss="different",
        num_questions=600,
        thinking_budget=2048,
        saved=0.45,
        model_sha256=source.sha256,
        tokenizer_sha256=tokenizer.sha256,
        dtype=source.dtype,
        weights=source.weights,
    )


def test_what_is_saved_is_read_back(found: ThoughtCalibration, tmp_path: Path) -> None:
    for each in (found, replace(found, stop=ThoughtStop(math.inf), thinking_budget=None)):
        each.save(tmp_path / "file.json")
        assert ThoughtCalibration.load(tmp_path / "file.json") == each


def test_the_rule_names_its_promise(found: ThoughtCalibration, model: eecore.Model) -> None:
    stop = found.stop_for(model.network.source, found.tokenizer_sha256)
    assert replace(stop, contract="uncalibrated") == found.stop
    assert stop.contract == (
        "calibrated (at most 0.02 other answers, confidence 0.9, on 600 questions, greedy)"
    )
    assert "right answers lost" in replace(found, loss="lost").promise


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_sha256": "0" * 64}, "made for model 000000000000, got model .*: calibrate again"),
        ({"dtype": "float16"}, "made for dtype float16, got dtype float32: calibrate again"),
        ({"weights": "int8"}, "made for weights int8, got weights None: calibrate again"),
        ({"tokenizer_sha256": "0" * 64}, "expected the tokenizer and chat template .* got others"),
    ],
)
def test_another_model_or_template_is_refused(
    found: ThoughtCalibration, model: eecore.Model, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExitError, match=message):
        replace(found, **changes).stop_for(model.network.source, found.tokenizer_sha256)


def test_it_lies_beside_the_model(found: ThoughtCalibration, tmp_path: Path) -> None:
    with pytest.raises(ExitError, match=r"think: expected calibration-thoughts\.json beside the"):
        ThoughtCalibration.beside(tmp_path)
    found.save(tmp_path / "calibration-thoughts.json")
    assert ThoughtCalibration.beside(tmp_path) == found
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    with pytest.raises(ExitError, match=r"expected model\.calibration-thoughts\.json beside"):
        ThoughtCalibration.beside(gguf)
    found.save(ThoughtCalibration.file_of(gguf))
    assert ThoughtCalibration.beside(gguf) == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"more": 1}, "expected the fields"),
        ({"stop": None}, "stop: expected an object, got None"),
        ({"stop": {"threshold": 0.5}}, "stop: expected the fields agreeing, every"),
        ({"max_loss": 2}, r"max_loss: expected 0\.\.1, got 2"),
        ({"loss": "risk"}, "loss: expected different or lost, got 'risk'"),
        ({"tokenizer_sha256": "abc"}, "tokenizer_sha256: expected 64 hexadecimal digits"),
        ({"thinking_budget": -1}, "thinking_budget: expected None or a whole number"),
    ],
)
def test_files_that_are_wrong(
    found: ThoughtCalibration, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "file.json"
    found.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ExitError, match=rf"file\.json: {message}"):
        ThoughtCalibration.load(path)


def test_rules_that_are_wrong(found: ThoughtCalibration, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    found.save(path)
    values = json.loads(path.read_text())
    values["stop"]["agreeing"] = 0
    path.write_text(json.dumps(values))
    with pytest.raises(ExitError, match=r"file\.json: ThoughtStop\.agreeing: expected a whole"):
        ThoughtCalibration.load(path)


def test_a_tokenizer_is_known_by_its_words_and_templates(directory: Path) -> None:
    def tokenizer() -> Tokenizer:
        found = Tokenizer.from_directory(directory)
        assert found is not None
        return found

    one, same, other = tokenizer(), tokenizer(), tokenizer()
    assert one.sha256 == same.sha256
    other.chat_template = "{{ messages[0].content }}"
    assert other.sha256 != one.sha256
    other = tokenizer()
    other.named_templates["tool_use"] = "{{ messages[0].content }}"
    assert other.sha256 != one.sha256
