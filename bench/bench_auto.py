"""``Auto`` beside every fixed exit layer and number of drafts, on the intent model.

python bench/bench_auto.py                          batch 1 and 8, float32, bfloat16 and int8
python bench/bench_auto.py --count 64 --rounds 5

Held-out utterances, prompts included. Each pair takes turns with full depth and ``Auto``, and with
no other, as programs of many policies would push each other out of memory; the first turn is left
out. Writes bench/results/auto.json and its table in bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

import eecore
from eecore.evaluation import Sweep, sweep_speculation

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts" / "intents")]

from bench_intents import DATA, utterances  # noqa: E402
from harness import cpu_name, insert  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "auto.json"
WEIGHTS = ("float32", "bfloat16", "int8")
EXIT_LAYERS, NUM_DRAFTS = (2, 3, 4), (3, 6)
LONGEST_PARSE = 96  # tokens


def load(weights: str) -> eecore.Model:
    """The model that ships, in a dtype or with fewer bits."""
    is_int8 = weights == "int8"
    return eecore.load(
        eecore.default_model(),
        device="cpu",
        dtype="float32" if is_int8 else weights,
        weights="int8" if is_int8 else None,
        kv_cache_tokens=4096,
    )


def measure(model: eecore.Model, prompts: list[str], batch: int, rounds: int) -> Sweep:
    """The grid, pair by pair; of ``Auto`` and of full depth the median."""
    pairs = [(layer, drafts) for layer in EXIT_LAYERS for drafts in NUM_DRAFTS]
    found = []
    for layer, drafts in pairs:
        for turns in (1, rounds):  # the first records programs, and Auto learns
            last = sweep_speculation(
                model,
                prompts,
                exit_layers=(layer,),
                num_drafts=(drafts,),
                max_tokens=LONGEST_PARSE,
                batch_size=batch,
                rounds=turns,
            )
        found.append(last)
    return Sweep(
        found[0].num_layers,
        statistics.median(each.full_tokens_per_s for each in found),
        tuple(cell for each in found for cell in each.cells),
        statistics.median(each.auto_speedup for each in found),
    )


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


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "| weights | batch | full, tokens/s | best fixed (E, d) | its speed-up "
        "| median of the grid | auto | auto / best |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        exit_layer, drafts = row["best"]
        lines.append(
            f"| {row['weights']} | {row['batch']} | {row['full_tokens_per_s']:.0f} "
            f"| ({exit_layer}, {drafts}) | {row['best_speedup']:.2f}x "
            f"| {row['median_speedup']:.2f}x | {row['auto_speedup']:.2f}x "
            f"| {row['auto_speedup'] / row['best_speedup']:.2f} |"
        )
    lines += [
        "",
        f"The intent model on {result['count']} held-out utterances, prompts included. The grid: "
        f"`SelfSpeculative` from layers {', '.join(map(str, EXIT_LAYERS))} with "
        f"{', '.join(map(str, NUM_DRAFTS))} drafts; the best of it is known only "
        f"afterwards. Each pair beside full depth and `Auto` alone; medians of {result['rounds']} "
        f"turns, behind one that is left out; {result['threads']} thread(s), "
        f"{result['cpu']}, "
        f"{result['cpu_capability']} kernels, torch {result['torch']}. "
        "`python bench/bench_auto.py`",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", nargs="+", default=WEIGHTS, choices=WEIGHTS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--count", type=int, default=48, help="utterances")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true", help="print the table, write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    prompts = [record["input"] for record in utterances(DATA, arguments.count)]
    rows = []
    for weights in arguments.weights:
        for batch in arguments.batches:
            found = measure(load(weights), prompts, batch, arguments.rounds)
            rows.append(row_of(weights, batch, found))
            print(rows[-1], file=sys.stderr, flush=True)
    result = {
        "cpu": cpu_name(),
        "cpu_capability": eecore.build_info()["cpu_capability"],
        "torch": torch.__version__,
        "threads": arguments.threads,
        "count": arguments.count,
        "rounds": arguments.rounds,
        "rows": rows,
    }
    table = markdown(result)
    print(table)
    if not arguments.dry_run:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        insert(ROOT / "bench" / "RESULTS.md", "auto", table)


if __name__ == "__main__":
    main()
