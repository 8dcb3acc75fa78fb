"""The early-exit loss (LayerSkip §4.1.2): the LM head learns to read every layer.

``J = sum_l w(t,l) CE(head(h[l+1]), y)`` with ``w(t,l) = C(t,l) e(l) / sum_i C(t,i) e(i)`` (eqs.
5 and 6), layers l from 0 to L-1: :func:`weighted_exit_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from eecore.errors import TrainingError
from eecore.values import check_fields, choice, is_whole, real

Head = Callable[[Tensor], Tensor]
MAX_LOGITS = 1 << 27
"""Logits of all exits that are kept for the backward pass: half a gibibyte."""


class LossWeights(Protocol):
    """The weight of each layer's loss at a step."""

    def weights(self, step: int, num_steps: int, num_layers: int) -> tuple[float, ...]:
        """w(t,l) for l = 0..num_layers-1; they sum to 1."""


def layer_scale(layer: int, num_layers: int, e_scale: float) -> float:
    """e(l), which grows with the square of the layer (§4.1.2).

    ``e_scale * (0 + 1 + ... + l)``, for the last layer ``L-1 + e_scale * (0 + 1 + ... + L-2)``.
    """
    if layer < num_layers - 1:
        return e_scale * layer * (layer + 1) / 2
    return num_layers - 1 + e_scale * (num_layers - 2) * (num_layers - 1) / 2


@dataclass(frozen=True)
class EarlyExitLoss:
    """The loss of every layer, later ones heavier, under a curriculum.

    The first layer has e(0) = 0: an exit after it is never trained.

    Args:
        e_scale: the weight of the layers below the last, 0..1.
        curriculum: C(t,l). ``rotational``: every ``rotation``-th layer, shifted by one each step.
            ``gradual``: from the last layer down, one more every T/2L steps. ``all``: every layer
            at every step. The last layer is always on.
        rotation: R of the rotational curriculum, 1 or more.
    """

    e_scale: Annotated[float, real(0.0, 1.0)] = 1.0
    curriculum: Annotated[
        Literal["all", "rotational", "gradual"], choice("all", "rotational", "gradual")
    ] = "gradual"
    rotation: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, TrainingError, "EarlyExitLoss.")
        rotates = self.curriculum == "rotational"
        if rotates != (self.rotation is not None) or (rotates and not is_whole(self.rotation, 1)):
            raise TrainingError(
                "EarlyExitLoss.rotation: expected 1 or more with curriculum='rotational', None "
                f"without, got curriculum={self.curriculum!r} and rotation={self.rotation!r}"
            )

    def enabled(self, layer: int, step: int, num_steps: int, num_layers: int) -> bool:
        """C(t,l): whether the curriculum has a layer switched on."""
        if layer == num_layers - 1 or self.curriculum == "all":
            return True
        if self.rotation is not None:
            return (layer - step) % self.rotation == 0
        switched_on = 1 + 2 * num_layers * step // num_steps
        return layer >= num_layers - switched_on

    def weights(self, step: int, num_steps: int, num_layers: int) -> tuple[float, ...]:
        """w(t,l), normalised over the layers that the curriculum has switched on (eq. 6)."""
        scales = [
            layer_scale(layer, num_layers, self.e_scale)
            * self.enabled(layer, step, num_steps, num_layers)
            for layer in range(num_layers)
        ]
        total = sum(scales)
        return tuple(scale / total for scale in scales) if total else _last_alone(num_layers)


@dataclass(frozen=True)
class LastLayerLoss:
    """The loss of the last layer only: ordinary training."""

    def weights(self, step: int, num_steps: int, num_layers: int) -> tuple[float, ...]:  # noqa: ARG002
        """1 for the last layer."""
        return _last_alone(num_layers)


def _last_alone(num_layers: int) -> tuple[float, ...]:
    return (*(0.0,) * (num_layers - 1), 1.0)


@dataclass(frozen=True, eq=False)
class Targets:
    """The positions at which tokens are predicted, and these tokens.

    Attributes:
        positions: int64 [n], into the flattened [batch * length] of the states.
        tokens: int64 [n], the tokens to predict there.
        count: the number that the mean is over: more than n where a batch is computed in pieces,
            whose losses add up; None for n.
    """

    positions: Tensor
    tokens: Tensor
    count: int | None = None

    def share(self, count: int, is_real: bool = True) -> Targets:
        """These targets as a part of ``count`` targets; none where the piece only fills a place."""
        end = None if is_real else 0
        return Targets(self.positions[:end], self.tokens[:end], count)

    def logits(self, head: Head, state: Tensor) -> Tensor:
        """head(h) at the target positions only: float32 [n, vocab_size]."""
        return head(state.flatten(0, 1).index_select(0, self.positions)).float()

    def loss(self, head: Head, state: Tensor) -> Tensor:
        """The mean cross entropy of one exit; this piece's share of it where there are more
        targets.
        """
        return self.mean_loss(self.logits(head, state))

    def mean_loss(self, logits: Tensor) -> Tensor:
        """The same of logits, float32 [n, vocab_size]."""
        total = cross_entropy(logits, self.tokens, reduction="sum")
        return total / (len(self.tokens) if self.count is None else self.count)


def weighted_exit_loss(
    head: Head, states: Sequence[Tensor], targets: Targets, weights: Sequence[float]
) -> tuple[Tensor, dict[int, Tensor]]:
    """J (eq. 5), and the loss of each layer that has a weight, detached, by l.

    Where the logits of all exits would be large, each exit's are computed again in the backward
    pass, so that those of one exit are in memory at a time.

    Args:
        head: final norm and LM head; runs only for layers with a weight.
        states: h[1..L], each [batch, length, hidden_size].
        weights: w(t,l), one for each state.
    """
    if len(weights) != len(states) or not any(weights):
        raise TrainingError(
            f"weights: expected {len(states)}, one a layer and not all 0, got {tuple(weights)}"
        )
    weighted = [layer for layer, weight in enumerate(weights) if weight]
    losses: dict[int, Tensor] = {}
    total, num_logits = torch.zeros((), device=states[0].device), 0
    for layer in reversed(weighted):
        if num_logits < MAX_LOGITS:
            logits = targets.logits(head, states[layer])
            num_logits += logits.numel()
            loss = targets.mean_loss(logits)
        else:
            loss = checkpoint(targets.loss, head, states[layer], use_reentrant=False)
        losses[layer] = loss.detach()
        total = total + weights[layer] * loss
    return total, dict(sorted(losses.items()))
