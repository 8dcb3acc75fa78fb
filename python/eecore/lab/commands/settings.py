"""Options that the training commands share, and the settings that they print."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from eecore.cli.failures import UsageError
from eecore.cli.loading import SEEDS
from eecore.cli.options import option

MAX_STEPS, MAX_BATCH = 1 << 40, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The learning rates and the batches."""

    PANEL: ClassVar[str] = "Optimizer"
    learning_rate: float = option(1e-4)
    schedule: Literal["cosine", "linear", "constant"] = option(
        "cosine", "How the learning rate falls after the warm-up."
    )
    final_learning_rate: float = option(
        0.1, "Rate at the schedule's end, as a share of --learning-rate.", min=0, max=1
    )
    warmup_steps: int | None = option(None, min=0, max=MAX_STEPS, show_default="3 %")
    batch_size: int = option(16, "Sequences a step.", min=1, max=MAX_BATCH)
    seed: int = option(0, min=0, max=SEEDS)

    @property
    def of_config(self) -> dict[str, Any]:
        """The settings of a run's config that were given, without the warm-up."""
        names = ("learning_rate", "schedule", "final_learning_rate", "batch_size", "seed")
        values = ((name, getattr(self, name)) for name in names)
        return {name: value for name, value in values if value is not None}


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The options for resuming a run and for its logs."""

    PANEL: ClassVar[str] = "Run"
    resume: bool = option(False, "Continue the run that was stopped.")
    tensorboard: bool = option(False, "Also write logs for TensorBoard.")


def want_one_process(command: str) -> None:
    """Refuse several processes of torchrun, each of which would write the same files.

    Raises:
        UsageError: there are several processes.
    """
    from eecore.lab.training.processes import num_processes

    if num_processes() > 1:
        raise UsageError(f"{command}: expected one process, got several of torchrun")


def say_settings(panels: Iterable[Any], **known: object) -> None:
    """Print the settings of a run on stderr, one a line, by the names of their options.

    Args:
        panels: the options, as they were given.
        **known: further settings, and settings whose value differs from the option's.
    """
    given = {
        each.name: getattr(panel, each.name)
        for panel in panels
        for each in dataclasses.fields(panel)
    }
    for name, value in {**given, **known}.items():
        print(f"{name.replace('_', '-')}: {_shown(value)}", file=sys.stderr)


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
