"""Evaluation of confident exits: its arithmetic by hand, its files, its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import eecore
from eecore import ConfidentExit, ExitClassifier, Full, RequestError
from eecore.calibration import Example
from eecore.cli.app import run
from eecore.lab.evaluation.calm import evaluate_calm, exit_rate
from eecore.lab.evaluation.timed import TimedRun
from eecore.models import model_digest
from eecore.output import Output, RequestStats
from tiny_t5 import write_t5

USAGE, MODEL, REQUEST = 2, 3, 4
EXAMPLES = [Example(f"prompt {i}", f"target {i}") for i in range(5)]
SURE = ExitClassifier(torch.zeros(2, 64), torch.tensor([0.0, 9.0]))
SOFTMAX, STATE = ConfidentExit(0.05), ConfidentExit(0.7, "state")
CLASSIFIER = ConfidentExit(0.9, "classifier", classifier=SURE)


# The arithmetic


def made(exit_layers: list[int], first: float = 1.0, total: float = 3.0) -> Output:
    """An output of a model of 4 layers."""
    stats = RequestStats(
        contract="",
        num_layers=4,
        prompt_tokens=3,
        generated_tokens=len(exit_layers),
        layers_run=sum(exit_layers[1:]),
        prompt_layers_run=12,
        layers_filled=0,
        fill_calls=0,
        drafted=0,
        accepted=0,
        preemptions=0,
        time_to_first_token_s=first,
        total_s=total,
        mean_exit_layer=0.0,
        full_passes=0,
    )
    ids = list(range(len(exit_layers)))
    return Output("", [1], ids, "", "stop", exit_layers, [], None, None, stats)


def test_the_exit_rate_leaves_out_the_first_token() -> None:
    assert exit_rate([made([4, 2, 2]), made([4, 1])]) == pytest.approx(7 / 12)
    assert exit_rate([made([4, 4])]) == 0.0
    assert exit_rate([made([4])]) is None


def test_speeds_are_compared_within_a_round() -> None:
    full, early = TimedRun(Full()), TimedRun(Full())
    for factor in (1.0, 3.0):  # the second round is three times as slow for both
        group = [made([4, 4], total=3 * factor), made([4, 4, 4], first=1.5, total=5.5 * factor)]
        full.record([group, [made([4], first=0.25, total=0.25)]], 6 * factor)
        early.record([[made([4, 2, 2], total=3 * factor)]], 2 * factor)
    assert full.latencies[0] == pytest.approx((2.0 + 4.0) / 6)
    assert early.speedup_over(full) == pytest.approx(3 / 6 * 6 / 2)
    ratios = [one / other for one, other in zip(full.latencies, early.latencies, strict=True)]
    assert early.latency_speedup_over(full) == pytest.approx(sum(ratios) / 2)
    assert early.latency_speedup_over(full) > 1.0
    assert full.tokens_per_s == pytest.approx(1.0)


# A model's


def test_a_report_has_every_technique_mode_and_size(model: eecore.Model) -> None:
    seen: list[tuple[int, int, str]] = []
    report = evaluate_calm(
        model,
        EXAMPLES,
        [SOFTMAX, CLASSIFIER, STATE],
        batch_sizes=(2, 3),
        max_tokens=6,
        rounds=2,
        progress=lambda size, number, run: seen.append((size, number, run.name)),
    )
    assert len(report.rows) == len(seen) / 2 == 2 * (2 + 3 * 2)
    assert (seen[0], seen[8]) == ((2, 0, "full"), (2, 1, "fixed:2"))  # in turns
    assert (3, 1, "confident:0.7 state all") in seen
    found = {(row.technique, row.batch, row.batch_size): row for row in report.rows}
    full = found["full", None, 3]
    assert (full.speedup, full.latency_speedup) == (1.0, 1.0)
    assert (full.exit_rate, full.mean_exit_layer, full.score_to_full) == (0.0, 4.0, 1.0)
    half = found["static-half", None, 2]
    assert (half.exit_rate, half.mean_exit_layer, half.settings) == (0.5, 2.0, None)
    for mode in ("each", "all"):
        sure = found["classifier", mode, 2]  # exits after the first layer, always
        assert sure.exit_rate == 0.75
        assert sure.contract == "confident exit (classifier, threshold 0.9): uncalibrated"
        assert sure.latency_ms is not None
    each, together = (found["softmax", mode, 3] for mode in ("each", "all"))
    assert each.exit_rate is not None
    assert together.exit_rate is not None
    assert each.exit_rate >= together.exit_rate  # all wait for the last
    assert each.score_to_label is not None


def test_a_t5_exits_in_its_decoder(tmp_path: Path) -> None:
    t5 = eecore.load(write_t5(tmp_path), device="cpu", kv_cache_tokens=512)
    report = evaluate_calm(t5, EXAMPLES, [CLASSIFIER], batch_sizes=(3,), max_tokens=6, rounds=1)
    rates = [row.exit_rate for row in report.rows]
    assert rates == [0.0, 0.5, 0.75, 0.75]


def test_the_tables(model: eecore.Model) -> None:
    report = evaluate_calm(model, EXAMPLES, [SOFTMAX], batch_sizes=(2, 3), max_tokens=4, rounds=1)
    lines = report.markdown().splitlines()
    quality = [line.split(" | ")[:3] for line in lines if line.startswith("| softmax")][:3]
    assert quality == [
        ["| softmax", "each", "0.05"],
        ["| softmax", "all 2", "0.05"],
        ["| softmax", "all 3", "0.05"],
    ]
    assert "| softmax | all 3 | 3 |" in report.markdown()
    assert "rougeL to label" in report.markdown()


def test_tokens_that_all_come_from_the_prompt_have_no_latency(model: eecore.Model) -> None:
    report = evaluate_calm(model, EXAMPLES, [SOFTMAX], batch_sizes=(5,), max_tokens=1, rounds=1)
    assert all(row.latency_ms is None and row.exit_rate is None for row in report.rows)
    assert "| full |  | 5 |" in report.markdown()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": "bleu"}, "metric: expected rougeL or rouge2 or exact, got 'bleu'"),
        ({"batch_sizes": (65,)}, r"batch_sizes: expected some of 1\.\.64, the engine's max_num"),
        ({"batch_sizes": ()}, r"batch_sizes: expected .*, got \[\]"),
        ({"policies": [SOFTMAX, ConfidentExit(0.5)]}, "one of each measure, got softmax, softmax"),
        (
            {"policies": [ConfidentExit(0.5, exit_points=(9,))]},
            r"ConfidentExit\.exit_points: expected 1\.\.4 .* got 9",
        ),
    ],
)
def test_bad_settings(model: eecore.Model, change: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"examples": EXAMPLES, "policies": [], "max_tokens": 1, **change}
    with pytest.raises(RequestError, match=message):
        evaluate_calm(model, **settings)


# The command line


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    records = ({"input": e.prompt, "target": e.target} for e in EXAMPLES)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_classifier(file: Path, made_for: str | None, hidden_size: int = 64) -> Path:
    metadata = None if made_for is None else {"model_sha256": made_for}
    tensors = {"weight1": torch.zeros(2, hidden_size), "bias1": torch.tensor([0.0, 9.0])}
    save_file(tensors, file, metadata)
    return file


def test_the_command_writes_its_tables(
    directory: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", "calm", str(directory), "--data", str(data), "--max-tokens", "3"]
    words += ["--rounds", "1", "--device", "cpu", "--threads", "1", "--limit", "4"]
    words += ["--thresholds", "softmax=0.1", "--batch-size", "1", "--batch-size", "2"]
    assert run([*words, "--out", str(tmp_path / "v1.calm")]) == 0
    printed = capsys.readouterr()
    assert "batches of 2, round 1: confident:0.1 softmax all: " in printed.err
    assert (tmp_path / "v1.calm.md").read_text().strip() == printed.out.strip()
    stored = json.loads((tmp_path / "v1.calm.json").read_text())
    assert stored["batch_sizes"] == [1, 2]
    assert stored["num_examples"] == 4
    settings = {row["technique"]: row["settings"] for row in stored["rows"]}
    assert set(settings) == {"full", "static-half", "softmax", "state"}  # there is no classifier
    assert settings["softmax"]["threshold"] == 0.1
    assert settings["state"]["threshold"] == 0.95


def test_thresholds_come_from_calibrations(
    directory: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = [str(directory), "--data", str(data), "--max-tokens", "3", "--device", "cpu"]
    file, learnt = tmp_path / "state.json", write_classifier(tmp_path / "c.safetensors", None)
    calibrate = ["calibrate", *shared, "--measure", "state", "--delta", "0.9", "--grid", "1,0.5"]
    assert run([*calibrate, "--out", str(file)]) == 0
    words = ["evaluate", "calm", *shared, "--rounds", "1", "--calibration", str(file)]
    out = ["--batch-size", "4", "--out", str(tmp_path / "out"), "--classifier", str(learnt)]
    assert run([*words, *out]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    contracts = {(row["technique"], row["batch"]): row["contract"] for row in rows}
    assert "calibrated (delta 0.9" in contracts["state", "each"]
    assert "uncalibrated" in contracts["state", "all"]  # calibrated row by row
    assert "threshold 0.85): uncalibrated" in contracts["softmax", "each"]
    assert "threshold 0.9): uncalibrated" in contracts["classifier", "each"]
    capsys.readouterr()

    assert run([*words, "--calibration", str(file)]) == USAGE
    assert "--calibration: expected one a measure, got two for state" in capsys.readouterr().err
    assert run([*words, "--thresholds", "state=0.5"]) == USAGE
    assert "--thresholds: expected none for state" in capsys.readouterr().err
    other = json.loads(file.read_text()) | {"model_sha256": "0" * 64}
    file.write_text(json.dumps(other))
    assert run(words) == REQUEST
    assert "calibration: made for model 000000000000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--thresholds", "entropy=0.5"], USAGE, "--thresholds: expected each of softmax"),
        (["--thresholds", "softmax=0.5,softmax=1"], USAGE, "--thresholds: expected each of"),
        (["--thresholds", "softmax=high"], USAGE, "--thresholds: expected numbers such as"),
        (["--thresholds", "classifier=0.9"], USAGE, "--classifier: expected a file, got none"),
        (["--classifier", "nowhere.safetensors"], REQUEST, "nowhere.safetensors"),
        (["--calibration", "nowhere.json"], REQUEST, "nowhere.json: expected a file"),
        (["--batch", "some"], USAGE, "--batch: expected each, all, both, got 'some'"),
        (["--metric", "bleu"], USAGE, "--metric: expected rougeL, rouge2, exact, got 'bleu'"),
        (["--out", "nowhere/x"], USAGE, "nowhere: expected a directory, got nothing"),
    ],
)
def test_what_cannot_be_used_is_said_before_the_model_is_loaded(
    directory: Path,
    data: Path,
    options: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loaded(*_args: Any, **_options: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(eecore, "load", loaded)
    words = ["evaluate", "calm", str(directory), "--data", str(data), *options]
    assert run(words) == code
    assert message in capsys.readouterr().err


def test_a_classifier_of_another_model_is_refused(
    directory: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = model_digest(directory)
    own = write_classifier(tmp_path / "own.safetensors", digest)
    other = write_classifier(tmp_path / "other.safetensors", "f" * 64)
    wide = write_classifier(tmp_path / "wide.safetensors", None, hidden_size=72)
    given = ["--data", str(data), "--max-tokens", "2", "--device", "cpu", "--classifier"]
    by_measure = ["--exit", "confident", "--measure", "classifier", "--classifier"]
    commands = [
        ["evaluate", "calm", str(directory), "--rounds", "1", *given],
        ["calibrate", str(directory), *by_measure[2:4], "--grid", "1", "--delta", "0.5", *given],
        ["generate", str(directory), "a b", "-n", "2", "--device", "cpu", *by_measure],
    ]
    commands[1][1:1] = ["--out", str(tmp_path / "calibration.json")]
    for command in commands:
        assert run([*command, str(own)]) == 0
        capsys.readouterr()
        assert run([*command, str(other)]) == REQUEST
        message = capsys.readouterr().err
        assert f"{other}: made for another model" in message
        assert digest[:12] in message
        assert "f" * 12 in message
        assert run([*command, str(wide)]) == REQUEST
        assert "expected weight1 [*, hidden_size=64], got [2, 72]" in capsys.readouterr().err


def test_the_classifier_of_the_model_directory_is_found(
    directory: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = tmp_path / "model"
    beside.mkdir()
    for path in directory.iterdir():
        (beside / path.name).write_bytes(path.read_bytes())
    write_classifier(beside / "classifier.safetensors", model_digest(directory))
    words = ["evaluate", "calm", str(beside), "--data", str(data), "--max-tokens", "2"]
    assert run([*words, "--rounds", "1", "--batch-size", "5", "--batch", "each"]) == 0
    assert "| classifier | each | 0.9 |" in capsys.readouterr().out
