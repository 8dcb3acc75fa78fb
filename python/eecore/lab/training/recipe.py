"""The settings of a training run as one frozen object, which can be written down and read back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from eecore.errors import TrainingError
from eecore.lab.training.calm import CalmLoss
from eecore.lab.training.early_exit_loss import EarlyExitLoss, LastLayerLoss, LossWeights
from eecore.lab.training.layer_dropout import LayerDropout
from eecore.tensor_files import shown_name
from eecore.values import MIN_POSITIVE, is_whole, is_within, shown

__all__ = ["LoraSettings", "TrainingConfig"]

LOSSES: dict[str, type[EarlyExitLoss | CalmLoss | LastLayerLoss]] = {
    "layerskip": EarlyExitLoss,
    "calm": CalmLoss,
    "last": LastLayerLoss,
}
MOST_STEPS, MOST_BATCH = 2**40, 2**20
AT_LEAST_ONE = "1 or more"
# What a resumed run may set anew: none of it changes what is learnt.
FREE_TO_CHANGE = ("checkpoint_steps", "checkpoint_seconds", "evaluate_steps", "evaluate_batches")


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters on every linear layer but the head, by peft; the rest is frozen."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name, ok, expected in (
            ("rank", is_whole(self.rank, 1, MOST_BATCH), AT_LEAST_ONE),
            ("alpha", is_within(self.alpha, MIN_POSITIVE, math.inf), "above 0"),
            ("dropout", is_within(self.dropout, 0.0, 0.99), "0..0.99"),
        ):
            if not ok:
                raise TrainingError(
                    f"LoraSettings.{name}: expected {expected}, got {shown(getattr(self, name))}"
                )


@dataclass(frozen=True)
class TrainingConfig:
    """AdamW with warm-up and a cosine, a loss over exits, perhaps layer dropout, perhaps LoRA.

    The defaults are LayerSkip's for fine-tuning on a task (§5: p_max = 0.2, e_scale = 1, C_grad).

    Args:
        steps: T.
        batch_size: sequences a step.
        learning_rate: after the warm-up.
        warmup_steps: the rate grows linearly over them.
        relative_rate: whether each weight's rate is ``learning_rate`` times the root mean square of
            what it starts from (vectors': a tenth of that), as T5 is made for: its queries start
            small, since they hold the scale of the scores, and its embeddings large. (Shazeer &
            Stern 2018 §8.)
        final_learning_rate: the cosine's end, as a share of ``learning_rate``.
        weight_decay: of matrices; vectors have none.
        beta1: of AdamW.
        beta2: of AdamW.
        max_grad_norm: longer gradients are scaled down to it.
        loss: :class:`EarlyExitLoss` (LayerSkip), :class:`CalmLoss` or :class:`LastLayerLoss`.
        layer_dropout: None for none.
        lora: None trains every weight.
        precision: ``float32``, or ``bfloat16`` for autocast over float32 weights.
        gradient_checkpointing: compute the layers' inner states again in the backward pass.
        seed: of everything random.
        checkpoint_steps: save every so many steps; None for never by steps.
        checkpoint_seconds: save when so long has passed; None for never by time.
        evaluate_steps: score every exit on the held-out data every so many steps, and at the end.
        evaluate_batches: on how many batches of it.
    """

    steps: int
    batch_size: int = 16
    learning_rate: float = 1e-4
    warmup_steps: int = 0
    relative_rate: bool = False
    final_learning_rate: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    loss: LossWeights = field(default_factory=EarlyExitLoss)
    layer_dropout: LayerDropout | None = field(default_factory=lambda: LayerDropout(0.2))
    lora: LoraSettings | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    seed: int = 0
    checkpoint_steps: int | None = None
    checkpoint_seconds: float | None = 600.0
    evaluate_steps: int = 500
    evaluate_batches: int = 16

    def __post_init__(self) -> None:
        positive, share = "a number above 0", "0..1"
        for name, ok, expected in (
            ("steps", is_whole(self.steps, 1, MOST_STEPS), AT_LEAST_ONE),
            ("batch_size", is_whole(self.batch_size, 1, MOST_BATCH), AT_LEAST_ONE),
            ("learning_rate", is_within(self.learning_rate, MIN_POSITIVE, 1e6), positive),
            (
                "warmup_steps",
                is_whole(self.steps, 1) and is_whole(self.warmup_steps, 0, self.steps),
                f"0..steps={shown(self.steps)}",
            ),
            ("relative_rate", isinstance(self.relative_rate, bool), "True or False"),
            ("final_learning_rate", is_within(self.final_learning_rate, 0.0, 1.0), share),
            ("weight_decay", is_within(self.weight_decay, 0.0, 1e6), "0 or more"),
            ("beta1", is_within(self.beta1, 0.0, 1.0) and self.beta1 < 1, "0 up to below 1"),
            ("beta2", is_within(self.beta2, 0.0, 1.0) and self.beta2 < 1, "0 up to below 1"),
            ("max_grad_norm", is_within(self.max_grad_norm, MIN_POSITIVE, math.inf), positive),
            ("loss", type(self.loss) in LOSSES.values(), "EarlyExitLoss, CalmLoss, LastLayerLoss"),
            (
                "layer_dropout",
                self.layer_dropout is None or isinstance(self.layer_dropout, LayerDropout),
                "LayerDropout or None",
            ),
            (
                "lora",
                self.lora is None or isinstance(self.lora, LoraSettings),
                "LoraSettings or None",
            ),
            ("precision", self.precision in ("float32", "bfloat16"), "float32 or bfloat16"),
            (
                "gradient_checkpointing",
                isinstance(self.gradient_checkpointing, bool),
                "True or False",
            ),
            ("seed", is_whole(self.seed, 0, 2**40), f"0..{2**40}"),
            (
                "checkpoint_steps",
                self.checkpoint_steps is None or is_whole(self.checkpoint_steps, 1),
                "1 or more, or None",
            ),
            (
                "checkpoint_seconds",
                self.checkpoint_seconds is None or is_within(self.checkpoint_seconds, 0, math.inf),
                "0 or more, or None",
            ),
            ("evaluate_steps", is_whole(self.evaluate_steps, 1, MOST_STEPS), AT_LEAST_ONE),
            (
                "evaluate_batches",
                is_whole(self.evaluate_batches, 1, MOST_STEPS),
                AT_LEAST_ONE,
            ),
        ):
            if not ok:
                got = shown(getattr(self, name))
                raise TrainingError(f"{name}: expected {expected}, got {got}")

    def learning_rate_at(self, step: int) -> float:
        """The rate of step 0..steps-1: a linear warm-up, then half a cosine."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        span = max(self.steps - self.warmup_steps - 1, 1)
        cosine = (1 + math.cos(math.pi * (step - self.warmup_steps) / span)) / 2
        floor = self.final_learning_rate
        return self.learning_rate * (floor + (1 - floor) * cosine)

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold; :meth:`from_dict` reads it back."""
        values = asdict(self)
        kind = next(name for name, loss in LOSSES.items() if type(self.loss) is loss)
        values["loss"] = {"kind": kind, **values["loss"]}
        return values

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> TrainingConfig:
        """The config of :meth:`to_dict`; a TrainingError names a setting that is not known."""
        if not isinstance(values, Mapping):
            raise TrainingError(f"expected the settings of TrainingConfig, got {shown(values)}")
        known = {each.name for each in fields(TrainingConfig)}
        strangers = sorted(map(str, set(values) - known))
        if strangers:
            raise TrainingError(
                f"{shown_name(strangers[0])}: expected a setting of TrainingConfig, got that"
            )
        built = dict(values)
        if isinstance(built.get("loss"), Mapping):
            settings = dict(built["loss"])
            kind = settings.pop("kind", None)
            if not isinstance(kind, str) or kind not in LOSSES:
                raise TrainingError(f"loss: expected one of {', '.join(LOSSES)}, got {shown(kind)}")
            built["loss"] = _built(LOSSES[kind], settings)
        for name, parts in (("layer_dropout", LayerDropout), ("lora", LoraSettings)):
            if isinstance(built.get(name), Mapping):
                built[name] = _built(parts, built[name])
        return _built(TrainingConfig, built)  # type: ignore[no-any-return]

    def difference(self, other: TrainingConfig) -> str | None:
        """The first setting that makes ``other`` learn something else; None when there is none."""
        for name in (each.name for each in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and name not in FREE_TO_CHANGE:
                return f"{name}={mine!r} against {theirs!r}"
        return None


def _built(kind: Any, settings: Mapping[str, Any]) -> Any:
    try:
        return kind(**settings)
    except TypeError as error:
        raise TrainingError(f"{kind.__name__}: {error}") from None
