"""The one table of README.md, from the figures of several benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from bench.harness.results import Figures
from bench.harness.rows import Row, find
from eecore.lab.evaluation.tables import markdown_table

BATCHES = (1, 8, 32)
CHAT, CHAT_FILE = "SmolLM2-135M-Instruct, Q4_1 file", "SmolLM2-135M-Instruct.Q4_1"
TRAINED = "intent, trained to exit, float32"
SHOWN = ("gguf", "drafts", "transformers")


@dataclass(frozen=True)
class Line:
    """One model at one batch size, on one thread; each ratio is of runs that took turns.

    Args:
        model: its name and weights.
        batch: requests at a time.
        full: tokens/s of all requests at full depth.
        drafts: speed-up of ``Auto`` over full depth.
        exits: speed-up of a calibrated exit over full depth.
        over_peer: speed-up of full depth over another engine.
    """

    model: str
    batch: int
    full: float | None
    drafts: float | None
    exits: float | None
    over_peer: float | None

    def cells(self) -> list[str]:
        ratios = (self.drafts, self.exits, self.over_peer)
        return [
            self.model,
            str(self.batch),
            "" if self.full is None else f"{self.full:.0f}",
            *("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
        ]


def figure(row: Row | None, name: str) -> float | None:
    return None if row is None else float(row[name])


def auto_gain(drafts: Figures, batch: int) -> float | None:
    """The median speed-up of ``Auto`` over the kinds of prompts."""
    where = ("file", batch, "auto")
    speedups = [
        row["speedup"]
        for row in drafts["rows"]
        if (row["weights"], row["batch"], row["mode"]) == where
    ]
    return statistics.median(speedups) if speedups else None


def chat_lines(kept: Mapping[str, Figures]) -> list[Line]:
    """A chat model as it is, beside llama.cpp on the same file; no layer of it exits."""
    lines = []
    for batch in BATCHES:
        row = find(kept["gguf"]["rows"], file=CHAT_FILE, threads=1, batch=batch)
        full, over_peer = figure(row, "tokens_per_s"), figure(row, "ratio")
        lines.append(Line(CHAT, batch, full, auto_gain(kept["drafts"], batch), None, over_peer))
    return lines


def trained_lines(kept: Mapping[str, Figures]) -> list[Line]:
    """The model that ships in all modes, beside transformers: one run."""
    lines = []
    for batch in BATCHES:
        full, drafts, exits = (
            find(kept["transformers"]["rows"], batch=batch, mode=f"eecore, {mode}")
            for mode in ("full", "auto", "calibrated softmax")
        )
        over_peer = figure(full, "speedup")
        gains = [
            None if over_peer is None or row is None else row["speedup"] / over_peer
            for row in (drafts, exits)
        ]
        lines.append(Line(TRAINED, batch, figure(full, "tokens_per_s"), *gains, over_peer))
    return lines


def markdown(kept: Mapping[str, Figures]) -> str:
    """Full depth, and what drafts, exits and eecore itself gain, from all figures by name."""
    lines = [line.cells() for line in (*chat_lines(kept), *trained_lines(kept))]
    head = ["model", "batch", "full depth, tokens/s", "drafts", "exits", "full depth / peer"]
    machines = dict.fromkeys(
        f"{kept[name]['cpu']}, {kept[name]['cpu_capability']} kernels" for name in SHOWN
    )
    about = (
        "One thread. Each ratio compares modes that took turns in one run: drafts (`auto`, which "
        "keeps the text) and exits (a calibrated threshold, which may change it) with full depth, "
        "full depth with the peer. SmolLM2 was not trained to exit; its drafts are the median of "
        "chat, summaries, code and rewriting, together in the batch of 32, its peer is llama.cpp "
        "on the same file. The peer of intent is transformers, prompts included. "
        f"{'; '.join(machines)}. `python -m bench tables`"
    )
    return f"{markdown_table(head, lines, text_columns=1)}\n\n{about}"
