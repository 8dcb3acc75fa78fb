"""A run in two pictures: loss over time by exit, and what each exit is worth at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eecore.errors import TrainingError
from eecore.training.libraries import library
from eecore.training.run_log import EVALUATIONS_FILE, STEPS_FILE, read_log

__all__ = ["plot_run"]

SMOOTHED_POINTS = 200


def plot_run(directory: Path, out: Path) -> None:
    """Draw the logs of a run's directory into ``out`` (.svg, .png or .pdf).

    Left: the loss in training. Right: held-out loss, accuracy and agreement with the last layer by
    exit layer, at the last evaluation.
    """
    figure_module: Any = library("matplotlib.figure")
    steps, evaluations = read_log(directory / STEPS_FILE), read_log(directory / EVALUATIONS_FILE)
    if not steps["step"]:
        raise TrainingError(f"{directory / STEPS_FILE}: expected at least one step, got none")
    figure = figure_module.Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    exits = [name for name in steps if name.startswith("loss_exit_")]
    for index, name in enumerate(["loss", *exits]):
        x, y = _smoothed(steps["step"], steps[name])
        if y:
            shade = "black" if name == "loss" else (0.1, 0.3, 1, 0.15 + 0.85 * index / len(exits))
            label = name if index in (0, 1, len(exits)) else None
            left.plot(x, y, color=shade, linewidth=1, label=label and label.replace("_", " "))
    left.set(xlabel="step", ylabel="loss in training")
    left.legend()
    if evaluations["step"]:
        layers = range(1, len(exits) + 1)
        for measure in ("agreement", "accuracy"):
            values = [evaluations[f"{measure}_exit_{layer}"][-1] for layer in layers]
            right.plot(layers, values, marker="o", label=measure)
        right.set(xlabel="exit layer", ylabel="share of held-out tokens", ylim=(0, 1.02))
        right.legend(loc="lower right")
    figure.savefig(str(out))


def _smoothed(
    steps: list[float | None], values: list[float | None]
) -> tuple[list[float], list[float]]:
    """Means over stretches, at most SMOOTHED_POINTS of them, of the steps that have a value."""
    points = [(s, v) for s, v in zip(steps, values, strict=True) if s is not None and v is not None]
    width = max(1, len(points) // SMOOTHED_POINTS)
    stretches = [points[start : start + width] for start in range(0, len(points), width)]
    means = [[sum(column) / len(part) for column in zip(*part, strict=True)] for part in stretches]
    return [mean[0] for mean in means], [mean[1] for mean in means]
