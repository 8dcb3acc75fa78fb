"""How good every exit is on held-out data: loss, accuracy, agreement with the last layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from eecore.errors import TrainingError
from eecore.lab.training.data import Batch
from eecore.lab.training.exit_model import ExitModel

__all__ = ["ExitScores", "evaluate_exits"]


@dataclass(frozen=True)
class ExitScores:
    """Means over target tokens, by exit layer E = 1..L (index E - 1), tokens given.

    Attributes:
        loss: cross entropy of head(h[E]).
        accuracy: how often its argmax is the target.
        agreement: how often its argmax is that of the last layer.
        num_tokens: how many targets these are means of.
    """

    loss: tuple[float, ...]
    accuracy: tuple[float, ...]
    agreement: tuple[float, ...]
    num_tokens: int


@torch.no_grad()
def evaluate_exits(model: ExitModel, batches: Iterable[Batch]) -> ExitScores:
    """Score every exit of a model, in eval mode, which is then as it was."""
    was_training = model.model.training
    model.model.eval()
    sums = torch.zeros(3, model.num_layers, dtype=torch.float64)
    num_tokens = 0
    try:
        for batch in batches:
            sums += _sums(model, batch.to(model.device)).cpu()
            num_tokens += len(batch.targets.tokens)
    finally:
        model.model.train(was_training)
    if not num_tokens:
        raise TrainingError("batches: expected at least one, got none")
    loss, accuracy, agreement = (sums / num_tokens).tolist()
    return ExitScores(tuple(loss), tuple(accuracy), tuple(agreement), num_tokens)


def _sums(model: ExitModel, batch: Batch) -> Tensor:
    """float64 [3, L]: loss, right ones, agreeing ones, summed over the batch's targets."""
    states = model.states(batch.inputs)
    head, targets = model.head, batch.targets
    last = targets.logits(head, states[-1]).argmax(-1)
    columns = []
    for state in states:
        logits = targets.logits(head, state)
        chosen = logits.argmax(-1)
        loss = cross_entropy(logits, targets.tokens, reduction="sum")
        right, agreeing = (chosen == targets.tokens).sum(), (chosen == last).sum()
        columns.append(torch.stack([loss.double(), right.double(), agreeing.double()]))
    return torch.stack(columns, 1)
