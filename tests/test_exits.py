"""Exit policies: what they refuse, where they measure, and the decaying threshold."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eecore import (
    Auto,
    ConfidentExit,
    DraftAndVerify,
    ExitClassifier,
    ExitError,
    FixedExit,
    Full,
    PromptLookup,
    SelfSpeculative,
)
from eecore.exits import Exit
from tiny_models import shape

LINEAR = ExitClassifier(torch.zeros(2, 8), torch.zeros(2))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda: ConfidentExit(1.5), r"threshold: expected None or 0\.\.1, got 1\.5"),
        (lambda: ConfidentExit("0.5"), r"threshold: expected None or 0\.\.1, got '0\.5'"),
        (lambda: ConfidentExit(-0.1), r"threshold: expected None or 0\.\.1, got -0\.1"),
        (lambda: ConfidentExit(math.nan), r"threshold: expected None or 0\.\.1, got nan"),
        (
            lambda: ConfidentExit(thresholds={2: 1.01}),
            r"thresholds: expected a threshold, 0\.\.1, for each of some layers, got \{2: 1\.01\}",
        ),
        (
            lambda: ConfidentExit(measure="margin"),
            "measure: expected softmax, state, classifier, cut or gate",
        ),
        (lambda: ConfidentExit(batch="some"), "batch: expected each or all, got 'some'"),
        (lambda: ConfidentExit(decay_tau=-1), "decay_tau: expected 0 or more, got -1"),
        (lambda: ConfidentExit(decay_tau=math.inf), "decay_tau: expected 0 or more, got inf"),
        (lambda: ConfidentExit(measure="classifier"), "classifier: expected one with"),
        (lambda: ConfidentExit(classifier=LINEAR), "classifier: expected one with"),
        (lambda: ConfidentExit(exit_points=()), "exit_points: expected some layers, or None"),
        (
            lambda: ConfidentExit(exit_points=(1, 2), thresholds={2: 0.5, 3: 0.5}),
            r"thresholds: expected layers of exit_points=\(1, 2\), got 3",
        ),
        (
            lambda: SelfSpeculative(2, 0),
            r"num_drafts: expected a whole number, 1\.\.2147483647, got 0",
        ),
        (
            lambda: SelfSpeculative(2, 2.5),
            r"num_drafts: expected a whole number, 1\.\.2147483647, got 2\.5",
        ),
        (
            lambda: SelfSpeculative(2, draft_threshold=2),
            "draft_threshold: expected None or 0..1",
        ),
        (lambda: FixedExit(2.5), r"FixedExit\.exit_layer: expected a layer, got 2\.5"),
        (lambda: FixedExit(True), r"FixedExit\.exit_layer: expected a layer, got True"),
        (lambda: FixedExit(10**5000), r"exit_layer: expected a layer, got a value of type int"),
        (lambda: SelfSpeculative("2"), r"SelfSpeculative\.exit_layer: expected a layer, got '2'"),
        (lambda: SelfSpeculative(2, 10**30), "num_drafts: expected a whole number"),
        (
            lambda: SelfSpeculative(2, reuse=1),
            "SelfSpeculative.reuse: expected True or False, got 1",
        ),
        (lambda: Auto(0), r"Auto\.num_drafts: expected a whole number, 1\.\."),
        (lambda: Auto(lookup=1), "Auto.lookup: expected True or False, got 1"),
        (
            lambda: Auto(exit_layers="ab"),
            "exit_layers: expected None or at most 65536 layers, got 'ab'",
        ),
        (lambda: PromptLookup(0), r"PromptLookup\.num_drafts: expected a whole number, 1\.\."),
        (
            lambda: PromptLookup(max_ngram=65),
            r"max_ngram: expected a whole number, 1\.\.64, got 65",
        ),
        (lambda: PromptLookup(4, 2, 3), r"min_ngram: expected 1\.\.max_ngram=2, got 3"),
        (
            lambda: PromptLookup(4, min_ngram=0),
            r"min_ngram: expected a whole number, 1\.\.64, got 0",
        ),
        (lambda: DraftAndVerify({1}, adaptive="no"), "adaptive: expected True or False, got 'no'"),
        (lambda: DraftAndVerify("ab"), "skip_attention: expected at most 65536 layers, got 'ab'"),
        (lambda: DraftAndVerify(itertools.count()), "skip_attention: expected at most 65536"),
        (lambda: ConfidentExit(True), r"threshold: expected None or 0\.\.1, got True"),
        (lambda: ConfidentExit(Decimal("0.5")), r"threshold: expected None or 0\.\.1, got Decimal"),
        (
            lambda: ConfidentExit(measure=["softmax"]),
            "measure: expected softmax, state, classifier, cut or",
        ),
        (
            lambda: ConfidentExit(exit_points=(1, "2")),
            "exit_points: expected None or at most 65536",
        ),
        (
            lambda: ConfidentExit(thresholds=[0.5]),
            "thresholds: expected a threshold, 0..1",
        ),
        (
            lambda: ConfidentExit(thresholds={"1": 0.5}),
            "thresholds: expected a threshold, 0..1",
        ),
        (lambda: ConfidentExit(classifier=3), "classifier: expected None or an ExitClassifier"),
        (lambda: ConfidentExit(calibration="file"), "calibration: expected None or a Calibration"),
        (lambda: DraftAndVerify(), "expected at least one sublayer to skip"),
        (
            lambda: DraftAndVerify({1}, num_drafts=0),
            r"num_drafts: expected a whole number, 1\.\.2147483647, got 0",
        ),
        (
            lambda: DraftAndVerify({1}, initial_threshold=-1),
            "threshold: expected None or 0..1",
        ),
    ],
)
def test_contradictory_settings_are_refused(policy: Any, message: str) -> None:
    with pytest.raises(ExitError, match=message):
        policy()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (FixedExit(0), r"FixedExit\.exit_layer: expected 1\.\.4 for a model of 4 layers, got 0"),
        (FixedExit(5), r"FixedExit\.exit_layer: expected 1\.\.4 .* got 5"),
        (Auto(exit_layers=(4,)), r"Auto\.exit_layers: expected 1\.\.3 .* got 4"),
        (SelfSpeculative(0), r"SelfSpeculative\.exit_layer: expected 1\.\.3 .* got 0"),
        (SelfSpeculative(4), r"SelfSpeculative\.exit_layer: expected 1\.\.3 .* got 4"),
        (ConfidentExit(min_exit_layer=0), r"min_exit_layer: expected 1\.\.4 .* got 0"),
        (ConfidentExit(min_exit_layer=5), r"min_exit_layer: expected 1\.\.4 .* got 5"),
        (ConfidentExit(exit_points=(2, 5)), r"exit_points: expected 1\.\.4 .* got 5"),
        (ConfidentExit(thresholds={0: 0.5}), r"thresholds: expected 1\.\.4 .* got 0"),
        (
            ConfidentExit(measure="classifier", classifier=LINEAR),
            r"classifier: expected weight1 \[\*, hidden_size=64\], got \[2, 8\]",
        ),
        (DraftAndVerify({4}), r"DraftAndVerify\.skip_attention: expected 0\.\.3 .* got 4"),
        (DraftAndVerify(skip_mlp={-1}), r"DraftAndVerify\.skip_mlp: expected 0\.\.3 .* got -1"),
    ],
)
def test_layers_that_the_model_does_not_have_are_refused(policy: Exit, message: str) -> None:
    with pytest.raises(ExitError, match=message):
        policy.check(shape(4, 64))


def test_decaying_threshold_by_hand() -> None:
    """CALM eq. 5: clip(0.9 * lambda + 0.1 * exp(-tau * t / N), 0, 1)."""
    policy = ConfidentExit(0.8, decay_tau=4.0)
    assert policy.threshold_at(1, 0, 100) == pytest.approx(0.82)  # 0.72 + 0.1
    assert policy.threshold_at(1, 25, 100) == pytest.approx(0.7567879)  # 0.72 + 0.1 / e
    assert policy.threshold_at(1, 50, 100) == pytest.approx(0.7335335)  # 0.72 + 0.1 / e^2
    assert policy.threshold_at(1, 100, 100) == pytest.approx(0.7218316)  # 0.72 + 0.1 / e^4
    assert ConfidentExit(0.0, decay_tau=4.0).threshold_at(1, 0, 10) == pytest.approx(0.1)


def test_without_tau_the_threshold_stays() -> None:
    assert {ConfidentExit(0.8).threshold_at(1, t, 100) for t in (0, 1, 50, 99)} == {0.8}


def test_a_base_threshold_of_one_stays_one() -> None:
    policy = ConfidentExit(0.5, decay_tau=4.0, thresholds={2: 1.0})
    assert [policy.threshold_at(2, t, 10) for t in range(10)] == [1.0] * 10
    assert policy.threshold_at(1, 0, 10) == pytest.approx(0.55)


def test_thresholds_of_single_layers_replace_the_common_one() -> None:
    policy = ConfidentExit(0.9, thresholds={2: 0.3})
    assert [policy.threshold_at(layer, 5, 10) for layer in (1, 2, 3)] == [0.9, 0.3, 0.9]


def test_measuring_points() -> None:
    assert ConfidentExit().points(range(1, 5)) == {1, 2, 3}
    assert ConfidentExit(min_exit_layer=3).points(range(1, 5)) == {3}
    assert ConfidentExit(exit_points=(1, 3, 4)).points(range(1, 5)) == {1, 3}
    assert ConfidentExit(exit_points=(1, 3), min_exit_layer=2).points(range(1, 5)) == {3}
    assert ConfidentExit(min_exit_layer=4).points(range(1, 5)) == frozenset()
    assert ConfidentExit().points(range(1, 2)) == frozenset()


@pytest.mark.parametrize(
    ("policy", "contract"),
    [
        (Full(), "full: every layer"),
        (FixedExit(3), "fixed exit after layer 3: no promise about quality"),
        (ConfidentExit(0.25), "confident exit (softmax, threshold 0.25): uncalibrated"),
        (SelfSpeculative(2, 4), "self-speculation (exit layer 2, 4 drafts): lossless"),
        (DraftAndVerify({1}, {1, 2}), "draft and verify (3 sublayers skipped): lossless"),
        (PromptLookup(4), "prompt lookup (4 drafts): lossless"),
        (Auto(), "auto (at most 10 drafts): lossless"),
    ],
)
def test_each_policy_says_what_it_promises(policy: Exit, contract: str) -> None:
    assert policy.contract == contract


def test_draft_and_verify_shares_the_layers_below_the_first_skipped() -> None:
    assert DraftAndVerify({3, 2}, {5}).first_skipped == 2
    assert DraftAndVerify(skip_mlp=[1]).first_skipped == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("inner", [None, 5])
def test_classifier_from_a_file(tmp_path: Path, inner: int | None) -> None:
    tensors = {"weight1": torch.randn(inner or 2, 8), "bias1": torch.randn(inner or 2)}
    if inner:
        tensors |= {"weight2": torch.randn(2, inner), "bias2": torch.randn(2)}
    path = tmp_path / "classifier.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path)
    loaded = ExitClassifier.load(path)
    for name in ("weight1", "bias1", "weight2", "bias2"):
        value = getattr(loaded, name)
        if name not in tensors:
            assert value is None
        else:
            assert value.dtype == torch.float32
            assert torch.equal(value, tensors[name].bfloat16().float())


def test_classifier_files_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "classifier.safetensors"
    save_file({"weight": torch.zeros(2, 8)}, path)
    with pytest.raises(ExitError, match=r"expected a tensor weight1, got \['weight'\]"):
        ExitClassifier.load(path)
    path.write_bytes(b"no")
    with pytest.raises(ExitError, match="expected a whole safetensors file"):
        ExitClassifier.load(path)
    with pytest.raises(ExitError, match="nowhere: expected a file, got nothing"):
        ExitClassifier.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(3, 8)], r"weight1: expected \[2, 8\], got \[3, 8\]"),
        ([(8,)], r"weight1: expected \[2, 8\], got \[8\]"),
        ([()], r"weight1: expected \[2 or inner_size, hidden_size\], got \[\]"),
        ([(2, 0)], r"weight1: expected \[2 or inner_size, hidden_size\], got \[2, 0\]"),
        ([None], "weight1: expected a tensor of floats, got None"),
        ([(2, 8), (3,)], r"bias1: expected \[2\], got \[3\]"),
        ([(5, 8), (2,), (2, 5)], r"bias1: expected \[5\], got \[2\]"),
        ([(5, 8), (5,), (3, 5)], r"weight2: expected \[2, 5\], got \[3, 5\]"),
        ([(5, 8), (5,), (2, 5), (5,)], r"bias2: expected \[2\], got \[5\]"),
        ([(2, 8), (2,), None, (2,)], r"bias2: expected none without weight2, got \[2\]"),
    ],
)
def test_classifier_shapes_are_checked(shapes: list[tuple[int, ...] | None], message: str) -> None:
    with pytest.raises(ExitError, match=message):
        ExitClassifier(*(None if shape is None else torch.zeros(shape) for shape in shapes))
