"""A warning, once, for a model without a sign of training for early exit."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import eecore
from eecore.exits import Auto, ConfidentExit, Exit, FixedExit, Full, SelfSpeculative
from tiny_models import write_model

TRAINED: dict[str, Any] = {"num_layers": 4, "training": {"loss": {"kind": "layerskip"}}}
AGREEING: dict[str, Any] = {"num_layers": 4, "sweep": {"agreement": [0.95, 0.97, 0.98, 1.0]}}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def loaded(directory: Path) -> eecore.Model:
    return eecore.load(directory, device="cpu", kv_cache_tokens=256)


def warnings_of(model: eecore.Model, *policies: Exit | str) -> list[str]:
    """The warnings while each of some policies is requested."""
    engine = model.engine()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for policy in policies:
            engine.prepare([1, 2], exit=policy)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    "policy", ["fixed:2", "confident:0.5", ConfidentExit(0.9, exit_points=(2,))]
)
def test_an_untrained_model_is_warned_of_once(directory: Path, policy: Exit | str) -> None:
    model = loaded(directory)
    (said,) = warnings_of(model, policy, "fixed:1", "confident", policy)
    assert f"trained for early exit, got no record of that beside {directory}" in said
    assert said.startswith(("fixed exit after layer 2", "confident exit (softmax, threshold 0."))
    assert warnings_of(model, policy) == []  # by another engine of the model
    assert len(warnings_of(loaded(directory), policy)) == 1


def test_python_warns_for_all_requests_together(directory: Path) -> None:
    with pytest.warns(UserWarning, match="trained for early exit") as caught:
        eecore.generate(loaded(directory), ["a", "b"], exit="fixed:2", max_tokens=2)
    assert len(caught) == 1


def test_modes_that_keep_the_text_or_never_exit_say_nothing(directory: Path) -> None:
    policies = (Full(), Auto(), SelfSpeculative(2, 2), FixedExit(4), ConfidentExit(1.0))
    assert warnings_of(loaded(directory), *policies) == []


@pytest.mark.parametrize(
    ("about", "is_known"),
    [
        (TRAINED, True),
        (AGREEING, True),
        ({"num_layers": 4, "held_out": {"agreement": [0.95, 0.97, 0.98, 1.0]}}, True),
        ({"num_layers": 4, "training": {"loss": {"kind": "last"}}}, False),
        ({"num_layers": 4, "sweep": {"agreement": [0.01, 0.02, 0.03, 1.0]}}, False),
    ],
)
def test_what_is_written_beside_a_model_is_heeded(
    directory: Path, about: dict[str, Any], is_known: bool
) -> None:
    (directory / "exits.json").write_text(json.dumps(about))
    said = warnings_of(loaded(directory), "fixed:2", "confident:0.5")
    assert len(said) == (0 if is_known else 1)


def test_the_model_that_ships_is_known() -> None:
    model = eecore.load(device="cpu", kv_cache_tokens=256)
    assert warnings_of(model, "fixed:3", "confident:0.9") == []
