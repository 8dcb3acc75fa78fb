"""The settings of a training run as one frozen object."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import torch

from eecore.errors import TrainingError
from eecore.lab.training.calm import CalmLoss
from eecore.lab.training.early_exit_loss import EarlyExitLoss, LastLayerLoss, LossWeights
from eecore.lab.training.layer_dropout import LayerDropout
from eecore.lab.training.looped_loss import GateLoss, LoopedLoss
from eecore.values import (
    FLAG,
    MIN_POSITIVE,
    check_fields,
    choice,
    instance,
    real,
    shown,
    whole,
)

Loss = LossWeights | LoopedLoss | GateLoss
"""What exits learn by: weights of their losses, or a loss of loops and their gate."""
LOSSES: dict[str, type[EarlyExitLoss | CalmLoss | LastLayerLoss | LoopedLoss | GateLoss]] = {
    "layerskip": EarlyExitLoss,
    "calm": CalmLoss,
    "last": LastLayerLoss,
    "looped": LoopedLoss,
    "gate": GateLoss,
}
MAX_STEPS = 2**40
MAX_SIZE = 2**20
"""The largest batch size and rank."""
BELOW_1 = real(0.0, math.nextafter(1.0, 0.0), expected="0 up to below 1")
# Settings that a resumed run may change: none of them changes what is learnt.
FREE_TO_CHANGE = (
    "checkpoint_steps",
    "checkpoint_seconds",
    "evaluate_steps",
    "evaluate_batches",
    "tensorboard",
)


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters on every linear layer but the head, by peft; the other weights are
    frozen.
    """

    rank: Annotated[int, whole(1, MAX_SIZE)] = 16
    alpha: Annotated[float, real(MIN_POSITIVE, math.inf, expected="above 0")] = 32.0
    dropout: Annotated[float, real(0.0, 0.99)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, TrainingError, "LoraSettings.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of every run, of a model or a draft head: AdamW under a schedule of rates.

    Args:
        steps: T, the number of steps.
        batch_size: sequences a step.
        learning_rate: after the warm-up.
        schedule: how the rate falls after the warm-up: half a ``cosine``, a ``linear`` line, or not
            at all, ``constant``.
        warmup_steps: steps over which the rate grows linearly.
        final_learning_rate: the schedule's end, as a share of ``learning_rate``.
        weight_decay: for matrices; vectors have none.
        beta1: AdamW's.
        beta2: AdamW's.
        max_grad_norm: longer gradients are scaled down to this.
        precision: ``float32``, or ``bfloat16`` for autocast over float32 weights.
        seed: for all random numbers.
        checkpoint_steps: steps between two saves; None for never by steps.
        checkpoint_seconds: seconds between two saves; None for never by time.
        evaluate_steps: steps between two evaluations; the last one is at the end.
        tensorboard: write the logs for TensorBoard too.
    """

    steps: Annotated[int, whole(1, MAX_STEPS)]
    batch_size: Annotated[int, whole(1, MAX_SIZE)] = 16
    learning_rate: Annotated[float, real(MIN_POSITIVE, 1e6, expected="a number above 0")] = 1e-4
    schedule: Annotated[
        Literal["cosine", "linear", "constant"], choice("cosine", "linear", "constant")
    ] = "cosine"
    warmup_steps: Annotated[int, whole(0, MAX_STEPS)] = 0
    final_learning_rate: Annotated[float, real(0.0, 1.0)] = 0.1
    weight_decay: Annotated[float, real(0.0, 1e6, expected="0 or more")] = 0.1
    beta1: Annotated[float, BELOW_1] = 0.9
    beta2: Annotated[float, BELOW_1] = 0.95
    max_grad_norm: Annotated[float, real(MIN_POSITIVE, math.inf, expected="a number above 0")] = 1.0
    precision: Annotated[Literal["float32", "bfloat16"], choice("float32", "bfloat16")] = "float32"
    seed: Annotated[int, whole(0, 2**40)] = 0
    checkpoint_steps: Annotated[int | None, whole(1, MAX_STEPS)] = None
    checkpoint_seconds: Annotated[float | None, real(0.0, math.inf, expected="0 or more")] = 600.0
    evaluate_steps: Annotated[int, whole(1, MAX_STEPS)] = 500
    tensorboard: Annotated[bool, FLAG] = False

    def __post_init__(self) -> None:
        check_fields(self, TrainingError)
        if self.warmup_steps > self.steps:
            raise TrainingError(
                f"warmup_steps: expected 0..steps={self.steps}, got {self.warmup_steps}"
            )

    def learning_rate_at(self, step: int) -> float:
        """The rate of step 0..steps-1: a linear warm-up, then the schedule."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        done = (step - self.warmup_steps) / max(self.steps - self.warmup_steps - 1, 1)
        left = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        floor = self.final_learning_rate
        return self.learning_rate * (floor + (1 - floor) * left)

    def autocast(self, device: torch.device) -> torch.autocast:
        """The autocast that products are computed under."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def to_dict(self) -> dict[str, Any]:
        """The settings for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(RunConfig):
    """The settings of a model's run: a loss over exits, perhaps layer dropout, perhaps LoRA.

    The defaults are LayerSkip's for fine-tuning on a task (§5: p_max = 0.2, e_scale = 1, C_grad).

    Args:
        loss: :class:`EarlyExitLoss` (LayerSkip), :class:`CalmLoss` or :class:`LastLayerLoss`; of a
            looped model also :class:`LoopedLoss` and, for the gate alone, :class:`GateLoss`.
        layer_dropout: None for none.
        lora: None trains every weight.
        relative_rate: whether each weight's rate is ``learning_rate`` times the root mean square of
            its initial values (for vectors: a tenth of that), as suits T5: its queries start small,
            since they hold the scale of the scores, and its embeddings large (Shazeer & Stern 2018
            §8).
        gradient_checkpointing: recompute the layers' inner states in the backward pass.
        accumulate: pieces in which each process computes its share of a batch, one after the other;
            the result is that of the whole batch.
        packing: positions of a row, which several sequences share; ``batch_size`` then counts rows.
            None for a row for each sequence.
        evaluate_batches: held-out batches that the exits are scored on.
    """

    loss: Loss = field(default_factory=EarlyExitLoss)
    layer_dropout: Annotated[LayerDropout | None, instance(LayerDropout)] = field(
        default_factory=lambda: LayerDropout(0.2)
    )
    lora: Annotated[LoraSettings | None, instance(LoraSettings)] = None
    relative_rate: Annotated[bool, FLAG] = False
    gradient_checkpointing: Annotated[bool, FLAG] = False
    accumulate: Annotated[int, whole(1, MAX_SIZE)] = 1
    packing: Annotated[int | None, whole(1, MAX_STEPS)] = None
    evaluate_batches: Annotated[int, whole(1, MAX_STEPS)] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.loss) not in LOSSES.values():
            expected = ", ".join(kind.__name__ for kind in LOSSES.values())
            raise TrainingError(f"loss: expected {expected}, got {shown(self.loss)}")
        if self.accumulate > self.batch_size:
            raise TrainingError(
                f"accumulate: expected 1..batch_size={self.batch_size}, got {self.accumulate}"
            )

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        kind = next(name for name, loss in LOSSES.items() if type(self.loss) is loss)
        return {**values, "loss": {"kind": kind, **values["loss"]}}
