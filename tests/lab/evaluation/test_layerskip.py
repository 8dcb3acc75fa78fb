"""LayerSkip's evaluation: scores by exit, modes beside full depth, savings of reuse; sweeps."""

from __future__ import annotations

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

import eecore
from eecore import DraftAndVerify, ExitError, FixedExit, RequestError, SelfSpeculative
from eecore.calibration import Example
from eecore.calibration.exit_scores import Scored, score_exits
from eecore.cli.app import run
from eecore.lab.evaluation.layerskip import evaluate_layerskip
from eecore.lab.evaluation.sweep import Sweep, SweepCell, default_exit_layers
from eecore.lab.training import interrupts
from eecore.models import ModelSource
from eecore.planning.auto import best_exit_layers
from tiny_models import random_prompts

EXAMPLES = [Example(f"prompt {i}", f"target {i}") for i in range(3)]


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


def test_a_report_has_exits_and_modes(model: eecore.Model) -> None:
    modes = [FixedExit(2), SelfSpeculative(2, 3), DraftAndVerify({1}, {2})]
    report = evaluate_layerskip(
        model, EXAMPLES, modes, metric="rougeL", max_tokens=8, rounds=2, batch_size=2
    )
    assert [score.exit_layer for score in report.exits] == [1, 2, 3, 4]
    names = [row.mode for row in report.modes]
    assert names == [
        "full",
        "fixed:2",
        "speculative:2,3",
        "draft-verify:8",
        "speculative:2,3 without reuse",
    ]
    full, fixed, speculative, verified, without = report.modes
    assert (full.speedup, full.same_as_full, full.acceptance) == (1.0, True, None)
    assert full.mean_exit_layer == 4.0
    assert fixed.mean_exit_layer == 2.0
    assert speculative.same_as_full
    assert verified.same_as_full
    assert full.score == speculative.score
    assert speculative.acceptance is not None
    assert without.acceptance == speculative.acceptance
    text = report.markdown()
    assert "| exit layer | perplexity |" in text
    assert "| speculative:2,3 |" in text


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
        ({"modes": [FixedExit(9)]}, ExitError, r"exit_layer: expected 1\.\.4 .* got 9"),
    ],
)
def test_bad_settings(
    model: eecore.Model, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    settings: dict[str, Any] = {"examples": EXAMPLES, "modes": [], "max_tokens": 1, **change}
    with pytest.raises(error, match=message):
        evaluate_layerskip(model, **settings)


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


def test_the_command_lines(
    directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"input": e.prompt, "target": e.target}) + "\n" for e in EXAMPLES)
    )
    shared = [str(directory), "--data", str(data), "--max-tokens", "3", "--threads", "1"]
    out = ["--out", str(tmp_path / "result")]
    words = ["evaluate", "layerskip", *shared, "--rounds", "1"]
    assert run([*words, "--layers", "2,4", *out]) == 0
    printed = capsys.readouterr()
    assert "| fixed:1 |" in printed.out
    assert "round 1: full: " in printed.err
    assert json.loads((tmp_path / "result.json").read_text())["exits"][0]["exit_layer"] == 2
    assert (tmp_path / "result.md").read_text().strip() == printed.out.strip()

    assert run(["sweep", *shared, "--exit-layers", "1,2", "--num-drafts", "2", *out]) == 0
    printed = capsys.readouterr()
    assert "best: --exit speculative:" in printed.out
    assert "--exit auto: " in printed.out
    assert len(json.loads((tmp_path / "result.json").read_text())["cells"]) == 2

    assert run([*words, "--mode", "fixed:7"]) == 4
    assert "FixedExit.exit_layer: expected 1..4" in capsys.readouterr().err
    assert run([*words, "--mode", "warp:7"]) == 2
    assert run([*words, "--out", str(tmp_path / "none" / "x")]) == 2
    assert "expected a directory, got nothing" in capsys.readouterr().err
    assert run(["sweep", *shared, "--exit-layers", "4"]) == 4
    assert "SelfSpeculative.exit_layer: expected 1..3" in capsys.readouterr().err
    monkeypatch.setattr(eecore, "load", lambda *_, **__: pytest.fail("loaded"))
    for flag, value, message in (
        ("--exit-layers", "", "--exit-layers: expected one or more, got none"),
        ("--num-drafts", "", "--num-drafts: expected one or more, got none"),
        ("--num-drafts", "x", "--num-drafts: expected numbers such as 4,8,12-20, got 'x'"),
    ):
        assert run(["sweep", *shared, flag, value]) == 2
        assert message in capsys.readouterr().err


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
