"""A looped intent model (Ouro) by loop and by threshold of its gate: exact match, loops run, speed.

python -m bench loops --model DIRECTORY

The model is made by scripts/intents/train_intents.py ``--loops``, its gate by ``eecore train
--loss gate``. Exact match is over whole parses; speed is of decoding steps, all modes in turns.
Efficiency is what a step should take over what it takes: at a batch of 1 the same model cut at the
mean depth, at more each loop for the rows that are still there, with nothing for gate and fills.
``--beside`` times another model in the same rounds: *beside* is how many times as fast a mode is as
the fastest of the other model's modes with as many parses right.
Writes bench/results/loops.json and its table in bench/results.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import eecore
from bench.depth.decoding import Batch, Decoding
from bench.depth.predictions import Costs, Line
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.turns import batches_of
from bench.harness.utterances import DATA, LONGEST_PARSE, utterances
from eecore.files.readable import beside_model
from eecore.lab.evaluation.tables import markdown_table
from eecore.models import model_digest

THRESHOLDS = (0.9, 0.8, 0.6, 0.5, 0.3)
GROUPS = 8  # timed batches of each size
STEPS = 12  # timed steps of each batch; most parses are longer


def table(figures: Figures) -> str:
    """A line for each mode."""
    batches, others = figures["batches"], figures.get("beside", [])
    head = ["mode", "exact match", "loops a token"]
    for batch in batches:
        head += [f"batch {batch}, ms", "speed-up", "efficiency", *(["beside"] if others else [])]
    lines = []
    for row in figures["modes"]:
        line = [f"`{row['mode']}`", f"{row['exact_match']:.1%}", f"{row['mean_loops']:.2f}"]
        for batch in batches:
            timed = row["timed"][str(batch)]
            share = timed["efficiency"]
            line += [f"{timed['token_ms']:.3f}", f"{timed['speed_up']:.2f}x"]
            line.append("" if share is None else f"{share:.0%}")
            if others:
                line.append(_beside(row, others, str(batch)))
        lines.append(line)
    tables = [markdown_table(head, lines)]
    if others:
        tables += [BESIDE, _table_beside(others, batches)]
    about = (
        "Efficiency: the time of the same model cut at the mean depth, in a batch of each loop's "
        f"rows, over the time of a step. {figures['utterances']} held-out utterances, "
        f"{figures['dtype']}, {figures['threads']} thread(s), {in_words(figures)}. "
        "`python -m bench loops`"
    )
    return "\n\n".join([*tables, about])


BESIDE = (
    "*Beside* is how many times as fast a mode is as the fastest mode, with as many parses right, "
    "of the other model:"
)


def _beside(row: Figures, others: list[Figures], batch: str) -> str:
    """How many times as fast as the other model where that is as good; empty: it never is."""
    good = [each for each in others if each["exact_match"] >= row["exact_match"]]
    fastest = min((each["timed"][batch]["token_ms"] for each in good), default=None)
    return "" if fastest is None else f"{fastest / row['timed'][batch]['token_ms']:.2f}x"


def _table_beside(others: list[Figures], batches: Sequence[int]) -> str:
    """The other model's modes that are the fastest for their exact match, at some batch size."""

    def is_beaten(row: Figures, batch: str) -> bool:
        return any(
            each["exact_match"] >= row["exact_match"]
            and each["timed"][batch]["token_ms"] < row["timed"][batch]["token_ms"]
            for each in others
        )

    head = ["mode", "exact match", "layers a token", *(f"batch {batch}, ms" for batch in batches)]
    lines = []
    for row in others:
        if all(is_beaten(row, str(batch)) for batch in batches):
            continue
        times = (f"{row['timed'][str(batch)]['token_ms']:.3f}" for batch in batches)
        exact, depth = f"{row['exact_match']:.1%}", f"{row['mean_layers']:.2f}"
        lines.append([f"`{row['mode']}`", exact, depth, *times])
    return markdown_table(head, lines)


REPORTS = (Report("loops", {"loops": table}, {"modes": ("mode",), "beside": ("mode",)}),)


class Mode(NamedTuple):
    """A model under an exit policy."""

    model: eecore.Model
    policy: eecore.exits.Exit


def modes_of(model: eecore.Model, directory: Path) -> dict[str, Mode]:
    """Full depth, each loop as the last one, the gate, calibrated thresholds, and the first loop as
    the drafter.
    """
    exit_layers = model.config.exit_layers
    found: dict[str, eecore.exits.Exit] = {"Full()": eecore.Full()}
    found |= {f"FixedExit({layer})": eecore.FixedExit(layer) for layer in exit_layers[:-1]}
    for threshold in THRESHOLDS:
        found[f"gate {threshold:g}"] = eecore.ConfidentExit(threshold, "gate")
    found |= calibrated(directory)
    found[f"SelfSpeculative({exit_layers[0]}, 4)"] = eecore.SelfSpeculative(exit_layers[0], 4)
    return {name: Mode(model, policy) for name, policy in found.items()}


def modes_beside(model: eecore.Model, directory: Path) -> dict[str, Mode]:
    """Full depth, each layer as the last one, calibrated thresholds, and drafts."""
    exit_layers = model.config.exit_layers
    found: dict[str, eecore.exits.Exit] = {"Full()": eecore.Full()}
    found |= {f"FixedExit({layer})": eecore.FixedExit(layer) for layer in exit_layers[:-1]}
    found |= calibrated(directory)
    first = exit_layers[(len(exit_layers) - 1) // 4]
    found[f"SelfSpeculative({first}, 6)"] = eecore.SelfSpeculative(first, 6)
    return {name: Mode(model, policy) for name, policy in found.items()}


def calibrated(directory: Path) -> dict[str, eecore.exits.Exit]:
    """The policies of the calibrations in a directory whose rows exit at all."""
    found: dict[str, eecore.exits.Exit] = {}
    for file in sorted(directory.glob("calibration-*.json")):
        calibration, classifier = eecore.Calibration.load(file), None
        if calibration.measure == "classifier":
            file = beside_model(directory, "classifier.safetensors")
            classifier = eecore.ExitClassifier.load(file)
        if calibration.threshold < 1:
            name = f"{calibration.measure} {calibration.threshold:g}, calibrated"
            found[name] = eecore.ConfidentExit.calibrated(calibration, classifier)
    return found


def quality(mode: Mode, records: Sequence[dict[str, str]]) -> tuple[float, float]:
    """Exact match, and layers run a token after the first."""
    outputs = eecore.generate(
        mode.model,
        [record["input"] for record in records],
        exit=mode.policy,
        max_tokens=LONGEST_PARSE,
    )
    right = sum(out.text == record["target"] for out, record in zip(outputs, records, strict=True))
    ran = sum(out.stats.layers_run for out in outputs)
    tokens = sum(max(len(out.token_ids) - 1, 0) for out in outputs)
    return right / len(records), ran / tokens


class Timed:
    """All modes at all batch sizes, and the fixed depths that their times are predicted from."""

    def __init__(
        self, records: Sequence[dict[str, str]], modes: dict[str, Mode], batches: Sequence[int]
    ) -> None:
        model = modes["Full()"].model
        self._exits, self._modes = model.config.exit_layers, modes
        assert model.tokenizer is not None
        prompts = [model.tokenizer.encode(record["input"]) for record in records]
        self.runs: dict[tuple[int, str], Decoding] = {}
        for rows in sorted({1, 2, 4, *batches}):
            if rows > max(batches):
                continue
            groups = batches_of(prompts[: rows * GROUPS], rows)
            for name, (own, policy) in modes.items():
                is_cut = isinstance(policy, (eecore.Full, eecore.FixedExit)) and own is model
                if rows in batches or is_cut:
                    made = [Batch(group, [policy] * rows) for group in groups]
                    self.runs[rows, name] = Decoding(own, made, STEPS)

    def round(self) -> None:
        """Run every mode once, in turns."""
        for run in self.runs.values():
            run.round()

    def figures(self, rows: int, name: str) -> dict[str, float | None]:
        """The measurements of a mode at a batch size."""
        run, full = self.runs[rows, name], self.runs[rows, "Full()"]
        efficiency = None
        if isinstance(self._modes[name].policy, eecore.ConfidentExit):
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
    records = utterances(arguments.count, arguments.data)
    model = _loaded(arguments.model)
    modes = {"modes": modes_of(model, arguments.model)}
    if arguments.beside is not None:
        modes["beside"] = modes_beside(_loaded(arguments.beside), arguments.beside)
    timed = {name: Timed(records, own, arguments.batches) for name, own in modes.items()}
    for number in range(arguments.rounds):
        for each in timed.values():
            each.round()
        say(f"round {number + 1} of {arguments.rounds}")
    rows: dict[str, list[Figures]] = {}
    for kind, own in modes.items():
        rows[kind] = []
        for name, mode in own.items():
            exact, layers = quality(mode, records)
            figures = {str(b): timed[kind].figures(b, name) for b in arguments.batches}
            depth = {"mean_layers": layers}
            if kind == "modes":
                depth = {"mean_loops": layers / model.config.exit_layers.step}
            rows[kind].append({"mode": name, "exact_match": exact, **depth, "timed": figures})
            say(f"{name}: {exact:.1%}, {layers:.2f} layers")
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
        **rows,
    }


def _loaded(directory: Path) -> eecore.Model:
    return eecore.load(
        directory, device="cpu", prefix_cache=False, dtype="float32", kv_cache_tokens=8192
    )


def main(words: Sequence[str]) -> None:
    made = parser("loops", __doc__, batches=(1, 8), rounds=5, threads=1)
    made.add_argument("--model", type=Path, required=True, help="a directory")
    made.add_argument("--beside", type=Path, help="a directory of another model")
    made.add_argument("--data", type=Path, default=DATA, help="made where it is missing")
    made.add_argument("--count", type=int, default=1000, help="utterances")
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    REPORTS[0].finish(run(arguments), arguments)
