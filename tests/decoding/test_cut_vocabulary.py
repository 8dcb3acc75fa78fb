"""Confidence on the tokens that a draft head knows: decisions by them, tokens by the whole head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_confident_exit import PROMPTS, SETTINGS, check_against_reference

import eecore
from devices import load
from eecore import Calibration, ConfidentExit, ExitError
from eecore.calibration import Example, calibrate
from head_packs import write_pack
from reference_decoding import ReferenceModel
from tiny_models import write_model

pytestmark = pytest.mark.usefixtures("one_thread")

THRESHOLD = 0.3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a random draft head that knows 37 tokens."""
    directory = write_model(tmp_path_factory.mktemp("cut"))
    write_pack(directory / "exits", load(directory), vocabulary_size=37)
    return directory


@pytest.fixture(scope="module")
def model(directory: Path) -> eecore.Model:
    return load(directory, kv_cache_tokens=2048)


@pytest.fixture(scope="module")
def reference(directory: Path, model: eecore.Model) -> ReferenceModel:
    head = model.network.draft_head
    assert head is not None
    return ReferenceModel(directory, head.vocabulary.cpu())


def cut(threshold: float = THRESHOLD, **fields: Any) -> ConfidentExit:
    return ConfidentExit(threshold, measure="cut", **fields)


@pytest.mark.parametrize("batch", ["each", "all"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_algorithm_1(
    model: eecore.Model, reference: ReferenceModel, setting: str, batch: str
) -> None:
    policy = cut(**{**SETTINGS[setting](THRESHOLD), "batch": batch})
    outputs = check_against_reference(model, reference, policy)
    depths = {layer for output in outputs for layer in output.exit_layers}
    assert batch == "all" or len(depths) > 1, "the threshold must tell tokens apart"


def test_a_model_without_a_head_is_refused(tiny: eecore.Model) -> None:
    with pytest.raises(ExitError, match="ConfidentExit: expected a model with a draft head"):
        eecore.generate(tiny, PROMPTS[:1], exit=cut())


def test_a_calibration_holds_for_its_tokens_alone(
    directory: Path, model: eecore.Model, tmp_path: Path
) -> None:
    examples = [Example(f"prompt {i}", f"target {i}") for i in range(6)]
    found = calibrate(
        model, examples, measure="cut", delta=0.99, epsilon=0.4, grid=(1.0, 0.4), max_tokens=4
    )
    head = model.network.draft_head
    assert head is not None
    assert found.vocabulary_sha256 == head.vocabulary_sha256
    found.save(tmp_path / "cut.json")
    policy = ConfidentExit.calibrated(tmp_path / "cut.json")
    assert policy.measure == "cut"
    assert eecore.generate(model, PROMPTS[:1], exit=policy, max_tokens=4)[0].error is None
    assert "calibrated (delta 0.99" in policy.contract

    write_pack(tmp_path / "other", load(directory, exits=False), vocabulary_size=37, seed=1)
    other = load(directory, kv_cache_tokens=512, exits=tmp_path / "other")
    with pytest.raises(ExitError, match=r"expected the draft head's tokens .* got others"):
        eecore.generate(other, PROMPTS[:1], exit=policy)


@pytest.mark.parametrize(
    ("measure", "digest"), [("cut", None), ("softmax", "0" * 64), ("cut", "nothing")]
)
def test_calibration_files_that_contradict_themselves(
    model: eecore.Model, tmp_path: Path, measure: str, digest: str | None
) -> None:
    path = tmp_path / "calibration.json"
    found = calibrate(
        model,
        [Example("a", "b")] * 5,
        measure=measure,  # type: ignore[arg-type]
        delta=0.5,
        grid=(1.0,),
        max_tokens=1,
    )
    found.save(path)
    assert Calibration.load(path) == found
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocabulary_sha256": digest}))
    with pytest.raises(ExitError, match="vocabulary_sha256: expected"):
        Calibration.load(path)
