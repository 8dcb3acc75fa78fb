"""Thoughts of a model are recorded to their ends, and end where its calibration says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import eecore
from eecore import RequestError
from eecore.calibration import Example, calibrate_thoughts
from eecore.calibration.thoughts import ended, has_answer, record
from eecore.calibration_file import ThoughtCalibration
from eecore.cli.app import run
from eecore.thought_stop import ThoughtStop
from thinking_models import ALWAYS, HYBRID, write_thinking_model

RULE = ThoughtStop(1.0, agreeing=1, every=6, stem=" A", max_answer=3)
QUESTIONS = [Example(f"Why {number}?") for number in range(20)]
BUDGET = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("thoughts") / "thinker"
    return write_thinking_model(directory, ALWAYS, seed=3, max_position_embeddings=512)


@pytest.fixture(scope="module")
def thinker(folder: Path) -> eecore.Model:
    return eecore.load(folder, device="cpu", kv_cache_tokens=8192)


def asked(model: eecore.Model, question: Example) -> list[int]:
    assert model.tokenizer is not None
    return model.tokenizer.encode_chat([{"role": "user", "content": question.prompt}])


def test_thoughts_end_where_the_calibration_says(thinker: eecore.Model) -> None:
    thoughts = record(thinker, QUESTIONS, RULE, thinking_budget=BUDGET)
    found = calibrate_thoughts(
        thinker, QUESTIONS, RULE, max_loss=0.4, confidence=0.6, thinking_budget=BUDGET
    )
    assert (found.loss, found.num_questions, found.thinking_budget) == ("different", 20, BUDGET)
    source = thinker.network.source
    stop = found.stop_for(source, found.tokenizer_sha256)
    settings: dict[str, Any] = {"max_tokens": 256, "thinking_budget": BUDGET}
    prompts = [asked(thinker, question) for question in QUESTIONS]
    outputs = eecore.generate(thinker, prompts, think=stop, **settings)
    kept = 0
    for thought, output in zip(thoughts, outputs, strict=True):
        end = ended(thought, stop, BUDGET)
        kept += end.num_tokens
        if end.reason is not None:
            assert output.stats.thought_end == end.reason
            assert output.thought_probes == list(thought.probes[: end.num_probes])
        else:
            assert output.stats.thought_end in ("model", "budget")
            assert output.thought_probes == list(thought.probes)
    reasons = {ended(thought, stop, BUDGET).reason for thought in thoughts}
    assert reasons == {"confident", None}
    full = sum(thought.full_tokens for thought in thoughts)
    assert found.saved == pytest.approx(1.0 - kept / full)


def test_the_last_probe_has_the_whole_thoughts_answer(thinker: eecore.Model) -> None:
    thoughts = record(thinker, QUESTIONS, RULE, thinking_budget=BUDGET)
    first = thoughts[0]
    assert first.is_right is None
    for thought in thoughts:
        numbers = [probe.num_tokens for probe in thought.probes]
        assert numbers == sorted(set(numbers))
        assert not numbers or numbers[-1] < thought.full_tokens
    known = [Example(QUESTIONS[0].prompt, first.full_answer), Example(QUESTIONS[1].prompt, "other")]
    told = record(thinker, known, RULE, thinking_budget=BUDGET)
    assert [thought.is_right for thought in told] == [True, False]
    settings: dict[str, Any] = {"max_loss": 0.6, "confidence": 0.5, "thinking_budget": BUDGET}
    found = calibrate_thoughts(thinker, known, RULE, **settings)
    assert (found.loss, found.thinking_budget) == ("lost", BUDGET)
    settings["thinking_budget"] = None
    longest = max(len(asked(thinker, question)) for question in known)
    budget = calibrate_thoughts(thinker, known, RULE, **settings).thinking_budget
    assert budget == 512 - longest - 128 - len(" A") - 3


def test_an_answer_is_known_by_its_text_or_its_only_number() -> None:
    assert has_answer("18", "18.0")
    assert has_answer("18 cups", "18")
    assert has_answer("paris", "Paris.")
    assert has_answer("1,250 dollars", "1250")
    assert not has_answer("18 or 19", "18")
    assert not has_answer("paris", "Rome")
    assert not has_answer("", "18")


def test_models_and_questions_that_cannot_be_used(
    thinker: eecore.Model, model: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="expected at least 114 prompts"):
        calibrate_thoughts(thinker, QUESTIONS)
    settings: dict[str, Any] = {"max_loss": 0.4, "confidence": 0.6}
    monkeypatch.setattr(thinker.tokenizer, "chat_template", HYBRID)  # it opens no thought itself
    with pytest.raises(RequestError, match=r"model: expected one that thinks .* got no thoughts"):
        calibrate_thoughts(thinker, QUESTIONS, **settings, thinking_budget=BUDGET)
    with pytest.raises(RequestError, match="max_tokens"):
        calibrate_thoughts(thinker, QUESTIONS, **settings, thinking_budget=1 << 20)
    assert model.tokenizer is not None
    monkeypatch.setattr(model.tokenizer, "chat_template", "{{ messages[0].content }}")
    with pytest.raises(RequestError, match="expected a model with markers of thoughts"):
        calibrate_thoughts(model, QUESTIONS, **settings, thinking_budget=BUDGET)


def test_the_command_writes_beside_the_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "questions.jsonl"
    lines = [{"question": question.prompt, "answer": "18"} for question in QUESTIONS]
    path.write_text("\n".join(map(json.dumps, lines)))
    words = ["calibrate", str(folder), "--think", str(path), "--thinking-budget", str(BUDGET)]
    words += ["--max-loss", ".4", "--confidence", ".6", "--device", "cpu"]
    assert run([*words, "--every", "6"]) == 0
    found = ThoughtCalibration.beside(folder)
    assert found.stop.every == 6
    assert (found.loss, found.max_loss, found.thinking_budget) == ("lost", 0.4, BUDGET)
    assert "calibrated (at most 0.4 right answers lost" in capsys.readouterr().out
    model = eecore.load(folder, device="cpu", kv_cache_tokens=1024)
    (output,) = eecore.generate(
        model, asked(model, QUESTIONS[0]), think="calibrated", thinking_budget=BUDGET
    )
    assert output.stats.thought_contract == found.promise
    assert run(["calibrate", str(folder)]) == 2
    assert "--data: expected it, or --think in its place, got neither" in capsys.readouterr().err
    assert run([*words, "--delta", ".1"]) == 2
    assert "--delta: expected none with --think" in capsys.readouterr().err
    assert run(["calibrate", str(folder), "--data", str(path), "--every", "9"]) == 2
    assert "--every: expected none with --data" in capsys.readouterr().err
    path.write_text('{"question": ""}')
    assert run(words) != 0
    assert 'questions.jsonl:1: expected {"question": text, ...}' in capsys.readouterr().err
