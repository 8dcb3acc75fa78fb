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
SHOWN = ("gguf", "drafts", "depth", "transformers")


@dataclass(frozen=True)
class Line:
    """One model at one batch size, on one thread.

    Args:
        model: its name and weights.
        batch: requests at a time.
        full: tokens/s of all requests at full depth in eecore.
        peer: the same in another engine.
        gain: the speed-up of early exit or drafts over full depth.
    """

    model: str
    batch: int
    full: float | None
    peer: float | None
    gain: float | None

    def cells(self) -> list[str]:
        speeds = ["" if speed is None else f"{speed:.0f}" for speed in (self.full, self.peer)]
        return [
            self.model,
            str(self.batch),
            *speeds,
            "" if self.gain is None else f"{self.gain:.2f}x",
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
    """A chat model as it is, beside llama.cpp on the same file."""
    lines = []
    for batch in BATCHES:
        row = find(kept["gguf"]["rows"], file=CHAT_FILE, threads=1, batch=batch)
        speeds = figure(row, "tokens_per_s"), figure(row, "llama_cpp_tokens_per_s")
        lines.append(Line(CHAT, batch, *speeds, auto_gain(kept["drafts"], batch)))
    return lines


def trained_lines(kept: Mapping[str, Figures]) -> list[Line]:
    """The model that ships, with its calibrated exits, beside transformers."""
    lines = []
    for batch in BATCHES:
        where = {"model": "intent", "weights": "float32", "threads": 1, "batch": batch}
        exits = [row for row in kept["depth"]["modes"] if row["mode"].startswith("softmax, each")]
        full = find(kept["transformers"]["rows"], batch=batch, mode="eecore, full")
        peer = find(kept["transformers"]["rows"], batch=batch, mode="transformers")
        lines.append(
            Line(
                TRAINED,
                batch,
                figure(full, "tokens_per_s"),
                figure(peer, "tokens_per_s"),
                figure(find(exits[::-1], **where), "speed_up"),
            )
        )
    return lines


def markdown(kept: Mapping[str, Figures]) -> str:
    """Full depth beside another engine, and the gain over it, from all figures by name."""
    lines = [line.cells() for line in (*chat_lines(kept), *trained_lines(kept))]
    head = ["model", "batch", "full depth, tokens/s", "peer, tokens/s", "with early exit"]
    machines = dict.fromkeys(
        f"{kept[name]['cpu']}, {kept[name]['cpu_capability']} kernels" for name in SHOWN
    )
    about = (
        "One thread; the speeds and the gains over full depth are of different runs. "
        "SmolLM2 beside llama.cpp, on the same file; early exit is `auto`, which keeps the text: "
        "the median of chat, summaries, code and rewriting, together in the batch of 32. intent "
        "beside transformers; early exit is a calibrated threshold, which may change the text. "
        f"{'; '.join(machines)}. `python -m bench tables`"
    )
    return f"{markdown_table(head, lines, text_columns=1)}\n\n{about}"
