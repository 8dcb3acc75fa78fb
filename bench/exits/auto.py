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
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

import eecore
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.rows import Row, table_of
from bench.harness.smollm2 import WEIGHTS
from bench.harness.turns import batches_of, median_ratio, timed
from bench.harness.utterances import LONGEST_PARSE, utterances
from eecore import SelfSpeculative

KINDS = ("float32", "bfloat16", "int8")
EXIT_LAYERS, NUM_DRAFTS = (2, 3, 4), (3, 6)


def in_turns(
    model: eecore.Model, prompts: list[str], policy: SelfSpeculative, batch: int, rounds: int
) -> tuple[float, float, float]:
    """tokens/s of full depth, and the speed-ups of ``Auto`` and of a policy.

    They take turns batch by batch, in random order, so that other load on the machine slows all
    three alike. In the first round programs are recorded and ``Auto`` learns.
    """
    policies = (eecore.Full(), eecore.Auto(), policy)
    seconds: list[list[float]] = [[], [], []]
    order, tokens = random.Random(7), 0
    for number in range(1 + rounds):
        spent, tokens = [0.0] * 3, 0
        for group in batches_of(prompts, batch):
            for i in order.sample(range(3), 3):
                call: Any = {"exit": policies[i], "max_tokens": LONGEST_PARSE}
                took = timed(lambda call=call, group=group: eecore.generate(model, group, **call))
                spent[i] += took.seconds
                if i == 0:
                    tokens += sum(len(output.token_ids) for output in took.made)
        if number:
            for times, each in zip(seconds, spent, strict=True):
                times.append(each)
    full, auto, own = seconds
    return tokens / min(full), median_ratio(auto, full), median_ratio(own, full)


def row_of(weights: str, prompts: list[str], batch: int, rounds: int) -> Row:
    """The best pair of the grid, which is known only afterwards, and the medians of the rest."""
    found = {}
    for pair in product(EXIT_LAYERS, NUM_DRAFTS):
        model = eecore.load(
            device="cpu", kv_cache_tokens=4096, prefix_cache=False, **WEIGHTS[weights]
        )
        found[pair] = in_turns(model, prompts, SelfSpeculative(*pair), batch, rounds)
    speed_ups = {pair: own for pair, (_, _, own) in found.items()}
    best = max(speed_ups, key=speed_ups.__getitem__)
    return {
        "weights": weights,
        "batch": batch,
        "full_tokens_per_s": statistics.median(full for full, _, _ in found.values()),
        "best": list(best),
        "best_speedup": speed_ups[best],
        "median_speedup": sorted(speed_ups.values())[len(found) // 2],
        "auto_speedup": statistics.median(auto for _, auto, _ in found.values()),
    }


def markdown(result: Figures) -> str:
    columns = [
        ("weights", "{weights}"),
        ("batch", "{batch}"),
        ("full, tokens/s", "{full_tokens_per_s:.0f}"),
        ("best fixed (E, d)", "({best[0]}, {best[1]})"),
        ("its speed-up", "{best_speedup:.2f}x"),
        ("median of the grid", "{median_speedup:.2f}x"),
        ("auto", "{auto_speedup:.2f}x"),
        ("auto / best", lambda row: f"{row['auto_speedup'] / row['best_speedup']:.2f}"),
    ]
    about = (
        f"The intent model on {result['count']} held-out utterances, prompts included. The grid: "
        f"`SelfSpeculative` from layers {', '.join(map(str, EXIT_LAYERS))} with "
        f"{', '.join(map(str, NUM_DRAFTS))} drafts; the best of it is known only "
        "afterwards. Each pair beside full depth and `Auto` alone, batch by batch in turns; "
        f"medians of {result['rounds']} rounds, after one that is left out; {result['threads']} "
        f"thread(s), {in_words(result)}. `python -m bench auto`"
    )
    return f"{table_of(columns, result['rows'])}\n\n{about}"


REPORTS = (Report("auto", {"auto": markdown}, {"rows": ("weights", "batch")}),)


def main(words: Sequence[str]) -> None:
    made = parser("auto", __doc__, batches=(1, 8), rounds=8, threads=1)
    made.add_argument("--weights", nargs="+", default=KINDS, choices=KINDS)
    made.add_argument("--count", type=int, default=48, help="utterances")
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    prompts = [record["input"] for record in utterances(arguments.count)]
    rows = []
    for weights, batch in product(arguments.weights, arguments.batches):
        rows.append(row_of(weights, prompts, batch, arguments.rounds))
        say(rows[-1])
    result = {
        **machine(),
        "threads": arguments.threads,
        "count": arguments.count,
        "rounds": arguments.rounds,
        "rows": rows,
    }
    REPORTS[0].finish(result, arguments)
