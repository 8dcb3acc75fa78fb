"""Pictures of an evaluation; they need matplotlib, which comes with an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eecore.errors import RequestError
from eecore.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["bar_chart", "figure", "save"]

COLOURS = ("#253b45", "#5c7c8a", "#9db4c0", "#c8d5db")
IDEAL = "#a84510"


def figure(size: tuple[float, float]) -> Figure:
    """An empty figure, width and height in inches.

    Raises:
        RequestError: matplotlib is not there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RequestError(
            "plot: expected the package matplotlib, got none (pip install 'eecore[evaluate]')"
        ) from None
    return Figure(figsize=size)


def save(drawn: Figure, path: str | Path) -> None:
    """Write a figure in the format that the file's name says; the same figure, the same SVG."""
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
    """Groups of bars side by side, each with a line where it would ideally end.

    Args:
        path: the file to write.
        groups: names below the groups.
        bars: heights by the name of a colour, one a group; None for no bar.
        ideals: the same of the lines.
        label: of the vertical axis.
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
