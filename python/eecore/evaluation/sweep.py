"""Which self-speculation is fastest on one's own prompts: a grid of exit layers and drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eecore.errors import RequestError
from eecore.evaluation import plots
from eecore.evaluation.tables import markdown_table
from eecore.evaluation.timed import TimedRun, time_policies
from eecore.exits import Auto, SelfSpeculative
from eecore.files import write_text
from eecore.generation import Model

__all__ = ["Sweep", "SweepCell", "default_exit_layers", "sweep_speculation"]


@dataclass(frozen=True)
class SweepCell:
    """One pair of the grid."""

    exit_layer: int
    num_drafts: int
    acceptance: float | None
    tokens_per_s: float
    speedup: float
    """Over full depth, in the same rounds."""


@dataclass(frozen=True)
class Sweep:
    """The whole grid, and what ``Auto`` made of the same prompts."""

    num_layers: int
    full_tokens_per_s: float
    cells: tuple[SweepCell, ...]
    auto_speedup: float
    """Of :class:`eecore.Auto` over full depth, in the same rounds."""

    @property
    def best(self) -> SweepCell:
        """The fastest pair, which may still be slower than full depth."""
        return max(self.cells, key=lambda cell: cell.speedup)

    def markdown(self) -> str:
        """Speed-up by exit layer (down) and number of drafts (across)."""
        drafts = sorted({cell.num_drafts for cell in self.cells})
        by_pair = {(cell.exit_layer, cell.num_drafts): cell for cell in self.cells}
        rows = [
            [str(layer), *(f"{by_pair[layer, d].speedup:.2f}" for d in drafts)]
            for layer in sorted({cell.exit_layer for cell in self.cells})
        ]
        head = ["exit layer", *(f"d={d}" for d in drafts)]
        return markdown_table(head, rows, text_columns=0)

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        stored = {**asdict(self), "best": asdict(self.best)}
        write_text(path, json.dumps(stored, indent=2) + "\n")

    def plot(self, path: str | Path) -> None:
        """A heat map of the speed-ups, as a picture of the format that the file's name says."""
        drafts = sorted({cell.num_drafts for cell in self.cells})
        layers = sorted({cell.exit_layer for cell in self.cells})
        by_pair = {(cell.exit_layer, cell.num_drafts): cell.speedup for cell in self.cells}
        grid = [[by_pair[layer, d] for d in drafts] for layer in layers]
        figure = plots.figure((1.5 + 0.8 * len(drafts), 1.5 + 0.5 * len(layers)))
        axes: Any = figure.subplots()
        image = axes.imshow(grid, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(drafts)), drafts)
        axes.set_yticks(range(len(layers)), layers)
        axes.set_xlabel("drafts a round")
        axes.set_ylabel("exit layer")
        lowest, highest = min(map(min, grid)), max(map(max, grid))
        for row, values in enumerate(grid):
            for column, value in enumerate(values):
                dark = value < (lowest + highest) / 2
                colour = "white" if dark else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour)
        figure.colorbar(image, label="speed-up over full depth")
        figure.tight_layout()
        plots.save(figure, path)


def default_exit_layers(num_layers: int) -> list[int]:
    """An eighth to three quarters of the layers, in steps of an eighth."""
    return sorted({max(1, min(num_layers - 1, num_layers * i // 8)) for i in range(1, 7)})


def sweep_speculation(
    model: Model,
    prompts: Sequence[str],
    *,
    exit_layers: Sequence[int] | None = None,
    num_drafts: Sequence[int] = (2, 4, 6, 8),
    max_tokens: int = 64,
    batch_size: int = 1,
    rounds: int = 1,
    progress: Callable[[int, TimedRun], None] | None = None,
) -> Sweep:
    """Time :class:`eecore.SelfSpeculative` over exit layers and numbers of drafts, and
    :class:`eecore.Auto`, which chooses by itself.

    Args:
        model: from :func:`eecore.load`.
        prompts: like those to come.
        exit_layers: of the draft, 1..num_layers-1; :func:`default_exit_layers` when None.
        num_drafts: most drafts a round.
        max_tokens: new tokens a prompt.
        batch_size: prompts that run together.
        rounds: how often all pairs take their turn.
        progress: called with the round and a run when it has had its turn.
    """
    layers = default_exit_layers(model.config.num_layers) if exit_layers is None else exit_layers
    pairs = [(layer, drafts) for layer in layers for drafts in num_drafts]
    if not pairs:
        raise RequestError("sweep: expected some exit layers and numbers of drafts, got none")
    full, auto, *runs = time_policies(
        model,
        prompts,
        [Auto(), *(SelfSpeculative(layer, drafts) for layer, drafts in pairs)],
        max_tokens=max_tokens,
        batch_size=batch_size,
        rounds=rounds,
        progress=progress,
    )
    cells = [
        SweepCell(layer, drafts, run.acceptance, run.tokens_per_s, run.speedup_over(full))
        for (layer, drafts), run in zip(pairs, runs, strict=True)
    ]
    return Sweep(model.config.num_layers, full.tokens_per_s, tuple(cells), auto.speedup_over(full))
