"""``Auto`` compared with every fixed exit layer and draft length, on the intent model.

python -m bench auto                          batch 1 and 8, float32, bfloat16 and int8
python -m bench auto --count 64 --rounds 12

Held-out utterances, prompts included. Each pair takes turns with full depth and ``Auto`` alone,
batch by batch, as the programs of many policies would not fit in memory together; the first round
is left out. Writes bench/results/auto.json and its table in bench/results/drafts.md.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

import eecore
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.smollm2 import WEIGHTS
from bench.harness.utterances import LONGEST_PARSE, utterances
from eecore import SelfSpeculative
from eecore.lab.evaluation.sweep import Sweep, SweepCell
from eecore.lab.evaluation.tables import markdown_table
from eecore.lab.evaluation.timed import TimedRun

KINDS = ("float32", "bfloat16", "int8")
EXIT_LAYERS, NUM_DRAFTS = (2, 3, 4), (3, 6)


def load(weights: str) -> eecore.Model:
    """The model that ships with eecore, in a dtype or with fewer bits."""
    where = eecore.default_model()
    return eecore.load(where, device="cpu", kv_cache_tokens=4096, **WEIGHTS[weights])


def measure(model: eecore.Model, prompts: list[str], batch: int, rounds: int) -> Sweep:
    """The grid, pair by pair, and the medians of ``Auto`` and of full depth."""
    pairs = [(layer, drafts) for layer in EXIT_LAYERS for drafts in NUM_DRAFTS]
    runs = {pair: in_turns(model, prompts, pair, batch, rounds) for pair in pairs}
    cells = tuple(
        SweepCell(*pair, own.acceptance, own.tokens_per_s, own.speedup_over(full))
        for pair, (full, _, own) in runs.items()
    )
    return Sweep(
        model.config.num_layers,
        statistics.median(full.tokens_per_s for full, _, _ in runs.values()),
        cells,
        statistics.median(auto.speedup_over(full) for full, auto, _ in runs.values()),
    )


def in_turns(
    model: eecore.Model, prompts: list[str], pair: tuple[int, int], batch: int, rounds: int
) -> list[TimedRun]:
    """Time full depth, ``Auto`` and a pair, batch by batch in turns, in random order.

    Other load on the machine slows all three alike. In the first round programs are recorded and
    ``Auto`` learns.
    """
    model = model.without_prefix_cache()
    runs = [TimedRun(policy) for policy in (eecore.Full(), eecore.Auto(), SelfSpeculative(*pair))]
    order = random.Random(7)
    groups = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
    for number in range(1 + rounds):
        seconds = [0.0] * len(runs)
        outputs: list[list[list[eecore.Output]]] = [[] for _ in runs]
        for group in groups:
            for i in order.sample(range(len(runs)), len(runs)):
                began = time.perf_counter()
                came = eecore.generate(
                    model, group, exit=runs[i].policy, max_tokens=LONGEST_PARSE, temperature=0.0
                )
                seconds[i] += time.perf_counter() - began
                outputs[i].append(came)
        if number:
            for run, its, took in zip(runs, outputs, seconds, strict=True):
                run.record(its, took)
    return runs


def row_of(weights: str, batch: int, found: Sweep) -> dict[str, Any]:
    best = found.best
    return {
        "weights": weights,
        "batch": batch,
        "full_tokens_per_s": found.full_tokens_per_s,
        "best": [best.exit_layer, best.num_drafts],
        "best_speedup": best.speedup,
        "median_speedup": sorted(c.speedup for c in found.cells)[len(found.cells) // 2],
        "auto_speedup": found.auto_speedup,
    }


def markdown(result: Figures) -> str:
    head = ["weights", "batch", "full, tokens/s", "best fixed (E, d)", "its speed-up"]
    head += ["median of the grid", "auto", "auto / best"]
    lines = [
        [
            row["weights"],
            str(row["batch"]),
            f"{row['full_tokens_per_s']:.0f}",
            "({}, {})".format(*row["best"]),
            *(f"{row[f'{which}_speedup']:.2f}x" for which in ("best", "median", "auto")),
            f"{row['auto_speedup'] / row['best_speedup']:.2f}",
        ]
        for row in result["rows"]
    ]
    rounds = result["rounds"]
    turns = f"medians of {rounds} turns"
    if result.get("by_batch"):
        turns = f"batch by batch in turns; medians of {rounds} rounds"
    about = (
        f"The intent model on {result['count']} held-out utterances, prompts included. The grid: "
        f"`SelfSpeculative` from layers {', '.join(map(str, EXIT_LAYERS))} with "
        f"{', '.join(map(str, NUM_DRAFTS))} drafts; the best of it is known only "
        f"afterwards. Each pair beside full depth and `Auto` alone, {turns}, after one that is "
        f"left out; {result['threads']} thread(s), {in_words(result)}. "
        f"`python -m bench auto`"
    )
    return f"{markdown_table(head, lines)}\n\n{about}"


REPORTS = (Report("auto", {"auto": markdown}, {"rows": ("weights", "batch")}),)


def main(words: Sequence[str]) -> None:
    made = parser("auto", __doc__, batches=(1, 8), rounds=8, threads=1)
    made.add_argument("--weights", nargs="+", default=KINDS, choices=KINDS)
    made.add_argument("--count", type=int, default=48, help="utterances")
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    prompts = [record["input"] for record in utterances(arguments.count)]
    rows = []
    for weights in arguments.weights:
        for batch in arguments.batches:
            found = measure(load(weights), prompts, batch, arguments.rounds)
            rows.append(row_of(weights, batch, found))
            say(rows[-1])
    result = {
        **machine(),
        "threads": arguments.threads,
        "count": arguments.count,
        "rounds": arguments.rounds,
        "by_batch": True,
        "rows": rows,
    }
    REPORTS[0].finish(result, arguments)
