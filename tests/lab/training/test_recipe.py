"""The settings of a run: validated; the learning rate by hand."""

from __future__ import annotations

from typing import Any

import pytest

from eecore.errors import TrainingError
from eecore.lab.training import (
    EarlyExitLoss,
    LayerDropout,
    LoraSettings,
    TrainingConfig,
)


def test_defaults_are_layerskips_for_a_task() -> None:
    config = TrainingConfig(steps=10)
    assert config.loss == EarlyExitLoss(1.0, "gradual")
    assert config.layer_dropout == LayerDropout(0.2, "constant")


def test_the_learning_rate_by_hand() -> None:
    config = TrainingConfig(steps=14, learning_rate=8.0, warmup_steps=4, final_learning_rate=0.25)
    # Up by 2 a step; then from 8 down to 2 over steps 4..13, half-way (5) between steps 8 and 9.
    assert [config.learning_rate_at(step) for step in range(5)] == [2, 4, 6, 8, 8]
    assert config.learning_rate_at(13) == pytest.approx(2)
    assert (config.learning_rate_at(8) + config.learning_rate_at(9)) / 2 == pytest.approx(5)
    # A third of the way: cos(pi/3) = 1/2, so 2 + 6 * 3/4.
    assert config.learning_rate_at(7) == pytest.approx(6.5)
    assert TrainingConfig(steps=1, learning_rate=3.0).learning_rate_at(0) == 3


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("linear", [4, 8, 8, 6, 4, 2]), ("constant", [4, 8, 8, 8, 8, 8])],
)
def test_other_schedules_by_hand(schedule: Any, rates: list[float]) -> None:
    config = TrainingConfig(
        steps=6, learning_rate=8.0, warmup_steps=2, final_learning_rate=0.25, schedule=schedule
    )
    assert [config.learning_rate_at(step) for step in range(6)] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, r"steps: expected a whole number, 1\.\.\d+, got 0"),
        ({"schedule": "step"}, "schedule: expected cosine, linear or constant, got 'step'"),
        ({"accumulate": 17}, r"accumulate: expected 1\.\.batch_size=16, got 17"),
        ({"learning_rate": 0.0}, "learning_rate: expected a number above 0"),
        ({"warmup_steps": 11}, r"warmup_steps: expected 0\.\.steps=10, got 11"),
        ({"relative_rate": 1}, "relative_rate: expected True or False, got 1"),
        ({"loss": {"kind": "last"}}, "loss: expected EarlyExitLoss, CalmLoss, LastLayerLoss"),
        ({"layer_dropout": 0.2}, r"layer_dropout: expected None or a LayerDropout, got 0\.2"),
        ({"lora": 8}, "lora: expected None or a LoraSettings, got 8"),
        ({"precision": "float16"}, "precision: expected float32 or bfloat16"),
        ({"checkpoint_seconds": -1}, "checkpoint_seconds: expected None or 0 or more"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        TrainingConfig(**{"steps": 10, **settings})
    with pytest.raises(TrainingError, match=r"^LoraSettings\.rank: expected a whole number, 1"):
        LoraSettings(rank=0)
