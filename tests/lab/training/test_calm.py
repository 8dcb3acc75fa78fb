"""CALM: the weighted loss, and the labels, loss and training of the exit classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import eecore
from eecore.errors import TrainingError
from eecore.lab.training import (
    BatchOrder,
    CalmLoss,
    ExitModel,
    TokenData,
    collate,
    save_classifier,
    train_exit_classifier,
)
from eecore.lab.training.calm import classifier_loss, frozen_pass
from eecore.lab.training.data import from_text
from eecore.models import Network, load_model
from tiny_models import shape


def test_loss_weights_by_hand() -> None:
    # w_i = i / (1 + 2 + 3 + 4) at any step.
    for step in (0, 9):
        assert CalmLoss().weights(step, 10, 4) == pytest.approx((0.1, 0.2, 0.3, 0.4))


def test_classifier_loss_by_hand() -> None:
    # Layer 1: labels 1, 0, 0, 0, so n_pos/n = 1/4: exits weigh 3/4, others 1/4. Even scores cost
    # ln 2 each: (3/4 + 3 * 1/4) ln 2 / 4 = 3/8 ln 2.
    labels = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])
    scores = torch.zeros(2, 4, 2)
    # Layer 2: all agree, exits weigh 1 - 4/4 = 0: it adds nothing. Mean over both layers.
    assert classifier_loss(scores, labels).item() == pytest.approx(3 / 16 * 0.6931472)
    # The one exit of layer 1 at odds 3 : 1 for exiting costs ln(4/3) instead.
    scores[0, 0] = torch.tensor([0.0, 1.0986123])
    expected = (3 / 4 * 0.2876821 + 3 / 4 * 0.6931472) / 8
    assert classifier_loss(scores, labels).item() == pytest.approx(expected)


def saved(model: Any, place: Path) -> Network:
    """A transformers model as eecore runs it."""
    model.save_pretrained(place)
    return load_model(place, "cpu", "float32")[1]


@pytest.fixture(scope="module")
def half_agreeing(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Network:
    """Layer 2 and up agree with the last one where token 3 is far; layer 1 hardly ever does."""
    model = make_model(seed=2, num_layers=3)
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            model.model.layers[2].get_submodule(name).weight *= 0.3
    return saved(model, tmp_path_factory.mktemp("half"))


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_states_and_labels_are_those_of_transformers(
    make_model: Any, pairs: TokenData, tmp_path: Path, family: str
) -> None:
    model = make_model(family)
    exits, network = ExitModel.of(model), saved(model, tmp_path)
    for index in (3, 8):
        batch = collate(pairs, [index], decoder_start=exits.decoder_start)
        with torch.no_grad():
            every = exits.states(batch.inputs)
            chosen = [batch.targets.logits(exits.head, state).argmax(-1) for state in every]
        expected = torch.stack([state[0, batch.targets.positions] for state in every[:-1]])
        states, labels = frozen_pass(network, pairs, index)
        torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-3)
        assert labels.tolist() == [(own == chosen[-1]).long().tolist() for own in chosen[:-1]]


def test_the_classifier_learns_where_exits_are_right(
    half_agreeing: Network, pairs: TokenData, tmp_path: Path
) -> None:
    order = BatchOrder(pairs.lengths, 20, 0)
    losses: list[float] = []
    classifier = train_exit_classifier(
        half_agreeing,
        pairs,
        (order.indices(step).tolist() for step in range(80)),
        learning_rate=0.04,
        progress=lambda _step, loss: losses.append(loss),
    )
    assert len(losses) == 80
    assert sum(losses[-20:]) < sum(losses[:20])

    path = tmp_path / "classifier.safetensors"
    save_classifier(classifier, path, {"model_sha256": "abc"})
    loaded = eecore.ExitClassifier.load(path)
    assert torch.equal(loaded.weight1, classifier.weight1)
    assert torch.equal(loaded.bias1, classifier.bias1)
    assert loaded.weight2 is None
    with safe_open(str(path), "pt") as file:
        assert file.metadata()["model_sha256"] == "abc"
    eecore.ConfidentExit(0.5, measure="classifier", classifier=loaded).check(shape(3, 16))

    # It is surer where an exit agrees than where it does not.
    found = [frozen_pass(half_agreeing, pairs, index) for index in range(40)]
    states, labels = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    confidence = (states @ loaded.weight1.T + loaded.bias1).softmax(-1)[..., 1]
    assert confidence[labels == 1].mean() > confidence[labels == 0].mean() + 0.05


def test_bad_input_is_refused(half_agreeing: Network, pairs: TokenData) -> None:
    with pytest.raises(TrainingError, match="batches: expected at least one, got none"):
        train_exit_classifier(half_agreeing, pairs, [])
    with pytest.raises(TrainingError, match="data: expected sequences of at most the model's 64"):
        train_exit_classifier(half_agreeing, from_text(list(range(3, 40)) * 2, 66), [[0]])
