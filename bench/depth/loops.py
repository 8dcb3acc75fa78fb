"""A looped intent model (Ouro) by loop and by threshold of its gate: exact match, loops run, speed.

python -m bench loops --model DIRECTORY

scripts/intents/train_intents.py ``--loops`` makes the model, ``eecore train --loss gate`` its gate.
Exact match is over whole parses; speed is of decoding steps, all modes in turns. Efficiency is the
predicted time of a step over its measured time. The prediction at a batch of 1 is the same model
cut at the mean depth; for larger batches it is the sum over loops for the rows still in flight. It
counts nothing for gate and fills. Writes bench/results/loops.json and a table of bench/RESULTS.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.depth.decoding import Batch, Decoding
from bench.depth.predictions import Costs, Line
from bench.harness.command import parser, say
from bench.harness.machine import machine
from bench.harness.results import Figures, Report
from bench.harness.turns import batches_of
from bench.harness.utterances import DATA, LONGEST_PARSE, utterances
from eecore.lab.evaluation.tables import markdown_table
from eecore.models import model_digest

THRESHOLDS = (0.9, 0.8, 0.6, 0.5, 0.3)
GROUPS = 8  # timed batches of each size
STEPS = 12  # timed steps of each batch; most parses are longer


def table(figures: Figures) -> str:
    """The table, with a line for each mode."""
    batches = figures["batches"]
    head = ["mode", "exact match", "loops a token"]
    for batch in batches:
        head += [f"batch {batch}, ms", "speed-up", "efficiency"]
    lines = []
    for row in figures["modes"]:
        line = [f"`{row['mode']}`", f"{row['exact_match']:.1%}", f"{row['mean_loops']:.2f}"]
        for batch in batches:
            timed = row["timed"][str(batch)]
            share = timed["efficiency"]
            line += [f"{timed['token_ms']:.3f}", f"{timed['speed_up']:.2f}x"]
            line.append("" if share is None else f"{share:.0%}")
        lines.append(line)
    about = (
        f"{figures['utterances']} held-out utterances, {figures['dtype']}, {figures['threads']} "
        f"thread(s), {figures['cpu']}."
    )
    return f"{markdown_table(head, lines)}\n\n{about}"


REPORTS = (Report("loops", {"loops": table}, {"modes": ("mode",)}),)


def modes_of(exit_layers: range) -> dict[str, eecore.exits.Exit]:
    """Full depth, a fixed exit after each loop, the gate, and drafts by the first loop."""
    found: dict[str, eecore.exits.Exit] = {"Full()": eecore.Full()}
    found |= {f"FixedExit({layer})": eecore.FixedExit(layer) for layer in exit_layers[:-1]}
    for threshold in THRESHOLDS:
        found[f"gate {threshold:g}"] = eecore.ConfidentExit(threshold, "gate")
    for threshold in THRESHOLDS[1::2]:
        shared = eecore.ConfidentExit(threshold, "gate", fill="last")
        found[f"gate {threshold:g}, shared"] = shared
    found[f"SelfSpeculative({exit_layers[0]}, 4)"] = eecore.SelfSpeculative(exit_layers[0], 4)
    return found


def quality(
    model: eecore.Model, policy: eecore.exits.Exit, records: Sequence[dict[str, str]]
) -> tuple[float, float]:
    """Exact match, and the mean number of loops for a token after the first."""
    outputs = eecore.generate(
        model, [record["input"] for record in records], exit=policy, max_tokens=LONGEST_PARSE
    )
    right = sum(out.text == record["target"] for out, record in zip(outputs, records, strict=True))
    ran = sum(out.stats.layers_run for out in outputs)
    tokens = sum(max(len(out.token_ids) - 1, 0) for out in outputs)
    return right / len(records), ran / tokens / model.config.exit_layers.step


class Timed:
    """All modes at all batch sizes, and the fixed depths that their times are predicted from."""

    def __init__(
        self,
        model: eecore.Model,
        prompts: list[list[int]],
        modes: dict[str, eecore.exits.Exit],
        batches: Sequence[int],
    ) -> None:
        self._exits, self._modes = model.config.exit_layers, modes
        self.runs: dict[tuple[int, str], Decoding] = {}
        for rows in sorted({1, 2, 4, *batches}):
            if rows > max(batches):
                continue
            groups = batches_of(prompts[: rows * GROUPS], rows)
            for name, policy in modes.items():
                if rows in batches or isinstance(policy, (eecore.Full, eecore.FixedExit)):
                    made = [Batch(group, [policy] * rows) for group in groups]
                    self.runs[rows, name] = Decoding(model, made, STEPS)

    def round(self) -> None:
        """Run every mode once, in turns."""
        for run in self.runs.values():
            run.round()

    def figures(self, rows: int, name: str) -> dict[str, float | None]:
        """The measurements of a mode at a batch size."""
        run, full = self.runs[rows, name], self.runs[rows, "Full()"]
        efficiency = None
        if isinstance(self._modes[name], eecore.ConfidentExit):
            costs = self._costs()
            ideal = costs.cut if rows == 1 else costs.present
            efficiency = round(ideal(run.exits, lambda _: 0.0) / run.step_ms, 3)
        return {
            "token_ms": round(run.token_ms, 4),
            "speed_up": round(full.token_ms / run.token_ms, 3),
            "efficiency": efficiency,
        }

    def _costs(self) -> Costs:
        names = {f"FixedExit({layer})": layer for layer in self._exits[:-1]}
        names["Full()"] = self._exits[-1]
        lines = {
            rows: Line.through({e: self.runs[rows, name].step_ms for name, e in names.items()})
            for rows in {rows for rows, _ in self.runs}
        }
        return Costs(self._exits[-1], lines, {})


def run(arguments: Any) -> Figures:
    """All figures."""
    model = eecore.load(
        arguments.model, device="cpu", prefix_cache=False, dtype="float32", kv_cache_tokens=8192
    )
    tokenizer = model.tokenizer
    assert tokenizer is not None
    records = utterances(arguments.count, arguments.data)
    modes = modes_of(model.config.exit_layers)
    prompts = [tokenizer.encode(record["input"]) for record in records]
    timed = Timed(model, prompts, modes, arguments.batches)
    for number in range(arguments.rounds):
        timed.round()
        say(f"round {number + 1} of {arguments.rounds}")
    rows = []
    for name, policy in modes.items():
        exact, loops = quality(model, policy, records)
        figures = {str(batch): timed.figures(batch, name) for batch in arguments.batches}
        rows.append({"mode": name, "exact_match": exact, "mean_loops": loops, "timed": figures})
        say(f"{name}: {exact:.1%}, {loops:.2f} loops")
    return {
        **machine(),
        "threads": arguments.threads,
        "model_sha256": model_digest(arguments.model),
        "num_layers": model.config.num_layers,
        "num_loops": model.config.num_loops,
        "dtype": "float32",
        "utterances": len(records),
        "rounds": arguments.rounds,
        "batches": list(arguments.batches),
        "modes": rows,
    }


def main(words: Sequence[str]) -> None:
    made = parser("loops", __doc__, batches=(1, 8), rounds=5, threads=1)
    made.add_argument("--model", type=Path, required=True, help="a directory")
    made.add_argument("--data", type=Path, default=DATA, help="created if it is missing")
    made.add_argument("--count", type=int, default=1000, help="utterances")
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    REPORTS[0].finish(run(arguments), arguments)
