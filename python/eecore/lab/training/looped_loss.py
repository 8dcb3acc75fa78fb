"""The losses of looped models: all loops weighted by exit probability, then the gate alone.

After loop t a token exits with probability lambda_t, the sigmoid of the gate, unless it has exited
before: ``p_t = lambda_t * prod_{j<t} (1 - lambda_j)``, and the last loop takes the rest.
(Zhu et al. 2025, Ouro: an expected loss with an entropy term, then a stage for the gate.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid

from eecore.errors import TrainingError
from eecore.lab.training.early_exit_loss import Targets
from eecore.lab.training.exit_model import ExitModel
from eecore.values import check_fields, real


def exit_log_probabilities(gates: Tensor) -> Tensor:
    """log p_t for each loop, of the gate's logits, both [num_loops, n]; the last ones do not count.

    Probabilities of a token sum to 1.
    """
    goes_on = logsigmoid(-gates[:-1]).cumsum(0)
    before = torch.cat([torch.zeros_like(gates[:1]), goes_on])
    return torch.cat([logsigmoid(gates[:-1]) + before[:-1], before[-1:]])


@dataclass(frozen=True)
class LoopedLoss:
    """``sum_t p_t CE_t + entropy * sum_t p_t (log p_t - tilt * log t)``, a mean over tokens.

    Args:
        entropy: how much the entropy of the exit distribution counts, 0 or more: where it is small
            beside the losses, the gate settles on one loop before the others have learnt.
        tilt: loops that are equally good have probabilities proportional to ``t ** tilt``. Above 0
            later loops learn more than earlier ones, so that running them is worth its time.
    """

    entropy: Annotated[float, real(0.0, 100.0)] = 1.0
    tilt: Annotated[float, real(0.0, 100.0)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, TrainingError, "LoopedLoss.")

    def of(self, losses: Tensor, gates: Tensor) -> Tensor:
        """float32 [n] of the cross entropies and the gate's logits, both [num_loops, n]."""
        log_p = exit_log_probabilities(gates)
        loops = torch.arange(1, len(gates) + 1, device=gates.device, dtype=gates.dtype)
        own = log_p - self.tilt * loops.log()[:, None]
        return (log_p.exp() * (losses + self.entropy * own)).sum(0)


@dataclass(frozen=True)
class GateLoss:
    """The gate alone learns whether a later loop would still lower a token's cross entropy.

    After loop t the label of going on is ``sigmoid(slope * (CE_t - min_{s>t} CE_s - margin))``. All
    other weights stay as they are.

    Args:
        slope: how sharply a gain of more than the margin is told from less.
        margin: nats that a later loop has to gain.
    """

    slope: Annotated[float, real(0.0, 1e6)] = 50.0
    margin: Annotated[float, real(0.0, 100.0)] = 0.005

    def __post_init__(self) -> None:
        check_fields(self, TrainingError, "GateLoss.")

    def of(self, losses: Tensor, gates: Tensor) -> Tensor:
        """float32 [n] of the cross entropies and the gate's logits, both [num_loops, n]."""
        best = losses.detach().flip(0).cummin(0).values.flip(0)
        gain = losses.detach()[:-1] - best[1:]
        goes_on = torch.sigmoid(self.slope * (gain - self.margin))
        return binary_cross_entropy_with_logits(-gates[:-1], goes_on, reduction="none").mean(0)


def loss_over_loops(
    model: ExitModel, states: Sequence[Tensor], targets: Targets, loss: LoopedLoss | GateLoss
) -> tuple[Tensor, dict[int, Tensor]]:
    """A looped model's loss, and the cross entropy of each loop by its index, detached.

    Args:
        model: with a gate.
        states: of each loop, normed, [batch, length, hidden_size].
    """
    rows = [state.flatten(0, 1).index_select(0, targets.positions) for state in states]
    gates = torch.stack([model.gate(row).squeeze(-1).float() for row in rows])
    losses = torch.stack(
        [cross_entropy(model.head(row).float(), targets.tokens, reduction="none") for row in rows]
    )
    count = len(targets.tokens) if targets.count is None else targets.count
    by_loop = dict(enumerate(losses.detach().sum(1) / count))
    return loss.of(losses, gates).sum() / count, by_loop
