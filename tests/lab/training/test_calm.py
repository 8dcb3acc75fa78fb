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
    ClassifierConfig,
    ExitModel,
    Targets,
    collate,
    save_classifier,
    train_exit_classifier,
)
from eecore.lab.training.calm import agreement_labels, classifier_loss
from tiny_models import shape


def test_loss_weights_by_hand() -> None:
    # w_i = i / (1 + 2 + 3 + 4) at any step.
    for step in (0, 9):
        assert CalmLoss().weights(step, 10, 4) == pytest.approx((0.1, 0.2, 0.3, 0.4))


def test_labels_are_agreement_with_the_last_layer() -> None:
    # The head is the identity over three tokens; argmax by layer at positions 0, 2, 3.
    choices = torch.tensor([[0, 9, 1, 2], [1, 9, 1, 2], [1, 9, 2, 2]])
    states = [torch.nn.functional.one_hot(row % 3, 3)[None].float() for row in choices]
    targets = Targets(torch.tensor([0, 2, 3]), torch.tensor([0, 0, 0]))
    labels = agreement_labels(lambda state: state, states, targets)
    assert labels.tolist() == [[0, 0, 1], [1, 0, 1]]


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


@pytest.fixture(scope="module")
def half_agreeing(make_model: Any) -> ExitModel:
    """Layer 2 and up agree with the last one where token 3 is far; layer 1 hardly ever does."""
    model = make_model(seed=2, num_layers=3)
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            model.model.layers[2].get_submodule(name).weight *= 0.3
    return ExitModel.of(model)


def test_the_classifier_learns_where_exits_are_right(
    half_agreeing: ExitModel, pairs: Any, tmp_path: Path
) -> None:
    before = {name: p.clone() for name, p in half_agreeing.model.named_parameters()}
    half_agreeing.model.train()
    order = BatchOrder(pairs.lengths, 20, 0)
    losses: list[float] = []
    classifier = train_exit_classifier(
        half_agreeing,
        (collate(pairs, order.indices(step).tolist()) for step in range(300)),
        ClassifierConfig(learning_rate=0.02),
        progress=lambda _step, loss: losses.append(loss),
    )
    assert len(losses) == 300
    assert sum(losses[-20:]) < sum(losses[:20])
    assert half_agreeing.model.training
    for name, parameter in half_agreeing.model.named_parameters():
        assert torch.equal(parameter, before[name]), name
        assert parameter.grad is None, name

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
    batch = collate(pairs, range(40))
    with torch.no_grad():
        states = half_agreeing.states(batch.inputs)
        labels = agreement_labels(half_agreeing.head, states, batch.targets)
        rows = [s.flatten(0, 1)[batch.targets.positions] for s in states[:-1]]
        scores = torch.stack(rows) @ loaded.weight1.T + loaded.bias1
    confidence = scores.softmax(-1)[..., 1]
    assert confidence[labels == 1].mean() > confidence[labels == 0].mean() + 0.05


def test_bad_input_is_refused(half_agreeing: ExitModel) -> None:
    with pytest.raises(TrainingError, match="batches: expected at least one, got none"):
        train_exit_classifier(half_agreeing, [])
    with pytest.raises(TrainingError, match="learning_rate: expected above 0, got -1"):
        ClassifierConfig(learning_rate=-1)
    with pytest.raises(TrainingError, match="weight_decay: expected 0 or more, got -1"):
        ClassifierConfig(weight_decay=-1)
    with pytest.raises(TrainingError, match=r"seed: expected a whole number, .*, got 0\.5"):
        ClassifierConfig(seed=0.5)  # type: ignore[arg-type]
