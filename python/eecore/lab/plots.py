"""Plots of runs and evaluations with matplotlib, which the extra ``lab`` installs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eecore.errors import RequestError
from eecore.files.whole import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Columns = Mapping[str, Sequence[float | None]]

COLOURS = ("#253b45", "#5c7c8a", "#9db4c0", "#c8d5db")
IDEAL = "#a84510"
SMOOTHED_POINTS = 200
"""Points of a curve, at most."""


def figure(size: tuple[float, float]) -> Figure:
    """An empty figure, width and height in inches.

    Raises:
        RequestError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RequestError(
            "plot: expected the package matplotlib, got none (pip install '.[lab]' in a clone)"
        ) from None
    return Figure(figsize=size)


def save(drawn: Figure, path: str | Path) -> None:
    """Write a figure in the format of the file's suffix; the same figure gives the same SVG."""
    from matplotlib import rc_context

    metadata = {"Date": None} if Path(path).suffix == ".svg" else None
    with rc_context({"svg.hashsalt": "eecore"}), replacing(path) as partial:
        drawn.savefig(partial, metadata=metadata)


def bar_chart(
    path: str | Path,
    groups: Sequence[str],
    bars: Mapping[str, Sequence[float | None]],
    ideals: Mapping[str, Sequence[float | None]],
    *,
    label: str,
) -> None:
    """Groups of bars side by side, each bar with a line at its ideal height.

    Args:
        groups: names below the groups.
        bars: heights by the name of a series, one a group; None for no bar.
        ideals: heights of the lines, likewise.
        label: the vertical axis's.
    """
    drawn = figure((2.5 + 0.35 * len(groups) * len(bars), 3.6))
    axes: Any = drawn.subplots()
    width = 0.8 / len(bars)
    lines: list[tuple[float, float]] = []
    for number, (name, heights) in enumerate(bars.items()):
        left = [place - 0.4 + width * number for place in range(len(groups))]
        found = [(x, y) for x, y in zip(left, heights, strict=True) if y is not None]
        colour = COLOURS[number % len(COLOURS)]
        xs, ys = [x for x, _ in found], [y for _, y in found]
        axes.bar(xs, ys, width, align="edge", color=colour, label=name)
        lines += [(x, y) for x, y in zip(left, ideals[name], strict=True) if y is not None]
    if lines:
        heights, starts = [y for _, y in lines], [x for x, _ in lines]
        ends = [x + width for x in starts]
        axes.hlines(heights, starts, ends, color=IDEAL, linewidth=1.5, label="ideal")
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    drawn.tight_layout()
    save(drawn, path)


def heat_map(
    path: str | Path,
    values: Mapping[tuple[int, int], float],
    *,
    rows: str,
    columns: str,
    label: str,
) -> None:
    """Values by row and column as colours and numbers; missing values stay white."""
    down, across = (sorted({pair[axis] for pair in values}) for axis in (0, 1))
    drawn = figure((1.5 + 0.8 * len(across), 1.5 + 0.5 * len(down)))
    axes: Any = drawn.subplots()
    grid = [[values.get((row, column), nan) for column in across] for row in down]
    image = axes.imshow(grid, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(across)), across)
    axes.set_yticks(range(len(down)), down)
    axes.set(xlabel=columns, ylabel=rows)
    middle = (min(values.values()) + max(values.values())) / 2
    for (row, column), value in values.items():
        place, colour = (
            (across.index(column), down.index(row)),
            "white" if value < middle else "black",
        )
        axes.text(*place, f"{value:.2f}", ha="center", va="center", color=colour)
    drawn.colorbar(image, label=label)
    drawn.tight_layout()
    save(drawn, path)


def plot_run(path: Path, steps: Columns, evaluations: Columns) -> None:
    """Draw the logs of a model's run: training loss by step, and the exits at the last
    evaluation.
    """
    drawn = figure((11, 4))
    left, right = drawn.subplots(1, 2)
    exits = [name for name in steps if name.startswith("loss_exit_")]
    layers = [int(name.rpartition("_")[2]) for name in exits]
    trained = [name for name in exits if any(value is not None for value in steps[name])]
    for name in trained:
        layer = layers[exits.index(name)]
        label = f"exit {layer}" if name in (trained[0], trained[-1]) else None
        depth = layer / layers[-1]
        shade = (0.8 - 0.7 * depth, 0.6 * (1 - depth) + 0.2, 0.7)
        left.plot(*_smoothed(steps["step"], steps[name]), color=shade, linewidth=1, label=label)
    whole = _smoothed(steps["step"], steps["loss"])
    left.plot(*whole, color="black", linewidth=0.8, linestyle="--", label="weighted")
    left.set(xlabel="step", ylabel="loss in training")
    left.legend()
    if evaluations["step"]:
        for measure in ("agreement", "accuracy"):
            values = [evaluations[f"{measure}_exit_{layer}"][-1] for layer in layers]
            right.plot(layers, values, marker="o", label=measure)
        right.set(xlabel="exit layer", ylabel="share of held-out tokens", ylim=(0, 1.02))
        right.legend(loc="lower right")
    drawn.tight_layout()
    save(drawn, path)


def _smoothed(
    steps: Sequence[float | None], values: Sequence[float | None]
) -> tuple[list[float], list[float]]:
    """Means over stretches of the steps that have a value."""
    points = [(s, v) for s, v in zip(steps, values, strict=True) if s is not None and v is not None]
    width = max(1, len(points) // SMOOTHED_POINTS)
    stretches = [points[start : start + width] for start in range(0, len(points), width)]
    means = [[sum(column) / len(part) for column in zip(*part, strict=True)] for part in stretches]
    return [mean[0] for mean in means], [mean[1] for mean in means]
