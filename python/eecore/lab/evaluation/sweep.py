"""Which self-speculation is fastest on one's own prompts: a grid of exit layers and drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

from eecore.calibration.exit_scores import Scored, score_exits
from eecore.errors import ModelError, RequestError
from eecore.exits import Auto, SelfSpeculative
from eecore.files import write_text
from eecore.generation import Model
from eecore.json_fields import JsonFields
from eecore.lab import plots
from eecore.lab.evaluation.tables import markdown_table, number
from eecore.lab.evaluation.timed import TimedRun, time_policies
from eecore.models import exits_file
from eecore.planning.auto import best_exit_layers

__all__ = ["Sweep", "SweepCell", "default_exit_layers", "known_exits", "sweep_speculation"]


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
    """The grid as far as it was measured, and what ``Auto`` made of the same prompts."""

    num_layers: int
    full_tokens_per_s: float
    cells: tuple[SweepCell, ...]
    auto_speedup: float
    """Of :class:`eecore.Auto` over full depth, in the same rounds."""
    finished: bool = True
    """False where it was stopped: pairs are missing, or have had fewer rounds."""
    agreement: tuple[float, ...] = ()
    """How often each exit layer's likeliest token is the last one's, on what full depth wrote;
    empty where that was not asked for."""
    agreement_tokens: int = 0

    @property
    def best(self) -> SweepCell:
        """The fastest pair, which may still be slower than full depth."""
        return max(self.cells, key=lambda cell: cell.speedup)

    @property
    def speedups(self) -> dict[tuple[int, int], float]:
        """By exit layer and number of drafts."""
        return {(cell.exit_layer, cell.num_drafts): cell.speedup for cell in self.cells}

    @property
    def drafting_layers(self) -> tuple[int, ...]:
        """The exit layers with which :class:`eecore.Auto` drafts where this is recorded, the most
        promising first; none where none promises enough.
        """
        return best_exit_layers(self.agreement or None)

    def markdown(self) -> str:
        """Speed-up by exit layer (down) and number of drafts (across)."""
        layers, drafts = (sorted({pair[axis] for pair in self.speedups}) for axis in (0, 1))
        rows = [
            [str(layer), *(number(self.speedups.get((layer, d))) for d in drafts)]
            for layer in layers
        ]
        return markdown_table(["exit layer", *(f"d={d}" for d in drafts)], rows, text_columns=0)

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        stored = {**asdict(self), "best": asdict(self.best)}
        write_text(path, json.dumps(stored, indent=2) + "\n")

    def record(self, directory: Path) -> Path:
        """Write the agreement where :class:`eecore.Auto` reads it when the model is loaded: which
        layers may draft follows from it. What else is known of the exits stays.

        Args:
            directory: of the model, or its GGUF file.

        Returns:
            The file: ``exits.json`` in the directory, ``NAME.exits.json`` beside the file.

        Raises:
            RequestError: no agreement was measured.
            ModelError: the file that is there is not of this model.
        """
        if not self.agreement:
            raise RequestError("record: expected a sweep with its agreement, got one without")
        about = {
            **known_exits(directory, self.num_layers),
            "num_layers": self.num_layers,
            "sweep": {
                "agreement": list(self.agreement),
                "num_tokens": self.agreement_tokens,
                "best": asdict(self.best),
            },
        }
        path = exits_file(directory)
        write_text(path, json.dumps(about, indent=2) + "\n")
        return path

    def plot(self, path: str | Path) -> None:
        """A heat map of the speed-ups, as a picture of the format that the file's name says."""
        label = "speed-up over full depth"
        plots.heat_map(
            path, self.speedups, rows="exit layer", columns="drafts a round", label=label
        )


def known_exits(directory: Path, num_layers: int) -> dict[str, Any]:
    """What is written of the exits of a model already.

    Raises:
        ModelError: it cannot be read, or is of another model.
    """
    fields = JsonFields.read_if_there(exits_file(directory), ModelError)
    if fields.names:
        fields.integer("num_layers", num_layers, num_layers)
    return fields.values


def default_exit_layers(exit_layers: range, parts: int = 8) -> list[int]:
    """An eighth to three quarters of the layers, in steps of an eighth, or of other parts."""
    count = len(exit_layers)
    shares = range(1, parts * 3 // 4 + 1)
    return sorted({exit_layers[max(1, min(count - 1, count * i // parts)) - 1] for i in shares})


def sweep_speculation(
    model: Model,
    prompts: Sequence[str],
    *,
    exit_layers: Sequence[int] | None = None,
    num_drafts: Sequence[int] = (2, 4, 6, 8),
    max_tokens: int = 64,
    batch_size: int = 1,
    rounds: int = 1,
    measures_agreement: bool = False,
    progress: Callable[[int, TimedRun], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
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
        measures_agreement: also measure how often each exit agrees with the last layer, for
            :meth:`Sweep.record`; not of a sweep that was stopped.
        progress: called with the round and a run when it has had its turn.
        should_stop: asked after each group of prompts; when it says True what has been measured is
            returned, perhaps no pair.

    Raises:
        RequestError: for settings that cannot be used; nothing has run then.
    """
    layers = default_exit_layers(model.config.exit_layers) if exit_layers is None else exit_layers
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
        should_stop=should_stop,
    )
    finished = all(len(run.seconds) == rounds for run in (full, auto, *runs))
    cells = tuple(
        SweepCell(layer, drafts, run.acceptance, run.tokens_per_s, run.speedup_over(full))
        for (layer, drafts), run in zip(pairs, runs, strict=True)
        if run.seconds
    )
    num_layers = model.config.num_layers
    if not cells:
        return Sweep(num_layers, nan, (), nan, finished)
    speed, by_auto = full.tokens_per_s, auto.speedup_over(full)
    found = Sweep(num_layers, speed, cells, by_auto, finished)
    if not (measures_agreement and finished):
        return found
    agreement, count = _agreement(model, full)
    return replace(found, agreement=agreement, agreement_tokens=count)


def _agreement(model: Model, full: TimedRun) -> tuple[tuple[float, ...], int]:
    """The agreement of every exit layer on the texts of full depth, and their tokens."""
    texts = [
        Scored.of(model.config, output.prompt_token_ids, output.token_ids)
        for output in full.outputs
        if output.token_ids
    ]
    scores = score_exits(model.network, texts, model.config.exit_layers)
    count = sum(len(text.token_ids) - text.first for text in texts)
    return tuple(score.agreement for score in scores), count
