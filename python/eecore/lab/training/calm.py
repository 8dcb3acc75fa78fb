"""CALM's training (Schuster et al. 2022, §3.2 and §3.3): the loss over all layers, and the exit
classifier.

The loss is a mean over layers i = 1..L weighted by i. The classifier is one linear layer to two
classes, shared by all layers, that learns on a frozen model whether exiting there would give the
last layer's token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from eecore.calibration.exit_scores import Scored, forced_states
from eecore.config import T5Config
from eecore.errors import TrainingError
from eecore.exits import ExitClassifier
from eecore.files.whole import replacing
from eecore.lab.training.data import TokenData
from eecore.models import Network


@dataclass(frozen=True)
class CalmLoss:
    """``sum_i w_i CE(head(h[i]), y)``, ``w_i = i / (1 + ... + L)`` (CALM §3.2)."""

    def weights(self, step: int, num_steps: int, num_layers: int) -> tuple[float, ...]:  # noqa: ARG002
        """w_i for i = 1..num_layers; the same at every step."""
        total = num_layers * (num_layers + 1) / 2
        return tuple(i / total for i in range(1, num_layers + 1))


def classifier_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Class-weighted cross entropy, mean over tokens, then over layers (CALM's independent one).

    A layer's classes weigh ``1 - n_pos/n`` (exit) and ``1 - n_neg/n`` (go on), so that both count
    alike; a layer at which all tokens are of one class adds nothing.

    Args:
        scores: float32 [L-1, n, 2], of going on and of exiting.
        labels: int64 [L-1, n], 1 where the exit is right.
    """
    positive = labels.float().mean(1, keepdim=True)  # n_pos / n of each layer
    weight = torch.where(labels == 1, 1 - positive, positive)
    losses = cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses.view_as(weight) * weight).mean()


def train_exit_classifier(
    network: Network,
    data: TokenData,
    batches: Iterable[Sequence[int]],
    *,
    learning_rate: float = 1e-3,
    seed: int = 0,
    progress: Callable[[int, float], None] | None = None,
) -> ExitClassifier:
    """Train an exit classifier on the un-normed states of a frozen model: one step a batch (CALM
    §3.3).

    Args:
        network: the model as eecore runs it, quantised or not.
        data: sequences similar to the model's training data.
        batches: the sequences of each step, by index.
        progress: called with the number of steps done and the step's loss.

    Raises:
        TrainingError: there is no batch, or a sequence is longer than the model's context.
    """
    hidden_size = network.config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    weight = hidden_size**-0.5 * (2 * torch.rand(2, hidden_size, generator=generator) - 1)
    weight = weight.to(network.device).requires_grad_()
    bias = torch.zeros(2, device=network.device, requires_grad=True)
    optimizer = torch.optim.AdamW([weight, bias], lr=learning_rate, weight_decay=0.0)
    steps = 0
    for steps, batch in enumerate(batches, 1):
        states, labels = zip(*(frozen_pass(network, data, index) for index in batch), strict=True)
        loss = classifier_loss(torch.cat(states, 1) @ weight.T + bias, torch.cat(labels, 1))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if progress is not None:
            progress(steps, loss.item())
    if not steps:
        raise TrainingError("batches: expected at least one, got none")
    return ExitClassifier(weight.detach().cpu(), bias.detach().cpu())


@torch.no_grad()
def frozen_pass(network: Network, data: TokenData, index: int) -> tuple[Tensor, Tensor]:
    """The states of a sequence below the last exit that predict learnt tokens, float32 [exits - 1,
    n, hidden_size], and whether the exit there gives the last layer's token, int64 [exits - 1, n].
    """
    tokens, prompt_len = data.sequence(index)
    config, learnt = network.config, data.learnt_of(index)
    if len(tokens) > config.max_position:
        raise TrainingError(
            f"data: expected sequences of at most the model's {config.max_position} tokens, got "
            f"{len(tokens)}"
        )
    sequence = Scored(tokens.tolist())
    if isinstance(config, T5Config):
        sequence = Scored.of(config, tokens[:prompt_len].tolist(), tokens[prompt_len:].tolist())
        learnt = learnt[prompt_len - 1 :]
    rows = learnt.nonzero()[:, 0].to(network.device)
    states = [hidden[rows] for _, hidden in forced_states(network, sequence, config.exit_layers)]
    chosen = torch.stack([network.confidence(state).token for state in states])
    return torch.stack(states[:-1]).float(), (chosen[:-1] == chosen[-1]).long()


def save_classifier(
    classifier: ExitClassifier, path: str | Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write the safetensors file that :meth:`eecore.ExitClassifier.load` reads.

    Args:
        metadata: for the file's header; it should name the model (``{"model_sha256":
            model_digest(directory)}``).
    """
    from safetensors.torch import save_file

    tensors = {
        name: tensor.contiguous()
        for name in ("weight1", "bias1", "weight2", "bias2")
        if (tensor := getattr(classifier, name)) is not None
    }
    with replacing(path) as partial:
        save_file(tensors, partial, {"format": "pt", **(metadata or {})})
