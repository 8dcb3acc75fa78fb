"""The fastest self-speculation on a user's own prompts: a grid of exit layers and draft lengths."""

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
from eecore.files.json_fields import JsonFields
from eecore.files.whole import write_text
from eecore.generation import Model
from eecore.lab.evaluation.tables import markdown_table, number
from eecore.lab.evaluation.timed import TimedRun, time_policies
from eecore.models import exits_file
from eecore.planning.auto import best_exit_layers


@dataclass(frozen=True)
class SweepCell:
    """One pair of the grid."""

    exit_layer: int
    num_drafts: int
    acceptance: float | None
    tokens_per_s: float
    speedup: float
    """Speed over full depth's in the same rounds."""


@dataclass(frozen=True)
class Sweep:
    """The grid as far as it was measured, and ``Auto`` on the same prompts."""

    num_layers: int
    full_tokens_per_s: float
    cells: tuple[SweepCell, ...]
    auto_speedup: float
    """Speed of :class:`eecore.Auto` over full depth's in the same rounds."""
    finished: bool = True
    """False where the sweep was stopped: pairs are missing, or have had fewer rounds."""
    agreement: tuple[float, ...] = ()
    """For each exit layer the share of tokens on which it agrees with the last layer, on the text
    of full depth; empty where it was not measured.
    """
    agreement_tokens: int = 0

    @property
    def best(self) -> SweepCell:
        """The fastest pair, which may still be slower than full depth."""
        return max(self.cells, key=lambda cell: cell.speedup)

    @property
    def speedups(self) -> dict[tuple[int, int], float]:
        """Speed-ups by exit layer and draft length."""
        return {(cell.exit_layer, cell.num_drafts): cell.speedup for cell in self.cells}

    @property
    def drafting_layers(self) -> tuple[int, ...]:
        """The exit layers with which :class:`eecore.Auto` would draft, the best first; none where
        none is good enough.
        """
        return best_exit_layers(self.agreement or None)

    def markdown(self) -> str:
        """A table of speed-ups by exit layer (down) and draft length (across)."""
        layers, drafts = (sorted({pair[axis] for pair in self.speedups}) for axis in (0, 1))
        rows = [
            [str(layer), *(number(self.speedups.get((layer, d))) for d in drafts)]
            for layer in layers
        ]
        return markdown_table(["exit layer", *(f"d={d}" for d in drafts)], rows, text_columns=0)

    def save(self, path: str | Path) -> None:
        """Write the sweep as JSON."""
        stored = {**asdict(self), "best": asdict(self.best)}
        write_text(path, json.dumps(stored, indent=2) + "\n")

    def record(self, directory: Path) -> Path:
        """Write the agreement where :class:`eecore.Auto` reads it when the model is loaded, and
        chooses the layers that may draft by it. Other entries of the file stay.

        Args:
            directory: the model's directory, or its GGUF file.

        Returns:
            The file: ``exits.json`` in the directory, ``NAME.exits.json`` beside the file.

        Raises:
            RequestError: the agreement was not measured.
            ModelError: the existing file is of another model.
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


def known_exits(directory: Path, num_layers: int) -> dict[str, Any]:
    """What a model's exits file has so far.

    Raises:
        ModelError: the file cannot be read, or is of another model.
    """
    fields = JsonFields.read_if_there(exits_file(directory), ModelError)
    if fields.names:
        fields.integer("num_layers", num_layers, num_layers)
    return fields.values


def default_exit_layers(exit_layers: range, parts: int = 8) -> list[int]:
    """Exit layers from one part to three quarters of the layers, in steps of one part."""
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
    """Time :class:`eecore.SelfSpeculative` over exit layers and draft lengths, and
    :class:`eecore.Auto`.

    Args:
        model: from :func:`eecore.load`.
        prompts: similar to those of the intended use.
        exit_layers: layers of the draft, 1..num_layers-1; :func:`default_exit_layers` when None.
        num_drafts: draft lengths.
        max_tokens: new tokens a prompt.
        batch_size: prompts that run together.
        rounds: the number of times that each pair takes its turn.
        measures_agreement: also measure how often each exit agrees with the last layer, for
            :meth:`Sweep.record`, unless the sweep is stopped.
        progress: called with the round and the run after each turn.
        should_stop: called after each group of prompts; True returns what has been measured,
            perhaps no pair.

    Raises:
        RequestError: the settings cannot be used; nothing has run then.
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
    """The agreement of every exit layer on the texts of full depth, and the number of their
    tokens.
    """
    texts = [
        Scored.of(model.config, output.prompt_token_ids, output.token_ids)
        for output in full.outputs
        if output.token_ids
    ]
    scores = score_exits(model.network, texts, model.config.exit_layers)
    count = sum(len(text.token_ids) - text.first for text in texts)
    return tuple(score.agreement for score in scores), count
