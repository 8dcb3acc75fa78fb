"""A run in two pictures: loss over time by exit, and what each exit is worth at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eecore.errors import TrainingError
from eecore.files import replacing
from eecore.lab.training.libraries import library
from eecore.lab.training.run_log import EVALUATIONS_FILE, STEPS_FILE, read_log

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
    drawn = [name for name in exits if any(value is not None for value in steps[name])]
    for name in drawn:
        layer = exits.index(name) + 1
        label = f"exit {layer}" if name in (drawn[0], drawn[-1]) else None
        shade = (0.8 - 0.7 * layer / len(exits), 0.6 * (1 - layer / len(exits)) + 0.2, 0.7)
        left.plot(*_smoothed(steps["step"], steps[name]), color=shade, linewidth=1, label=label)
    x, y = _smoothed(steps["step"], steps["loss"])
    left.plot(x, y, color="black", linewidth=0.8, linestyle="--", label="weighted")
    left.set(xlabel="step", ylabel="loss in training")
    left.legend()
    if evaluations["step"]:
        layers = range(1, len(exits) + 1)
        for measure in ("agreement", "accuracy"):
            values = [evaluations[f"{measure}_exit_{layer}"][-1] for layer in layers]
            right.plot(layers, values, marker="o", label=measure)
        right.set(xlabel="exit layer", ylabel="share of held-out tokens", ylim=(0, 1.02))
        right.legend(loc="lower right")
    with replacing(out) as partial:
        figure.savefig(str(partial))


def _smoothed(
    steps: list[float | None], values: list[float | None]
) -> tuple[list[float], list[float]]:
    """Means over stretches, at most SMOOTHED_POINTS of them, of the steps that have a value."""
    points = [(s, v) for s, v in zip(steps, values, strict=True) if s is not None and v is not None]
    width = max(1, len(points) // SMOOTHED_POINTS)
    stretches = [points[start : start + width] for start in range(0, len(points), width)]
    means = [[sum(column) / len(part) for column in zip(*part, strict=True)] for part in stretches]
    return [mean[0] for mean in means], [mean[1] for mean in means]
