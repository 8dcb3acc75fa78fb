"""The settings of a training run as one frozen object, which can be written down and read back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from eecore.errors import TrainingError
from eecore.lab.training.calm import CalmLoss
from eecore.lab.training.early_exit_loss import EarlyExitLoss, LastLayerLoss, LossWeights
from eecore.lab.training.layer_dropout import LayerDropout
from eecore.lab.training.settings import Checks, check
from eecore.tensor_files import shown_name
from eecore.values import MIN_POSITIVE, is_whole, is_within, shown

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LoraSettings", "RunConfig", "TrainingConfig"]

T = TypeVar("T")

LOSSES: dict[str, type[EarlyExitLoss | CalmLoss | LastLayerLoss]] = {
    "layerskip": EarlyExitLoss,
    "calm": CalmLoss,
    "last": LastLayerLoss,
}
MAX_STEPS = 2**40
MAX_SIZE = 2**20
"""The largest batch and rank."""
# What a resumed run may set anew: none of it changes what is learnt.
FREE_TO_CHANGE = ("checkpoint_steps", "checkpoint_seconds", "evaluate_steps", "evaluate_batches")


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters on every linear layer but the head, by peft; the rest is frozen."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        checks = {
            "rank": (is_whole(self.rank, 1, MAX_SIZE), "1 or more"),
            "alpha": (is_within(self.alpha, MIN_POSITIVE, math.inf), "above 0"),
            "dropout": (is_within(self.dropout, 0.0, 0.99), "0..0.99"),
        }
        check(checks, self, "LoraSettings.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """AdamW with warm-up and a cosine: what every run has, of a model or a draft head.

    Args:
        steps: T.
        batch_size: sequences a step.
        learning_rate: after the warm-up.
        warmup_steps: the rate grows linearly over them.
        final_learning_rate: the cosine's end, as a share of ``learning_rate``.
        weight_decay: of matrices; vectors have none.
        beta1: of AdamW.
        beta2: of AdamW.
        max_grad_norm: longer gradients are scaled down to it.
        precision: ``float32``, or ``bfloat16`` for autocast over float32 weights.
        seed: of everything random.
        checkpoint_steps: save every so many steps; None for never by steps.
        checkpoint_seconds: save when so long has passed; None for never by time.
        evaluate_steps: measure on the held-out data every so many steps, and at the end.
    """

    steps: int
    batch_size: int = 16
    learning_rate: float = 1e-4
    warmup_steps: int = 0
    final_learning_rate: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    checkpoint_steps: int | None = None
    checkpoint_seconds: float | None = 600.0
    evaluate_steps: int = 500

    def __post_init__(self) -> None:
        check(self._checks(), self)

    def _checks(self) -> Checks:
        """Each setting with whether it can be used, and what is expected."""
        steps, seconds = self.checkpoint_steps, self.checkpoint_seconds
        return {
            "steps": (is_whole(self.steps, 1, MAX_STEPS), "1 or more"),
            "batch_size": (is_whole(self.batch_size, 1, MAX_SIZE), "1 or more"),
            "learning_rate": (
                is_within(self.learning_rate, MIN_POSITIVE, 1e6),
                "a number above 0",
            ),
            "warmup_steps": (
                is_whole(self.steps, 1) and is_whole(self.warmup_steps, 0, self.steps),
                f"0..steps={shown(self.steps)}",
            ),
            "final_learning_rate": (is_within(self.final_learning_rate, 0.0, 1.0), "0..1"),
            "weight_decay": (is_within(self.weight_decay, 0.0, 1e6), "0 or more"),
            "beta1": (is_within(self.beta1, 0.0, 1.0) and self.beta1 < 1, "0 up to below 1"),
            "beta2": (is_within(self.beta2, 0.0, 1.0) and self.beta2 < 1, "0 up to below 1"),
            "max_grad_norm": (
                is_within(self.max_grad_norm, MIN_POSITIVE, math.inf),
                "a number above 0",
            ),
            "precision": (self.precision in ("float32", "bfloat16"), "float32 or bfloat16"),
            "seed": (is_whole(self.seed, 0, 2**40), f"0..{2**40}"),
            "checkpoint_steps": (steps is None or is_whole(steps, 1), "1 or more, or None"),
            "checkpoint_seconds": (
                seconds is None or is_within(seconds, 0, math.inf),
                "0 or more, or None",
            ),
            "evaluate_steps": (is_whole(self.evaluate_steps, 1, MAX_STEPS), "1 or more"),
        }

    def learning_rate_at(self, step: int) -> float:
        """The rate of step 0..steps-1: a linear warm-up, then half a cosine."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        span = max(self.steps - self.warmup_steps - 1, 1)
        cosine = (1 + math.cos(math.pi * (step - self.warmup_steps) / span)) / 2
        floor = self.final_learning_rate
        return self.learning_rate * (floor + (1 - floor) * cosine)

    def autocast(self, device: torch.device) -> torch.autocast:
        """What products are computed under."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold; :meth:`from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The config of :meth:`to_dict`; a TrainingError names a setting that is not known."""
        if not isinstance(values, Mapping):
            raise TrainingError(f"expected the settings of {cls.__name__}, got {shown(values)}")
        strangers = sorted(map(str, set(values) - {each.name for each in fields(cls)}))
        if strangers:
            raise TrainingError(
                f"{shown_name(strangers[0])}: expected a setting of {cls.__name__}, got that"
            )
        return built(cls, values)

    def difference(self, other: RunConfig) -> str | None:
        """The first setting that makes ``other`` learn something else; None when there is none."""
        for name in (each.name for each in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and name not in FREE_TO_CHANGE:
                return f"{name}={mine!r} against {theirs!r}"
        return None


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(RunConfig):
    """A run of a model: a loss over exits, perhaps layer dropout, perhaps LoRA.

    The defaults are LayerSkip's for fine-tuning on a task (§5: p_max = 0.2, e_scale = 1, C_grad).

    Args:
        loss: :class:`EarlyExitLoss` (LayerSkip), :class:`CalmLoss` or :class:`LastLayerLoss`.
        layer_dropout: None for none.
        lora: None trains every weight.
        relative_rate: whether each weight's rate is ``learning_rate`` times the root mean square of
            what it starts from (vectors': a tenth of that), as T5 is made for: its queries start
            small, since they hold the scale of the scores, and its embeddings large. (Shazeer &
            Stern 2018 §8.)
        gradient_checkpointing: compute the layers' inner states again in the backward pass.
        evaluate_batches: on how many batches of the held-out data the exits are scored.
    """

    loss: LossWeights = field(default_factory=EarlyExitLoss)
    layer_dropout: LayerDropout | None = field(default_factory=lambda: LayerDropout(0.2))
    lora: LoraSettings | None = None
    relative_rate: bool = False
    gradient_checkpointing: bool = False
    evaluate_batches: int = 16

    def _checks(self) -> Checks:
        dropout, lora = self.layer_dropout, self.lora
        return super()._checks() | {
            "loss": (type(self.loss) in LOSSES.values(), "EarlyExitLoss, CalmLoss, LastLayerLoss"),
            "layer_dropout": (
                dropout is None or isinstance(dropout, LayerDropout),
                "LayerDropout or None",
            ),
            "lora": (lora is None or isinstance(lora, LoraSettings), "LoraSettings or None"),
            "relative_rate": (isinstance(self.relative_rate, bool), "True or False"),
            "gradient_checkpointing": (
                isinstance(self.gradient_checkpointing, bool),
                "True or False",
            ),
            "evaluate_batches": (is_whole(self.evaluate_batches, 1, MAX_STEPS), "1 or more"),
        }

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        kind = next(name for name, loss in LOSSES.items() if type(self.loss) is loss)
        return {**values, "loss": {"kind": kind, **values["loss"]}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        parts = dict(values) if isinstance(values, Mapping) else {}
        loss = parts.get("loss")
        if isinstance(loss, Mapping):
            kind = loss.get("kind")
            if not isinstance(kind, str) or kind not in LOSSES:
                raise TrainingError(f"loss: expected one of {', '.join(LOSSES)}, got {shown(kind)}")
            settings = {name: value for name, value in loss.items() if name != "kind"}
            parts["loss"] = built(LOSSES[kind], settings)
        for name, part in (("layer_dropout", LayerDropout), ("lora", LoraSettings)):
            if isinstance(parts.get(name), Mapping):
                parts[name] = built(part, parts[name])
        return super().from_dict(parts or values)


def built(kind: Callable[..., T], settings: Mapping[str, Any]) -> T:
    """An object of settings; a TrainingError where it has no such settings."""
    try:
        return kind(**settings)
    except TypeError as error:
        raise TrainingError(f"{getattr(kind, '__name__', kind)}: {error}") from None
