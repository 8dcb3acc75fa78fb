"""The one table of README.md, from the figures of several benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.harness.results import Figures
from bench.harness.rows import Row, find
from eecore.lab.evaluation.tables import markdown_table

BATCHES = (1, 8, 32)
BITS = {"float32": "f32", "bfloat16": "bf16", "int8": "int8"}
SMOLLM2 = "smollm2-135m-instruct"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1"
SHOWN = ("decode", "gguf", "transformers", "auto", "drafts", "depth")


@dataclass(frozen=True)
class Line:
    """One model with one kind of weights, on one thread.

    Args:
        model: its name, with how it was trained.
        weights: their kind.
        source: what they come from.
        speeds: tokens/s at full depth of eecore, llama.cpp and transformers.
        gains: speed-ups over full depth, of each way at each batch.
    """

    model: str
    weights: str
    source: str
    speeds: tuple[float | None, ...]
    gains: tuple[tuple[float | None, ...], ...]

    def cells(self) -> list[str]:
        speeds = ["" if speed is None else f"{speed:.0f}" for speed in self.speeds]
        return [self.model, self.weights, self.source, *speeds, *map(joined, self.gains)]


def joined(gains: Sequence[float | None]) -> str:
    if not any(gains):
        return ""
    return " / ".join("–" if gain is None else f"{gain:.2f}x" for gain in gains)


def source_of(depth: Figures, model: str, weights: str) -> str:
    row = find(depth["weights"], model=model, weights=weights)
    assert row is not None
    return "a cache" if row["from_cache"] else "memory"


def source_of_bytes(depth: Figures, num_bytes: int) -> str:
    """Of weights that were not looked at, by others that are no larger and came from memory."""
    sizes = [row["bytes"] for row in depth["weights"] if not row["from_cache"]]
    return "memory" if num_bytes >= min(sizes) else ""


def depth_gains(depth: Figures, model: str, weights: str, kind: str) -> tuple[float | None, ...]:
    """Of the last mode whose name begins so, as in the table of saved layers."""
    rows = [row for row in depth["modes"] if row["mode"].startswith(kind)]
    found = []
    for batch in BATCHES:
        where = {"model": model, "weights": weights, "threads": 1, "batch": batch}
        row = find(rows[::-1], **where)
        found.append(None if row is None else float(row["speed_up"]))
    return tuple(found)


def speed(row: Row | None, name: str = "tokens_per_s") -> float | None:
    return None if row is None else float(row[name])


def intent_lines(kept: Mapping[str, Figures]) -> list[Line]:
    """The model that ships: its prompts count, but in what exits and drafts gain."""
    beside, depth = kept["transformers"], kept["depth"]
    lines = []
    for weights in BITS:
        rows = [find(kept["auto"]["rows"], weights=weights, batch=batch) for batch in BATCHES]
        speeds = (speed(rows[0], "full_tokens_per_s"), None, None)
        if weights == beside["dtype"]:  # both of one run
            full, alone = (
                find(beside["rows"], batch=1, mode=mode)
                for mode in ("eecore, full", "transformers")
            )
            speeds = (speed(full), None, speed(alone))
        lines.append(
            Line(
                "intent, trained to exit",
                weights,
                source_of(depth, "intent", weights),
                speeds,
                (
                    tuple(speed(row, "auto_speedup") for row in rows),
                    depth_gains(depth, "intent", weights, "softmax, each"),
                    depth_gains(depth, "intent", weights, "SelfSpeculative"),
                ),
            )
        )
    return lines


def auto_gains(drafts: Figures, weights: str) -> tuple[float | None, ...]:
    """Medians over the kinds of prompts."""
    found: list[float | None] = []
    for batch in BATCHES:
        speedups = [
            row["speedup"]
            for row in drafts["rows"]
            if (row["weights"], row["batch"], row["mode"]) == (weights, batch, "auto")
        ]
        found.append(statistics.median(speedups) if speedups else None)
    return tuple(found)


def smollm2_lines(kept: Mapping[str, Figures]) -> list[Line]:
    """Decoding alone."""
    model, nothing = "SmolLM2-135M, as it is", (None,) * len(BATCHES)
    lines = []
    for weights, bits in BITS.items():
        where = {"model": SMOLLM2, "bits": bits, "threads": 1, "batch": 1}
        engines = ("eecore", "llama.cpp", "transformers")
        rows = [find(kept["decode"]["rows"], **where, engine=engine) for engine in engines]
        speeds = tuple(speed(row, "tokens_per_s_best") for row in rows)
        gains = (auto_gains(kept["drafts"], weights), nothing, nothing)
        source = source_of(kept["depth"], "smollm2-135m", weights)
        lines.append(Line(model, weights, source, speeds, gains))
    file = find(kept["gguf"]["rows"], file=SMOLLM2_FILE, threads=1, batch=1)
    kept_file = find(kept["quality"]["files"], file=SMOLLM2_FILE)
    assert kept_file is not None
    source = source_of_bytes(kept["depth"], kept_file["bytes"])
    speeds = (speed(file), speed(file, "llama_cpp_tokens_per_s"), None)
    gains = (auto_gains(kept["drafts"], "file"), nothing, nothing)
    lines.append(Line(model, "Q4_1 file", source, speeds, gains))
    return lines


def markdown(kept: Mapping[str, Figures]) -> str:
    """Of all figures by name: full depth beside others, and what is gained over it."""
    lines = [line.cells() for line in (*intent_lines(kept), *smollm2_lines(kept))]
    batches = " / ".join(map(str, BATCHES))
    head = ["model", "weights", "from", "full, tokens/s", "llama.cpp", "transformers"]
    head += [f"`Auto`, batch {batches}", "calibrated exits", "drafts of first layers"]
    machines = dict.fromkeys(
        f"{kept[name]['cpu']}, {kept[name]['cpu_capability']} kernels" for name in SHOWN
    )
    about = (
        "One thread. Full depth at batch 1; behind it speed-ups over it, at each batch, – where it "
        "was not measured. intent parses what is said to a home; its tokens/s and `Auto` count "
        "prompts in, all else is decoding alone. `Auto` on SmolLM2: the median of chat, summaries, "
        "code and rewriting. Exits may change the text, as far as they are calibrated to; the rest "
        "does not. From: where a step's weights are read from, as `depth` found it. "
        f"{'; '.join(machines)}. `python -m bench tables`"
    )
    return f"{markdown_table(head, lines, text_columns=3)}\n\n{about}"
