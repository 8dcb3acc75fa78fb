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
from bench.depth.decoding import Decoding
from bench.depth.predictions import Costs, Line
from bench.harness.command import parser, say
from bench.harness.exits import calibrated_policies
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.rows import Cell, Row, cell_of, table_of
from bench.harness.turns import batches_of
from bench.harness.utterances import DATA, LONGEST_PARSE, utterances
from eecore.models import model_digest

THRESHOLDS = (0.9, 0.8, 0.6, 0.5, 0.3)
GROUPS = 8  # timed batches of each size
STEPS = 12  # timed steps of each batch; most parses are longer
BESIDE = (
    "*Beside* is how many times as fast a mode is as the fastest mode, with as many parses right, "
    "of the other model:"
)


def table(figures: Figures) -> str:
    """A line for each mode, and for each mode of the other model."""
    batches, others = figures["batches"], figures.get("beside", [])

    def beside(row: Row, batch: str) -> str:
        good = [each for each in others if each["exact_match"] >= row["exact_match"]]
        fastest = min((each["timed"][batch]["token_ms"] for each in good), default=None)
        return "" if fastest is None else f"{fastest / row['timed'][batch]['token_ms']:.2f}x"

    names: list[tuple[str, Cell]] = [("mode", "`{mode}`"), ("exact match", "{exact_match:.1%}")]
    columns, own = [*names, ("loops a token", "{mean_loops:.2f}")], [*names]
    own.append(("layers a token", "{mean_layers:.2f}"))
    for batch in map(str, batches):

        def timed(form: str, batch: str = batch) -> Cell:
            return lambda row: cell_of(form, row["timed"][batch])

        own.append((f"batch {batch}, ms", timed("{token_ms:.3f}")))
        columns += [own[-1], ("speed-up", timed("{speed_up:.2f}x"))]
        columns.append(("efficiency", timed("{efficiency:.0%}")))
        if others:
            columns.append(("beside", lambda row, batch=batch: beside(row, batch)))
    about = (
        "Efficiency: the time of the same model cut at the mean depth, in a batch of each loop's "
        f"rows, over the time of a step. {figures['utterances']} held-out utterances, "
        f"{figures['dtype']}, {figures['threads']} thread(s), {in_words(figures)}. "
        "`python -m bench loops`"
    )
    tables = [table_of(columns, figures["modes"])]
    return "\n\n".join([*tables, *([BESIDE, table_of(own, others)] if others else ()), about])


REPORTS = (Report("loops", {"loops": table}, {"modes": ("mode",), "beside": ("mode",)}),)


class Mode(NamedTuple):
    """A model under an exit policy."""

    model: eecore.Model
    policy: eecore.exits.Exit


def modes_of(directory: Path) -> dict[str, Mode]:
    """Full depth, each exit as the last one, the gate of a looped model, calibrated thresholds
    that let rows exit at all, and drafts by the first loop or a quarter of the layers.
    """
    model = eecore.load(
        directory, device="cpu", prefix_cache=False, dtype="float32", kv_cache_tokens=8192
    )
    exit_layers = model.config.exit_layers
    found: dict[str, eecore.exits.Exit] = {"Full()": eecore.Full()}
    found |= {f"FixedExit({layer})": eecore.FixedExit(layer) for layer in exit_layers[:-1]}
    is_looped = exit_layers.step > 1
    if is_looped:
        found |= {f"gate {t:g}": eecore.ConfidentExit(t, "gate") for t in THRESHOLDS}
    for measure, policy in calibrated_policies(directory).items():
        if policy.threshold < 1:
            found[f"{measure} {policy.threshold:g}, calibrated"] = policy
    first = exit_layers[0] if is_looped else exit_layers[(len(exit_layers) - 1) // 4]
    drafts = 4 if is_looped else 6
    found[f"SelfSpeculative({first}, {drafts})"] = eecore.SelfSpeculative(first, drafts)
    return {name: Mode(model, policy) for name, policy in found.items()}


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
            groups = batches_of(prompts[: rows * GROUPS], rows)
            for name, (_, policy) in modes.items():
                is_cut = isinstance(policy, (eecore.Full, eecore.FixedExit))
                if rows in batches or (is_cut and rows < max(batches)):
                    self.runs[rows, name] = Decoding(model, groups, policy, STEPS)

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
    modes = {"modes": modes_of(arguments.model)}
    if arguments.beside is not None:
        modes["beside"] = modes_of(arguments.beside)
    timed = {name: Timed(records, own, arguments.batches) for name, own in modes.items()}
    for number in range(arguments.rounds):
        for each in timed.values():
            for decoding in each.runs.values():
                decoding.round()
        say(f"round {number + 1} of {arguments.rounds}")
    config = modes["modes"]["Full()"].model.config
    rows: dict[str, list[Figures]] = {}
    for kind, own in modes.items():
        rows[kind] = []
        for name, mode in own.items():
            exact, layers = quality(mode, records)
            figures = {str(b): timed[kind].figures(b, name) for b in arguments.batches}
            depth = {"mean_layers": layers, "mean_loops": layers / config.exit_layers.step}
            rows[kind].append({"mode": name, "exact_match": exact, **depth, "timed": figures})
            say(f"{name}: {exact:.1%}, {layers:.2f} layers")
    return {
        **machine(),
        "threads": arguments.threads,
        "model_sha256": model_digest(arguments.model),
        "num_layers": config.num_layers,
        "num_loops": config.num_loops,
        "dtype": "float32",
        "utterances": len(records),
        "rounds": arguments.rounds,
        "batches": list(arguments.batches),
        **rows,
    }


def main(words: Sequence[str]) -> None:
    made = parser("loops", __doc__, batches=(1, 8), rounds=5, threads=1)
    made.add_argument("--model", type=Path, required=True, help="a directory")
    made.add_argument("--beside", type=Path, help="a directory of another model")
    made.add_argument("--data", type=Path, default=DATA, help="made where it is missing")
    made.add_argument("--count", type=int, default=1000, help="utterances")
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    REPORTS[0].finish(run(arguments), arguments)
