"""The plot that README.md shows, from the figures of full depth and of exits.

It needs matplotlib: pip install '.[bench]'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.decode.decode import BITS
from bench.harness.results import Figures
from bench.harness.rows import Row, find, is_at, unique

COLOURS = {"f32": "#9db4c0", "bf16": "#5c7c8a", "int8": "#253b45", "int4": "#111c21"}
BITS_OF = {"float32": "f32", "bfloat16": "bf16", "int8": "int8"}
OURS = {"f32": "#f4b183", "bf16": "#e07b39", "int8": "#a84510", "int4": "#6b2a06"}


def draw_speeds(axes: Any, rows: list[Row], model: str) -> None:
    """Bars of tokens/s by engine, one colour for each number of bits."""
    engines = unique(rows, "engine")
    width = 0.8 / len(BITS)
    for i, engine in enumerate(engines):
        for j, bits in enumerate(BITS):
            row = find(rows, model=model, engine=engine, bits=bits, threads=1, batch=1)
            if row is None:
                continue
            colours = OURS if engine == "eecore" else COLOURS
            speed, at = row["tokens_per_s_best"], i + (j - 1.5) * width
            axes.bar(at, speed, width, color=colours[bits])
            axes.annotate(
                bits, (at, 0), (0, 3), textcoords="offset points",
                ha="center", rotation=90, fontsize=7, color="white",
            )  # fmt: skip
            axes.annotate(
                f"{speed:.0f}", (at, speed), (0, 2), textcoords="offset points",
                ha="center", fontsize=7,
            )  # fmt: skip
    axes.set_xticks(range(len(engines)), engines, fontsize=8)
    axes.set_title(f"{model}: tokens/s, one sequence, one thread", fontsize=9)


def draw_exits(axes: Any, rows: list[Row]) -> None:
    """Time of exits and drafts over the predicted time, one sequence, one thread."""
    axes.plot([0, 1], [0, 1], color="#888888", linewidth=0.8)
    for model, marker in zip(unique(rows, "model"), "os^v", strict=False):
        for weights, bits in BITS_OF.items():
            where = {"model": model, "weights": weights, "threads": 1, "batch": 1}
            chosen = [row for row in rows if is_at(row, where)]
            full = find(chosen, mode="Full()")
            shown = [row for row in chosen if row["of_cut"] is not None]
            if full is None:
                continue
            axes.plot(
                [row["of_cut"] * row["token_ms"] / full["token_ms"] for row in shown],
                [row["token_ms"] / full["token_ms"] for row in shown],
                marker, color=OURS[bits], markersize=4, label=f"{model} {bits}",
            )  # fmt: skip
    axes.set_xlabel("predicted, of full depth", fontsize=8)
    axes.set_ylabel("time of a token, of full depth", fontsize=8)
    axes.set_title("exits and drafts: time against prediction", fontsize=9)
    axes.legend(fontsize=5)


def draw(decode: Figures, depth: Figures, file: Path) -> None:
    """Draw the plot; the same figures and the same matplotlib give the same file."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "eecore"
    from matplotlib import pyplot

    models = unique(decode["rows"], "model")
    figure, axes = pyplot.subplots(1, len(models) + 1, figsize=(4.5 * (len(models) + 1), 3.4))
    for place, model in zip(axes, models, strict=False):
        draw_speeds(place, decode["rows"], model)
    draw_exits(axes[-1], depth["modes"])
    for place in axes:
        place.tick_params(labelsize=8)
        place.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
