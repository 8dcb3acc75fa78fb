"""Exit policies as texts, wherever a policy can be given."""

from __future__ import annotations

import pytest
import torch

import eecore
from eecore import (
    Auto,
    ConfidentExit,
    ExitError,
    FixedExit,
    Full,
    HeadDrafts,
    PromptLookup,
    SelfSpeculative,
)
from eecore.cli.app import run
from eecore.cli.exit_options import ExitOptions
from eecore.exit_text import MODES, ExitTextError, Policies, exit_text, parse_exit, usual_exit

SAID = {
    "full": Full(),
    "fixed:2": FixedExit(2),
    "confident": ConfidentExit(),
    "confident:0.75": ConfidentExit(0.75),
    "speculative:3,6": SelfSpeculative(3, 6),
    "lookup": PromptLookup(),
    "lookup:3": PromptLookup(3),
    "head": HeadDrafts(),
    "head:2": HeadDrafts(2),
    "auto": Auto(),
    "auto:4": Auto(4),
}


@pytest.mark.parametrize("text", SAID)
def test_a_text_says_a_policy(text: str) -> None:
    assert parse_exit(text) == SAID[text]
    assert parse_exit(exit_text(SAID[text])) == SAID[text]


def test_policies_that_have_no_text_are_named_all_the_same() -> None:
    assert exit_text(eecore.DraftAndVerify(frozenset({1}), num_drafts=5)) == "draft-verify:5"
    assert exit_text(ConfidentExit(0.75, "state", min_exit_layer=3)) == "confident:0.75"
    path = eecore.default_model() / "calibration-state.json"
    assert exit_text(ConfidentExit.calibrated(path)) == "calibrated:state"


def test_a_calibration_beside_the_model_has_a_text_everywhere(
    tiny: eecore.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    """In Python, on the command line and in a server: the same policy, the same sentences."""
    directory = eecore.default_model()
    policy = ConfidentExit.calibrated(directory / "calibration-softmax.json")
    for text in ("calibrated", "calibrated:softmax"):
        for said in (text, {"mode": "calibrated", "measure": "softmax"}):
            assert Policies(directory).of(said) == policy
        assert ExitOptions(text).policy(directory) == policy
    command = ["generate", "intent", "lock the front door", "--stats", "--exit"]
    assert run([*command, "calibrated:softmax"]) == 0
    assert "calibrated (delta" in capsys.readouterr().err
    missing = "exit: expected calibration-state.json beside the model, got nothing"
    with pytest.raises(ExitError, match=missing):
        eecore.generate(tiny, [[1, 2]], exit="calibrated:state", max_tokens=2)
    with pytest.raises(ExitError, match="expected a model from a directory with calibration-state"):
        parse_exit("calibrated:state")
    path = str(tiny.network.source.directory)  # type: ignore[union-attr]
    for start in (["generate", path, "abc"], ["serve", path]):
        assert run([*start, "--exit", "calibrated:state"]) != 0
        assert missing in capsys.readouterr().err
        assert run([*start, "--exit", "deep"]) != 0
        assert f"exit: expected {', '.join(MODES)}, got 'deep'" in capsys.readouterr().err


def test_every_policy_but_one_has_a_text() -> None:
    assert {text.partition(":")[0] for text in SAID} == set(MODES) - {"draft-verify", "calibrated"}
    kinds = {type(policy) for policy in SAID.values()}
    assert {mode.policy for mode in MODES.values()} == kinds | {eecore.DraftAndVerify}
    exported = {getattr(eecore, name) for name in eecore.__all__}
    policies = {
        each
        for each in exported
        if isinstance(each, type) and issubclass(each, eecore.exits.Exit)  # type: ignore[attr-defined]
    }
    assert policies - kinds == {eecore.DraftAndVerify}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("deep", "exit: expected full, fixed, .* got .deep."),
        ("", "exit: expected full, fixed"),
        ("Full", "exit: expected full, fixed"),
        ("full:1", "expected full, got"),
        ("fixed", "expected fixed:E, such as fixed:12"),
        ("fixed:two", "expected fixed:E"),
        ("fixed:2.5", "expected fixed:E"),
        ("confident:high", r"confident\[:THRESHOLD\], such as confident:0.8"),
        ("speculative:4", "speculative:E,D"),
        ("speculative:4,2,1", "speculative:E,D"),
        ("speculative:4,", "speculative:E,D"),
        ("lookup:1,2", r"lookup\[:D\]"),
        ("head:x", r"head\[:D\]"),
        ("auto:", None),
        ("draft-verify:5", "with skip_attention or skip_mlp, .* eecore.DraftAndVerify"),
        ("calibrated:best", "expected a measure of softmax, state"),
        ("calibrated:softmax,2", r"expected calibrated\[:MEASURE\], such as calibrated:state"),
    ],
)
def test_what_says_none(text: str, message: str | None) -> None:
    if message is None:
        assert parse_exit(text) == Auto()
        return
    with pytest.raises(ExitTextError, match=message):
        parse_exit(text)


@pytest.mark.parametrize("text", ["confident:1.5", "lookup:0", "auto:0", "speculative:1,0"])
def test_a_policy_that_contradicts_itself(text: str) -> None:
    with pytest.raises(ExitError) as caught:
        parse_exit(text)
    assert not isinstance(caught.value, ExitTextError)


def test_generate_takes_texts(tiny: eecore.Model) -> None:
    prompts = [[1, 2, 3], [4, 5], [6]]
    expected = eecore.generate(
        tiny, prompts, exit=[Full(), FixedExit(2), SelfSpeculative(2, 3)], max_tokens=6
    )
    got = eecore.generate(
        tiny, prompts, exit=["full", FixedExit(2), "speculative:2,3"], max_tokens=6
    )
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]
    assert [o.stats.contract for o in got] == [o.stats.contract for o in expected]
    everywhere = eecore.generate(tiny, prompts, exit="auto", max_tokens=6)
    assert all(output.stats.contract.startswith("auto") for output in everywhere)
    with pytest.raises(ExitError, match="exit: expected full"):
        eecore.generate(tiny, prompts, exit="deepest", max_tokens=6)
    with pytest.raises(eecore.RequestError, match="exit: expected Exit objects, got 3"):
        eecore.generate(tiny, prompts, exit=3, max_tokens=6)  # type: ignore[arg-type]


def test_what_a_request_does_that_says_nothing(tiny: eecore.Model) -> None:
    assert usual_exit(torch.device("cpu")) == "auto"
    assert usual_exit(torch.device("cuda")) == "full"
    usual, full = (
        eecore.generate(tiny, [[5, 6, 7]] * 2, exit=exit, max_tokens=9) for exit in (None, Full())
    )
    assert [output.stats.contract for output in usual] == [Auto().contract] * 2
    assert [output.token_ids for output in usual] == [output.token_ids for output in full]
