"""Several sequences packed in a row do not see each other, and are learnt as if alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eecore.errors import TrainingError
from eecore.lab.training import (
    EarlyExitLoss,
    ExitModel,
    TokenData,
    TrainingConfig,
    collate,
    train,
    weighted_exit_loss,
)
from eecore.lab.training.data import from_pairs
from eecore.lab.training.exit_trainer import ExitTrainer


@pytest.mark.parametrize("lengths", [[], [1], [5, 5, 5], [8, 1, 7, 2, 6, 3, 5, 4, 4], [8] * 3])
def test_every_sequence_has_one_place_and_rows_are_full(lengths: list[int]) -> None:
    data = from_pairs([([3] * length, [2]) for length in lengths])
    rows = data.rows(8)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in row) for row in rows]
    assert all(total <= 8 for total in sums)
    # Best fit: two rows that are half empty would be one.
    assert sum(total <= 4 for total in sums) <= 1
    assert data.rows() == [[index] for index in range(len(lengths))]


def test_packed_rows_by_hand() -> None:
    data = from_pairs([([5, 6], [7, 2]), ([8], [9, 2]), ([4], [2])])
    batch = collate(data, [[0, 2], [1]])
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7, 4], [8, 9, 0, 0]]
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 0]]
    assert batch.targets.positions.tolist() == [1, 2, 3, 4, 5]
    assert batch.targets.tokens.tolist() == [7, 2, 2, 9, 2]
    assert "position_ids" not in collate(data, [[0], [1]]).inputs


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_losses_and_gradients_are_those_of_rows_alone(
    make_model: Any, pairs: TokenData, family: str
) -> None:
    more = {"sliding_window": 4} if family == "mistral" else {}
    weights = EarlyExitLoss(1.0, "all").weights(0, 10, 4)
    rows = pairs.rows(40)
    assert max(map(len, rows)) > 2
    found: list[dict[str, torch.Tensor]] = []
    for chosen in (rows, pairs.rows()):
        model = make_model(family, **more)
        exits = ExitModel.of(model)
        batch = collate(pairs, chosen)
        states = exits.states(batch.inputs)
        total, losses = weighted_exit_loss(exits.head, states, batch.targets, weights)
        total.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append({**{str(layer): loss for layer, loss in losses.items()}, **gradients})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("settings", [{}, {"packing": 24}])
def test_a_batch_in_pieces_has_the_gradients_of_the_whole(
    make_model: Any, pairs: TokenData, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Targets of a piece count as in the whole batch, however they are spread."""
    found: list[dict[str, torch.Tensor]] = []
    for accumulate in (1, 3):
        model = make_model()
        config = TrainingConfig(steps=9, batch_size=7, accumulate=accumulate, **settings)
        trainer = ExitTrainer(model, pairs, config, tmp_path)
        model.train()
        total = torch.zeros(())
        for piece in range(accumulate):
            inputs = trainer.train_dataset[4 * accumulate + piece]
            loss = trainer.compute_loss(model, inputs) / accumulate  # as the Trainer does
            loss.backward()
            total += loss.detach()
        trainer.close()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append({"loss": total, **gradients})
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], atol=1e-6, rtol=1e-4, msg=name)


def test_what_cannot_be_packed_is_refused(
    make_model: Any, pairs: TokenData, tmp_path: Path
) -> None:
    longest = int(pairs.lengths.max()) - 1
    with pytest.raises(TrainingError, match=rf"of at most {longest - 1} positions, got {longest}"):
        train(make_model(), pairs, TrainingConfig(steps=1, packing=longest - 1), tmp_path / "out")
    with pytest.raises(TrainingError, match="packing: expected none for a model with an encoder"):
        train(make_model("t5"), pairs, TrainingConfig(steps=1, packing=64), tmp_path / "out")
    assert not (tmp_path / "out").exists()
