"""Learn then Test: its p-values, its guarantee; a calibration is valid for its model alone."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eecore
from eecore import Calibration, ConfidentExit, ExitClassifier, ExitError, RequestError
from eecore.calibration import Example, similarity
from eecore.calibration import procedure as calibration
from eecore.calibration.procedure import (
    DEFAULT_GRID,
    calibrate,
    hoeffding_bentkus,
    lowest_passed,
    prompts_needed,
    tried_thresholds,
)
from eecore.calibration_file import CalibrationStep
from eecore.cli.app import run
from tiny_models import write_model

PROMPTS = [Example(f"prompt {i}", f"target {i}") for i in range(6)]
GRID = (1.0, 0.8, 0.4, 0.0)


@pytest.fixture(scope="module")
def found(model: eecore.Model) -> Calibration:
    """A calibration with a delta so large that the exits of a random model pass."""
    return calibrate(model, PROMPTS, delta=0.99, epsilon=0.4, grid=GRID, max_tokens=4)


@pytest.mark.parametrize(
    ("mean_loss", "num_prompts", "delta", "expected"),
    [
        # No loss: exp(-n kl(0 || d)) = (1 - d)^n, below e (1 - d)^n.
        (0.0, 100, 0.1, 0.9**100),
        # kl(.05 || .1) = .05 ln .5 + .95 ln(.95 / .9) = .016706: exp(-1.6706) = .18814; and
        # e P(Bin(100, .1) <= 5) = e * .057577 = .15651, which is the smaller.
        (0.05, 100, 0.1, 0.15651),
        # A mean of 1/3 of 3 prompts is one prompt, not two: e P(Bin(3, .5) <= 1) = e / 2 > 1, and
        # kl(1/3 || 1/2) = .056633: exp(-.1699) = .84375.
        (1 / 3, 3, 0.5, 0.84375),
        (0.1, 100, 0.1, 1.0),
        (0.7, 100, 0.1, 1.0),
    ],
)
def test_p_values_by_hand(
    mean_loss: float, num_prompts: int, delta: float, expected: float
) -> None:
    assert hoeffding_bentkus(mean_loss, num_prompts, delta) == pytest.approx(expected, rel=1e-4)


def test_the_fewest_prompts_that_can_pass() -> None:
    assert prompts_needed(0.02, 0.05) == 149  # ln .05 / ln .98 = 148.3
    assert prompts_needed(1e-20, 0.05) == pytest.approx(3e20, rel=0.01)
    assert prompts_needed(1e-320, 0.05) == math.inf
    assert hoeffding_bentkus(0.0, 149, 0.02) <= 0.05 < hoeffding_bentkus(0.0, 148, 0.02)


def test_no_threshold_is_tried_after_the_first_that_fails() -> None:
    asked = []

    def losses_at(threshold: float) -> list[float]:
        asked.append(threshold)
        return [0.0 if threshold > 0.5 else 0.2] * 1000

    steps = list(tried_thresholds(losses_at, DEFAULT_GRID, 0.1, 0.05))
    assert asked == [threshold for threshold in DEFAULT_GRID if threshold >= 0.5]
    assert [step.passed for step in steps] == [True] * (len(asked) - 1) + [False]
    assert lowest_passed(steps) == 0.55
    assert lowest_passed([CalibrationStep(1.0, 0.5, 1.0, False)]) == 1.0


@pytest.mark.parametrize("delta", [0.05, 0.2])
def test_the_guarantee_holds_over_many_calibration_sets(delta: float) -> None:
    """The true risk at the answer exceeds delta in at most epsilon of the sets.

    A prompt's loss is Beta distributed or, in every third prompt, all or nothing; its expectation
    grows as the threshold falls and crosses delta within the grid.
    """
    epsilon, num_sets, num_prompts = 0.05, 200, 300
    random = np.random.default_rng(0)

    def risk(threshold: float) -> float:
        return 1.6 * delta * (1.0 - threshold)

    exceeded, early = 0, 0
    for _ in range(num_sets):

        def losses_at(threshold: float) -> list[float]:
            mean = risk(threshold)
            if mean == 0.0:
                return [0.0] * num_prompts
            smooth = random.beta(2.0 * mean, 2.0 * (1.0 - mean), num_prompts)
            jumps = (random.random(num_prompts) < mean).astype(float)
            losses = np.where(np.arange(num_prompts) % 3 == 0, jumps, smooth)
            return [float(loss) for loss in losses]

        answer = lowest_passed(tried_thresholds(losses_at, DEFAULT_GRID, delta, epsilon))
        exceeded += risk(answer) > delta
        early += answer < 1.0
    sampling_error = 3.0 * math.sqrt(epsilon * (1.0 - epsilon) / num_sets)
    assert exceeded / num_sets <= epsilon + sampling_error
    assert early / num_sets > 0.9  # not merely because nothing ever exits


def test_every_threshold_is_measured_by_generating(found: Calibration) -> None:
    first = found.steps[0]
    assert (first.threshold, first.mean_loss, first.passed) == (1.0, 0.0, True)
    assert first.mean_exit_layer == 4.0
    depths = [step.mean_exit_layer for step in found.steps]
    assert depths == sorted(depths, reverse=True)
    assert depths[-1] < 4.0
    assert found.threshold == lowest_passed(found.steps) < 1.0
    assert found.num_prompts == len(PROMPTS)


def test_risk_is_what_is_lost_against_the_target(model: eecore.Model) -> None:
    full = eecore.generate(model, [e.prompt for e in PROMPTS], max_tokens=4)
    right = [Example(e.prompt, o.text) for e, o in zip(PROMPTS, full, strict=True)]
    settings: dict[str, Any] = {"delta": 0.9, "grid": GRID, "max_tokens": 4, "similarity": "exact"}
    textual = calibrate(model, right, loss="textual", **settings)
    risk = calibrate(model, right, loss="risk", **settings)
    wrong = calibrate(model, PROMPTS, loss="risk", **settings)
    # If the targets are the full model's texts, both are equal; if it is wrong, no loss counts.
    assert [s.mean_loss for s in risk.steps] == [s.mean_loss for s in textual.steps]
    assert any(s.mean_loss > 0.0 for s in risk.steps)
    assert all(s.mean_loss == 0.0 for s in wrong.steps)


def test_a_calibrated_policy_says_so(
    found: Calibration, model: eecore.Model, tmp_path: Path
) -> None:
    found.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json") == found
    policy = ConfidentExit.calibrated(tmp_path / "calibration.json")
    assert policy.threshold == found.threshold
    (output,) = eecore.generate(model, "prompt 0", exit=policy, max_tokens=4)
    assert "calibrated (delta 0.99, epsilon 0.4, textual loss" in output.stats.contract
    assert "uncalibrated" in ConfidentExit(found.threshold).contract


def test_a_guarantee_does_not_outlive_a_changed_setting(found: Calibration) -> None:
    policy = ConfidentExit.calibrated(found)
    with pytest.raises(ExitError, match=r"threshold: expected .*, as calibrated, got 0\.01"):
        dataclasses.replace(policy, threshold=0.01)
    with pytest.raises(ExitError, match="batch: expected 'each', as calibrated, got 'all'"):
        dataclasses.replace(policy, batch="all")
    assert "uncalibrated" in dataclasses.replace(policy, batch="all", calibration=None).contract


def test_another_model_dtype_or_sampling_is_refused(
    found: Calibration, model: eecore.Model, directory: Path, tmp_path: Path
) -> None:
    def generate(loaded: eecore.Model, **settings: Any) -> None:
        eecore.generate(
            loaded, "prompt 0", exit=ConfidentExit.calibrated(found), max_tokens=1, **settings
        )

    generate(model)
    with pytest.raises(RequestError, match="temperature: expected 0 with a calibrated exit"):
        generate(model, temperature=0.5)
    other = eecore.load(write_model(tmp_path, seed=1), device="cpu", kv_cache_tokens=64)
    with pytest.raises(ExitError, match=r"calibration: made for model .*: calibrate again"):
        generate(other)
    for options, what in (({"dtype": "bfloat16"}, "dtype"), ({"weights": "int8"}, "weights")):
        changed = eecore.load(directory, device="cpu", kv_cache_tokens=64, **options)
        with pytest.raises(ExitError, match=f"calibration: made for {what} "):
            generate(changed)


def test_a_classifier_is_part_of_the_calibration(model: eecore.Model) -> None:
    classifier = ExitClassifier(torch.full((2, 64), 0.01), torch.tensor([0.0, 0.1]))
    made = calibrate(
        model,
        PROMPTS,
        measure="classifier",
        classifier=classifier,
        delta=0.5,
        grid=(1.0,),
        max_tokens=2,
    )
    ConfidentExit.calibrated(made, ExitClassifier(classifier.weight1.clone(), classifier.bias1))
    with pytest.raises(ExitError, match="expected the classifier it was made with, got none"):
        ConfidentExit.calibrated(made)
    with pytest.raises(ExitError, match=r"expected the classifier it was made with .*got another"):
        ConfidentExit.calibrated(made, ExitClassifier(classifier.weight1 + 1, classifier.bias1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": 0.0}, "delta: expected a number between 0 and 1, got 0"),
        ({"epsilon": 1.5}, "epsilon: expected a number between 0 and 1, got 1.5"),
        ({"loss": "regret"}, "loss: expected textual or risk, got 'regret'"),
        ({"similarity": "bleu"}, "similarity: expected rougeL or rouge2 or exact, got 'bleu'"),
        ({"grid": (0.9, 0.5)}, "grid: expected descending thresholds from 1 on"),
        ({"grid": (1.0, 0.5, 0.5)}, "grid: expected descending thresholds from 1 on"),
        ({"max_tokens": 0}, "max_tokens: expected 1 or more, got 0"),
        ({"examples": []}, "examples: expected at least one, got none"),
        ({"examples": [Example("a")], "loss": "risk"}, r"examples\[0\]: expected a target"),
        ({"exit_points": (9,)}, r"exit_points: expected 1\.\.4 for a model of 4 layers, got 9"),
    ],
)
def test_bad_settings(model: eecore.Model, change: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"examples": PROMPTS, "delta": 0.1, **change}
    with pytest.raises(RequestError, match=message):
        calibrate(model, **settings)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "expected a file, got nothing"),
        (lambda path: path.write_text("{"), "expected JSON"),
        (lambda path: path.write_text("[]"), r"expected a JSON object, got \[\]"),
        (lambda path: path.write_text('{"threshold": 0.5}'), r"got \['threshold'\]"),
    ],
)
def test_a_bad_file(
    found: Calibration, tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "calibration.json"
    found.save(path)
    spoil(path)
    with pytest.raises(ExitError, match=message):
        ConfidentExit.calibrated(path)


def test_the_command_line(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "calibration.json"
    data.write_text("".join(json.dumps({"input": e.prompt}) + "\n" for e in PROMPTS))
    words = ["calibrate", str(directory), "--data", str(data), "--out", str(out)]
    words += ["--delta", "0.5", "--max-tokens", "2", "--grid", "1,0.5", "--threads", "1"]
    assert run(words) == 0
    printed = capsys.readouterr()
    assert "threshold 1: loss 0.0000, p " in printed.err
    assert printed.out.startswith("threshold 0.5: calibrated (delta 0.5, epsilon 0.05, textual")
    assert Calibration.load(out).threshold == 0.5

    exits = ["--exit", "confident", "--calibration", str(out)]
    generate = [
        "generate",
        str(directory),
        "prompt",
        "--max-tokens",
        "2",
        "--json",
        "--threads",
        "1",
    ]
    assert run([*generate, *exits]) == 0
    assert "calibrated (delta 0.5" in capsys.readouterr().out
    assert run([*generate, *exits, "--batch-mode", "all"]) == 2
    assert "--batch-mode: expected none beside --calibration" in capsys.readouterr().err
    assert run([*words, "--grid", "1,x"]) == 2
    assert "--grid: expected numbers" in capsys.readouterr().err
    assert run([*words, "--loss", "risk"]) == 4
    assert f'{data}:1: expected {{"input": text, "target": text}}' in capsys.readouterr().err


def test_too_few_prompts_are_refused_before_anything_runs(
    directory: Path,
    model: eecore.Model,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "calibration.json"
    data.write_text("".join(json.dumps({"input": e.prompt}) + "\n" for e in PROMPTS))
    out.write_text("kept")
    monkeypatch.setattr(eecore, "load", lambda *_, **__: pytest.fail("loaded"))
    words = ["calibrate", str(directory), "--data", str(data), "--out", str(out)]
    assert run(words) == 4
    said = capsys.readouterr().err
    assert "examples: expected at least 149 prompts, as fewer cannot show a loss" in said
    assert run([*words, "--delta", "0.5", "--limit", "4"]) == 4
    assert "expected at least 5 prompts" in capsys.readouterr().err
    assert run([*words, "--delta", "2"]) == 4
    assert "delta: expected a number between 0 and 1, got 2" in capsys.readouterr().err
    assert out.read_text() == "kept"
    with pytest.raises(RequestError, match=r"expected at least 29 prompts.*, got 6"):
        calibrate(model, PROMPTS, delta=0.1)


@pytest.mark.parametrize("package", ["scipy.stats", "rouge_score.rouge_scorer"])
def test_a_missing_package_is_said_before_anything_runs(
    model: eecore.Model, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    similarity._scorer.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    name = package.partition(".")[0].replace("_", "-")
    monkeypatch.setattr(calibration, "generated", lambda *_, **__: pytest.fail("ran"))
    with pytest.raises(RequestError, match=f"expected the package {name}, got none"):
        calibrate(model, PROMPTS, delta=0.5)
