"""The report of the early-exit framework's evaluation: its table and its two figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eecore.exits import BatchMode
from eecore.files.whole import write_text
from eecore.lab import plots
from eecore.lab.evaluation.tables import markdown_table, number, table_of


@dataclass(frozen=True)
class Speed:
    """A throughput or a latency, compared with full depth's in the same rounds.

    ``to_full`` and ``ideal_to_full`` are times as fast as full depth: 2 is half the time a token.
    Ideals are None where full depth wrote no token after the first.
    """

    value: float
    """Tokens/s, or seconds a token; of the best round."""
    to_full: float
    ideal: float | None
    """The value for time proportional to the layers that ran."""
    ideal_to_full: float | None
    share_of_ideal: float | None
    """Achieved over ideal: 1 where time is proportional to the layers that ran."""
    share_of_cut: float | None
    """Achieved over a model cut at the run's mean depth: 1 where checks, filling of keys and values
    and ragged depths cost nothing. None where half of the layers is all of them.
    """


@dataclass(frozen=True)
class CalmRow:
    """One technique, in one batch mode and size, on all examples."""

    technique: str
    """``full``, ``static-half``, or the measure of a confident exit."""
    batch: BatchMode | None
    """None where the mode makes no difference."""
    batch_size: int
    contract: str
    settings: dict[str, Any] | None
    """Thresholds, decay and exit points of a confident exit."""
    score_to_full: float
    exact_to_full: float
    score_to_label: float | None
    """None without targets."""
    exact_to_label: float | None
    exit_rate: float | None
    """Layers skipped / all layers, over the tokens after the first, which comes from the prompt's
    pass; None where there are none.
    """
    mean_exit_layer: float
    """Mean over all tokens."""
    tokens: int
    throughput: Speed
    latency: Speed | None
    """Inner-token latency; None where there is no token after the first."""

    @property
    def exiting(self) -> str:
        """Which rows of a batch exit early, in words."""
        return {None: "", "each": "each", "all": f"all {self.batch_size}"}[self.batch]

    @property
    def threshold(self) -> str:
        """The threshold, followed by those of single layers."""
        if self.settings is None:
            return ""
        single = (f"{layer}: {value:g}" for layer, value in self.settings["thresholds"].items())
        return ", ".join([f"{self.settings['threshold']:g}", *single])


SpeedOf = Callable[[CalmRow], Speed | None]


@dataclass(frozen=True)
class CalmReport:
    """All techniques of one model on one set of examples."""

    num_layers: int
    num_examples: int
    num_targets: int
    metric: str
    max_tokens: int
    rounds: int
    batch_modes: tuple[BatchMode, ...]
    batch_sizes: tuple[int, ...]
    rows: tuple[CalmRow, ...]

    @property
    def techniques(self) -> list[str]:
        """The techniques in the order of the tables."""
        return list(dict.fromkeys(row.technique for row in self.rows))

    def row(self, technique: str, batch: BatchMode, batch_size: int) -> CalmRow:
        """The row of a technique in a batch mode and size."""
        where = (technique, batch_size)
        rows = (row for row in self.rows if (row.technique, row.batch_size) == where)
        return next(row for row in rows if row.batch in (batch, None))

    def markdown(self) -> str:
        """Table 1, and the numbers of Figures 1 and 2 for each size of batch."""
        parts = [
            self.about(),
            "Quality and exit rate (Table 1):",
            self.quality(),
        ]
        for size in self.batch_sizes:
            of = f"batches of {size}" if size > 1 else "one at a time"
            parts += [
                f"Token generation throughput (Figure 1), {of}:",
                self._speeds(size, "tokens/s", _throughput),
                f"Inner-token latency (Figure 2), {of}:",
                self._speeds(size, "ms/token", _latency_ms),
            ]
        return "\n\n".join([*parts, self._notes()])

    def write(self, stem: Path) -> None:
        """Write STEM.json, STEM.md and the two figures of :meth:`plot`."""
        write_text(stem.with_name(f"{stem.name}.json"), json.dumps(asdict(self), indent=1) + "\n")
        write_text(stem.with_name(f"{stem.name}.md"), self.markdown() + "\n")
        self.plot(stem)

    def plot(self, stem: Path) -> None:
        """Draw Figures 1 and 2 into STEM-throughput.svg and STEM-latency.svg.

        Raises:
            RequestError: matplotlib is not installed.
        """
        for name, label, speed_of in (
            ("throughput", "tokens/s", _throughput),
            ("latency", "inner-token latency, ms", _latency_ms),
        ):
            self._bars(stem.with_name(f"{stem.name}-{name}.svg"), label, speed_of)

    def about(self) -> str:
        """A sentence on the examples, the model and the rounds."""
        return (
            f"{self.num_examples} examples, {self.max_tokens} new tokens at most, greedy; "
            f"{self.num_layers} layers; {self.rounds} round(s)."
        )

    def quality(self) -> str:
        """Table 1: scores and exit rate."""
        columns: dict[str, Callable[[CalmRow], str]] = {
            "technique": lambda row: row.technique,
            "rows exit": lambda row: row.exiting,
            "threshold": lambda row: row.threshold,
            f"{self.metric} to full": lambda row: number(row.score_to_full, ".4f"),
            "exact to full": lambda row: number(row.exact_to_full, ".4f"),
            f"{self.metric} to label": lambda row: number(row.score_to_label, ".4f"),
            "exact to label": lambda row: number(row.exact_to_label, ".4f"),
            "exit rate": lambda row: number(row.exit_rate, ".1%"),
            "exit layer": lambda row: number(row.mean_exit_layer),
        }
        if not self.num_targets:
            columns = {name: cell for name, cell in columns.items() if "label" not in name}
        # Where the batch exits together, the text depends on the other rows.
        first = self.batch_sizes[0]
        rows = [row for row in self.rows if row.batch_size == first or row.batch == "all"]
        return table_of(columns, rows, text_columns=2)

    def _speeds(self, size: int, unit: str, speed_of: SpeedOf) -> str:
        head = ["technique"]
        for mode in self.batch_modes:
            head += [f"{mode}: {unit}", "to full", "ideal", "of ideal", "of cut"]
        lines = []
        for technique in self.techniques:
            cells = [technique]
            for mode in self.batch_modes:
                speed = speed_of(self.row(technique, mode, size))
                cells += [""] * 5 if speed is None else _speed_cells(speed)
            lines.append(cells)
        return markdown_table(head, lines)

    def _notes(self) -> str:
        lines = [
            "- each: a row exits where it is confident itself; all: the batch exits together "
            "(Algorithm 1)",
            "- exit rate: layers skipped, of the tokens after the first; the first comes from the "
            "prompt's pass, which confident exits run in full",
            "- to full: times as fast as full depth in the same rounds, their median; ideal: if "
            "the time after the first tokens were proportional to the layers run after them, and "
            "that before to the layers run for the prompts",
            "- of cut: as fast as a model cut at the mean depth of the tokens, by the line through "
            "full depth and static-half: heads are not scaled with the layers here",
        ]
        confident = [row for row in self.rows if row.settings is not None]
        for row in confident:
            line = f"- {row.contract}{', rows exit together' if row.batch == 'all' else ''}"
            if line not in lines:
                lines.append(line)
        return "\n".join(lines)

    def _bars(self, file: Path, label: str, speed_of: SpeedOf) -> None:
        bars: dict[str, list[float | None]] = {}
        ideals: dict[str, list[float | None]] = {}
        for mode in self.batch_modes:
            for size in self.batch_sizes:
                name = f"{mode}, {size} a batch"
                speeds = [speed_of(self.row(name, mode, size)) for name in self.techniques]
                bars[name] = [None if speed is None else speed.value for speed in speeds]
                ideals[name] = [None if speed is None else speed.ideal for speed in speeds]
        plots.bar_chart(file, self.techniques, bars, ideals, label=label)


def _throughput(row: CalmRow) -> Speed | None:
    return row.throughput


def _latency_ms(row: CalmRow) -> Speed | None:
    speed = row.latency
    if speed is None:
        return None
    ideal = None if speed.ideal is None else 1e3 * speed.ideal
    return replace(speed, value=1e3 * speed.value, ideal=ideal)


def _speed_cells(speed: Speed) -> list[str]:
    ideal = speed.ideal_to_full
    return [
        number(speed.value),
        f"{speed.to_full:.2f}x",
        "" if ideal is None else f"{ideal:.2f}x",
        number(speed.share_of_ideal, ".0%"),
        number(speed.share_of_cut, ".0%"),
    ]
