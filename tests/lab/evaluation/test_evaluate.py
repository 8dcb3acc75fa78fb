"""Evaluations: scores by exit, modes beside full depth, savings of reuse; sweeps."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import eecore
from eecore import (
    ConfidentExit,
    DraftAndVerify,
    ExitClassifier,
    ExitError,
    FixedExit,
    Full,
    RequestError,
    SelfSpeculative,
)
from eecore.calibration import Example
from eecore.calibration.exit_scores import Scored, score_exits
from eecore.cli.app import run
from eecore.lab.evaluation.modes import evaluate_modes, exit_rate
from eecore.lab.evaluation.sweep import Sweep, SweepCell, default_exit_layers
from eecore.lab.evaluation.timed import TimedRun
from eecore.lab.training import interrupts
from eecore.models import ModelSource, model_digest
from eecore.output import Output, RequestStats
from eecore.planning.auto import best_exit_layers
from tiny_models import random_prompts
from tiny_t5 import write_t5

REQUEST = 4
EXAMPLES = [Example(f"prompt {i}", f"target {i}") for i in range(5)]
SURE = ExitClassifier(torch.zeros(2, 64), torch.tensor([0.0, 9.0]))
SOFTMAX = ConfidentExit(0.05)
CLASSIFIER = ConfidentExit(0.9, "classifier", classifier=SURE)


def test_scores_are_those_of_the_model_cut_there(model: eecore.Model) -> None:
    """The token that an exit finds likeliest is the one that FixedExit generates."""
    prompts = random_prompts(5, 9)
    for exit_layer in range(1, model.config.num_layers + 1):
        policy = FixedExit(exit_layer)
        outputs = eecore.generate(
            model, prompts, exit=policy, max_tokens=6, ignore_eos=True, logprobs=0
        )
        scored = [
            Scored([*prompt, *output.token_ids], len(prompt))
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        (score,) = score_exits(model.network, scored, [exit_layer])
        assert score.accuracy == 1.0
        logprobs = [logprob for output in outputs for logprob in output.logprobs or []]
        assert math.log(score.perplexity) == pytest.approx(-sum(logprobs) / 12, rel=1e-4)


def test_agreement_is_with_the_last_layer(model: eecore.Model) -> None:
    sequences = [Scored(ids) for ids in random_prompts(30, 150)]
    scores = score_exits(model.network, sequences, range(1, 5))
    assert [score.exit_layer for score in scores] == [1, 2, 3, 4]
    assert scores[-1].agreement == 1.0
    assert 0.0 < scores[0].agreement < 1.0
    (alone,) = score_exits(model.network, sequences, [2])
    assert alone.agreement == scores[1].agreement
    assert alone.perplexity == pytest.approx(scores[1].perplexity, rel=1e-5)


@pytest.mark.parametrize(
    ("sequences", "layers", "message"),
    [
        ([], [1], "sequences: expected at least one, got none"),
        ([Scored([1, 2])], [], r"layers: expected some of 1\.\.4, got \[\]"),
        ([Scored([1, 2])], [5], r"layers: expected some of 1\.\.4, got \[5\]"),
        ([Scored([1])], [1], r"sequences\[0\]: expected .* one or more to predict, got 1 of"),
        ([Scored([1] * 513)], [1], r"sequences\[0\]: expected at most 512 tokens"),
    ],
)
def test_what_cannot_be_scored(
    model: eecore.Model, sequences: list[Scored], layers: list[int], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        score_exits(model.network, sequences, layers)


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


def test_a_report_has_exits_and_modes(model: eecore.Model) -> None:
    modes = [FixedExit(2), SelfSpeculative(2, 3), DraftAndVerify({1}, {2})]
    seen: list[tuple[int, int, str]] = []
    report = evaluate_modes(
        model,
        EXAMPLES,
        modes,
        metric="rougeL",
        max_tokens=8,
        rounds=2,
        batch_sizes=(2, 3),
        progress=lambda size, number, run: seen.append((size, number, run.name)),
    )
    assert [score.exit_layer for score in report.exits] == [1, 2, 3, 4]
    names = [row.mode for row in report.modes if row.batch_size == 3]
    assert names == [
        "full",
        "fixed:2",
        "speculative:2,3",
        "draft-verify:8",
        "speculative:2,3 without reuse",
    ]
    assert (seen[0], seen[5]) == ((2, 0, "full"), (2, 1, "fixed:2"))  # in turns
    assert len(seen) == 2 * len(report.modes) == 2 * 2 * 5
    full, fixed, speculative, verified, without = report.modes[:5]
    assert (full.speedup, full.latency_speedup, full.acceptance) == (1.0, 1.0, None)
    assert (full.same_as_full, full.score_to_full) == (1.0, 1.0)
    assert (full.exit_rate, full.mean_exit_layer) == (0.0, 4.0)
    assert (fixed.exit_rate, fixed.mean_exit_layer) == (0.5, 2.0)
    assert speculative.same_as_full == verified.same_as_full == 1.0
    assert full.score == speculative.score is not None
    assert speculative.acceptance is not None
    assert speculative.exit_rate is None  # all layers verify
    assert without.acceptance == speculative.acceptance
    text = report.markdown()
    assert "| exit layer | perplexity |" in text
    assert "| speculative:2,3 | 2 |" in text
    assert "- fixed exit after layer 2" in text


def test_confident_exits_by_measure_and_batch(model: eecore.Model) -> None:
    modes = [
        CLASSIFIER,
        dataclasses.replace(CLASSIFIER, batch="all"),
        SOFTMAX,
        dataclasses.replace(SOFTMAX, batch="all"),
    ]
    report = evaluate_modes(
        model, EXAMPLES, modes, layers=(), batch_sizes=(3,), max_tokens=6, rounds=1
    )
    assert report.exits == ()
    rows = {row.mode: row for row in report.modes}
    for batch in ("each", "all"):
        sure = rows[f"confident:0.9 classifier {batch}"]  # exits after the first layer, always
        assert sure.exit_rate == 0.75
        assert sure.contract == "confident exit (classifier, threshold 0.9): uncalibrated"
        assert sure.latency_ms is not None
    each, together = (rows[f"confident:0.05 softmax {batch}"] for batch in ("each", "all"))
    assert each.exit_rate is not None
    assert together.exit_rate is not None
    assert each.exit_rate >= together.exit_rate  # all wait for the last


def test_a_t5_exits_in_its_decoder(tmp_path: Path) -> None:
    t5 = eecore.load(write_t5(tmp_path), device="cpu", kv_cache_tokens=512)
    modes = [FixedExit(2), CLASSIFIER]
    report = evaluate_modes(t5, EXAMPLES, modes, batch_sizes=(3,), max_tokens=6, rounds=1)
    assert [row.exit_rate for row in report.modes] == [0.0, 0.5, 0.75]


def test_tokens_that_all_come_from_the_prompt_have_no_latency(model: eecore.Model) -> None:
    report = evaluate_modes(model, EXAMPLES, [SOFTMAX], layers=(), max_tokens=1, rounds=1)
    assert all(row.latency_ms is None and row.exit_rate is None for row in report.modes)
    assert "| full | 1 |" in report.markdown()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"metric": "bleu"},
            RequestError,
            "metric: expected rougeL or rouge2 or exact",
        ),
        ({"rounds": 0}, RequestError, "rounds: expected 1 or more, got 0"),
        ({"examples": []}, RequestError, "prompts: expected at least one, got none"),
        (
            {"batch_sizes": (65,)},
            RequestError,
            r"batch_sizes: expected some of 1\.\.64, the engine",
        ),
        ({"batch_sizes": ()}, RequestError, r"batch_sizes: expected .*, got \[\]"),
        ({"modes": [FixedExit(9)]}, ExitError, r"exit_layer: expected 1\.\.4 .* got 9"),
    ],
)
def test_bad_settings(
    model: eecore.Model, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    settings: dict[str, Any] = {"examples": EXAMPLES, "modes": [], "max_tokens": 1, **change}
    with pytest.raises(error, match=message):
        evaluate_modes(model, **settings)


def test_the_table_of_a_sweep() -> None:
    cells = tuple(
        SweepCell(layer, drafts, 0.5, 10.0, layer + drafts / 10)
        for layer in (4, 2)
        for drafts in (8, 2)
    )
    whole, part = Sweep(6, 5.0, cells, 1.5), Sweep(6, 5.0, cells[::3], 1.5, finished=False)
    assert whole.markdown().splitlines() == [
        "| exit layer | d=2 | d=8 |",
        "| ---: | ---: | ---: |",
        "| 2 | 2.20 | 2.80 |",
        "| 4 | 4.20 | 4.80 |",
    ]
    assert part.markdown().splitlines()[2:] == ["| 2 | 2.20 |  |", "| 4 |  | 4.80 |"]
    assert Sweep(6, 5.0, cells[::-1], 1.5).best == cells[0]
    with pytest.raises(RequestError, match="expected a sweep with its agreement, got one without"):
        part.record(Path("nowhere"))
    assert default_exit_layers(range(1, 13)) == [1, 3, 4, 6, 7, 9]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    records = ({"input": e.prompt, "target": e.target} for e in EXAMPLES)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_command_lines(
    directory: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = [str(directory), "--data", str(data), "--max-tokens", "3", "--threads", "1"]
    out = ["--out", str(tmp_path / "v1.result")]
    words = ["evaluate", *shared, "--rounds", "1"]
    sizes = ["--batch-size", "1", "--batch-size", "2"]
    assert run([*words, "--layers", "2,4", *sizes, *out]) == 0
    printed = capsys.readouterr()
    assert "| fixed:1 | 2 |" in printed.out
    assert "\nround 1: fixed:1: " in printed.err
    assert "batches of 2, round 1: full: " in printed.err
    stored = json.loads((tmp_path / "v1.result.json").read_text())
    assert stored["exits"][0]["exit_layer"] == 2
    assert (tmp_path / "v1.result.md").read_text().strip() == printed.out.strip()

    assert run(["sweep", *shared, "--exit-layers", "1,2", "--num-drafts", "2", *out]) == 0
    printed = capsys.readouterr()
    assert "best: --exit speculative:" in printed.out
    assert "--exit auto: " in printed.out
    assert len(json.loads((tmp_path / "v1.result.json").read_text())["cells"]) == 2

    monkeypatch.setattr(eecore, "load", lambda *_, **__: pytest.fail("loaded"))
    for options, code, message in (
        (("--mode", "fixed:7"), REQUEST, "FixedExit.exit_layer: expected 1..4"),
        (("--mode", "warp:7"), 2, "exit: expected full, fixed, "),
        (("--mode", "{"), 2, "--mode: expected an object in JSON, got '{'"),
        (("--mode", '{"mode": "warp"}'), REQUEST, "exit.mode: expected full, fixed, "),
        (("--mode", "calibrated:state"), REQUEST, "expected calibration-state.json beside the"),
        (("--metric", "bleu"), 2, "--metric: expected rougeL, rouge2, exact, got 'bleu'"),
        (("--out", str(tmp_path / "none" / "x")), 2, "expected a directory, got nothing"),
    ):
        assert run([*words, *options]) == code
        assert message in capsys.readouterr().err
    for flag, value, code, message in (
        ("--exit-layers", "4", REQUEST, "SelfSpeculative.exit_layer: expected 1..3"),
        ("--exit-layers", "", 2, "--exit-layers: expected one or more, got none"),
        ("--num-drafts", "", 2, "--num-drafts: expected one or more, got none"),
        ("--num-drafts", "x", 2, "--num-drafts: expected numbers such as 4,8,12-20, got 'x'"),
    ):
        assert run(["sweep", *shared, flag, value]) == code
        assert message in capsys.readouterr().err


def test_modes_of_files_beside_the_model(
    directory: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = tmp_path / "model"
    shutil.copytree(directory, beside)
    write_classifier(beside / "classifier.safetensors", model_digest(directory))
    shared = [str(beside), "--data", str(data), "--max-tokens", "3", "--device", "cpu"]
    file = beside / "calibration-state.json"
    calibrate = ["calibrate", *shared, "--measure", "state", "--delta", "0.9", "--grid", "1,0.5"]
    assert run([*calibrate, "--out", str(file)]) == 0
    capsys.readouterr()
    by_classifier = {"mode": "confident", "measure": "classifier", "threshold": 0.9, "batch": "all"}
    words = ["evaluate", *shared, "--rounds", "1", "--layers", "none", "--mode", "calibrated:state"]
    assert run([*words, "--mode", json.dumps(by_classifier)]) == 0
    printed = capsys.readouterr().out
    assert "| calibrated:state each | 1 |" in printed
    assert "calibrated (delta 0.9" in printed
    assert "| confident:0.9 classifier all | 1 |" in printed
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_sha256": "0" * 64}))
    assert run(words) == REQUEST
    assert "calibration: made for model 000000000000" in capsys.readouterr().err


def write_classifier(file: Path, made_for: str | None, hidden_size: int = 64) -> Path:
    metadata = None if made_for is None else {"model_sha256": made_for}
    tensors = {"weight1": torch.zeros(2, hidden_size), "bias1": torch.tensor([0.0, 9.0])}
    save_file(tensors, file, metadata)
    return file


def test_a_classifier_of_another_model_is_refused(
    directory: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = model_digest(directory)
    own = write_classifier(tmp_path / "own.safetensors", digest)
    other = write_classifier(tmp_path / "other.safetensors", "f" * 64)
    wide = write_classifier(tmp_path / "wide.safetensors", None, hidden_size=72)
    given = ["--data", str(data), "--max-tokens", "2", "--device", "cpu", "--classifier"]
    by_measure = ["--exit", "confident", "--measure", "classifier", "--classifier"]
    calibrate = ["calibrate", str(directory), "--out", str(tmp_path / "calibration.json")]
    for command in (
        [*calibrate, *by_measure[2:4], "--grid", "1", "--delta", "0.5", *given],
        ["generate", str(directory), "a b", "-n", "2", "--device", "cpu", *by_measure],
    ):
        assert run([*command, str(own)]) == 0
        capsys.readouterr()
        assert run([*command, str(other)]) == REQUEST
        message = capsys.readouterr().err
        assert f"{other}: made for another model" in message
        assert digest[:12] in message
        assert "f" * 12 in message
        assert run([*command, str(wide)]) == REQUEST
        assert "expected weight1 [*, hidden_size=64], got [2, 72]" in capsys.readouterr().err


def stopping_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Raise SIGINT at the ``calls``-th time that a sweep asks whether to stop."""
    asked, original = itertools.count(1), interrupts.stop_on_signals

    @contextmanager
    def stopping() -> Iterator[Callable[[], bool]]:
        with original() as stop:

            def interrupted() -> bool:
                if next(asked) == calls:
                    signal.raise_signal(signal.SIGINT)
                return stop()

            yield interrupted

    monkeypatch.setattr(interrupts, "stop_on_signals", stopping)


@pytest.mark.parametrize(("calls", "pairs"), [(6, 1), (13, 3)])
def test_a_sweep_that_is_stopped_keeps_what_it_has(
    directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    calls: int,
    pairs: int,
) -> None:
    """The stop comes in the middle of a turn, and in the second round."""
    data, out = tmp_path / "data.jsonl", tmp_path / "grid"
    data.write_text('{"input": "a"}\n{"input": "b"}\n')
    words = ["sweep", str(directory), "--data", str(data), "--max-tokens", "2", "--threads", "1"]
    words += ["--exit-layers", "1,2,3", "--num-drafts", "2", "--rounds", "2", "--out", str(out)]
    stopping_after(monkeypatch, calls)
    assert run([*words, "--write"]) == 130
    shown = capsys.readouterr()
    assert f"interrupted at sweep: {calls} of 20 answers" in shown.err
    assert "best: --exit speculative:" in shown.out
    kept = json.loads((tmp_path / "grid.json").read_text())
    assert len(kept["cells"]) == pairs
    assert kept["finished"] is False
    assert shown.out.startswith((tmp_path / "grid.md").read_text().strip())
    assert not (directory / "exits.json").exists()


def test_a_written_sweep_has_auto_draft_with_first_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is trained elsewhere: the shipped one without the files of its training."""
    model = tmp_path / "model"
    shutil.copytree(eecore.default_model(), model)
    (model / "exits.json").unlink()
    data = tmp_path / "data.jsonl"
    data.write_text('{"input": "lock the front door"}\n{"input": "stop the timer"}\n')
    words = ["sweep", str(model), "--data", str(data), "--max-tokens", "12", "--threads", "1"]
    words += ["--exit-layers", "3", "--num-drafts", "4"]
    assert run(words) == 0
    assert not (model / "exits.json").exists()
    assert run([*words, "--write"]) == 0
    shown = capsys.readouterr().out
    source = ModelSource(model, "float32", None)
    agreement = source.exit_agreement(range(1, 13))
    assert agreement is not None
    assert agreement[-1] == 1.0
    layers = best_exit_layers(agreement)
    assert layers != ()
    words_of_layers = " or ".join(map(str, layers))
    assert f"wrote {model / 'exits.json'}: auto drafts with {words_of_layers} first layers" in shown
    assert run(["generate", str(model), "lock the door", "-n", "4", "--exit", "fixed:3"]) == 0
    assert "trained for early exit" not in capsys.readouterr().err

    # What else is known stays; a file of another model is refused before anything runs.
    about = json.loads((model / "exits.json").read_text())
    kept = {**about, "training": {"loss": {"kind": "layerskip"}}, "held_out": {"agreement": [0.5]}}
    (model / "exits.json").write_text(json.dumps(kept))
    assert run([*words, "--write"]) == 0
    again = json.loads((model / "exits.json").read_text())
    assert (again["training"], again["held_out"]) == (kept["training"], kept["held_out"])
    capsys.readouterr()
    for text in ("{", json.dumps({**about, "num_layers": 4})):
        (model / "exits.json").write_text(text)
        assert run([*words, "--write"]) == 3
        assert "round 1" not in capsys.readouterr().err
        assert (model / "exits.json").read_text() == text
    assert run(["sweep", "intent", *words[2:], "--write"]) == 2
    assert "--write: expected a model of your own, got intent" in capsys.readouterr().err


def test_the_record_of_a_gguf_file_is_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "some.model.gguf"
    file.touch()
    cells = (SweepCell(1, 2, 0.5, 10.0, 1.2),)
    found = Sweep(3, 5.0, cells, 1.1, agreement=(0.5, 0.75, 1.0), agreement_tokens=8)
    assert found.record(file) == tmp_path / "some.model.exits.json"
    assert ModelSource(file, "float32", None).exit_agreement(range(1, 4)) == (0.5, 0.75, 1.0)
