"""Whether saved layers save time: exits and self-speculation compared with predicted times.

python -m bench depth                                       all of it, about 20 minutes
python -m bench depth --models intent --weights int8        a part of it
python -m bench depth --quick --json FILE                   fewer rounds, batches, threads

Only decoding steps of the engine are timed, greedy, without prompts and first tokens. All modes of
a model run in turns, with the same tokens in every round; a step's time is the minimum over rounds.
The expected time of a mode is predicted from the model cut at some depths and from the ops timed
alone, all in the same rounds (bench/depth/predictions.py). Writes bench/results/depth.json and the
tables in bench/results.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

import eecore
from bench.depth.measurement import Measurement
from bench.depth.models import SUBJECTS, Subject
from bench.harness.ceilings import are_cached
from bench.harness.command import parser, say
from bench.harness.machine import has_amx, in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.rows import Row, find, is_at, markdown_table, unique
from bench.harness.smollm2 import WEIGHTS

KINDS = ("float32", "bfloat16", "int8")
SETTING = ("model", "weights", "threads", "batch")

SHORT_LEAD = (
    "The time that saved layers save: decoding steps of `ConfidentExit` (softmax, each row exits "
    "alone) and `SelfSpeculative` as a speed-up over `Full()`; in brackets the share of the "
    "predicted speed-up: that of a model cut at the mean depth, with checks and filling, or of "
    "the passes of drafts and verification alone."
)
SPEEDS_ABOUT = (
    "Speed-up of decoding over `Full()`; in brackets, predicted over measured time. The first "
    "prediction is a model cut at the mean depth (on the line through `Full()` and two "
    "`FixedExit`), plus checks and filling timed as single ops; the second, after the slash, if "
    "rows exit one by one, is each layer's time for the rows still in flight. Weights are read "
    "once for many rows, so rows that exit alone save little where memory is the bound. The "
    "prediction of self-speculation is its own passes at the measured acceptance rate. The first "
    "models exit and draft as they were trained to; the other models are forced to exit at the "
    "layer named, after a check that no row passes, and what their layers after L/4 add is damped "
    "so that drafts are accepted."
)


def full(result: Figures) -> str:
    """The tables of every mode, with notes."""
    rows = result["modes"]
    models: dict[tuple[str, ...], list[str]] = {}  # by the modes that they have
    for model in unique(rows, "model"):
        own = tuple(unique([row for row in rows if row["model"] == model], "mode"))
        models.setdefault(own, []).append(model)
    parts = []
    for names, those in models.items():
        lines = []
        for values in dict.fromkeys(tuple(row[key] for key in SETTING) for row in rows):
            where = dict(zip(SETTING, values, strict=True))
            if where["model"] in those:
                depth, *modes = (find(rows, **where, mode=name) for name in names)
                assert depth is not None
                cells = ["" if row is None else cell(row, depth=True) for row in modes]
                lines.append([*map(str, values), f"{depth['token_ms']:.2f}", *cells])
        head = [*SETTING, "`Full()`, ms", *names[1:]]
        parts.append(markdown_table(head, lines, text_columns=2))
    lie = {True: "weights from a cache", False: "from memory"}
    sources = [
        (lie[row["from_cache"]], f"{row['model']} {row['weights']} ({row['bytes'] / 1e6:.0f} MB)")
        for row in result["weights"]
    ]
    places = {place: [name for at, name in sources if at == place] for place in lie.values()}
    said = "; ".join(f"{place}: {', '.join(names)}" for place, names in places.items() if names)
    amx = "with AMX" if result["has_amx"] else "without AMX"
    about = (
        f"{result['steps']} decoding steps, each by the fastest of {result['rounds']} rounds in "
        f"turns. {in_words(result)}, {amx}. `python -m bench depth`"
    )
    by_rate = f"By the rate at which so many bytes are read: {said}."
    return "\n\n".join([*parts, SPEEDS_ABOUT, by_rate, about])


def short(result: Figures) -> str:
    """The table of softmax exits and the longest drafts, on the fewest threads."""
    rows = result["modes"]
    threads = min(row["threads"] for row in rows)
    batches = unique(rows, "batch")
    head = ["model", "weights"]
    for batch in batches:
        head += [f"exits, batch {batch}", f"drafts, batch {batch}"]
    lines = []
    for model, weights in dict.fromkeys((row["model"], row["weights"]) for row in rows):
        where = {"model": model, "weights": weights, "threads": threads}
        line = [model, weights]
        for batch in batches:
            of_batch = [row for row in rows if is_at(row, {**where, "batch": batch})]
            exits = [row for row in of_batch if row["mode"].startswith("softmax, each")]
            drafts = [row for row in of_batch if row["acceptance"] is not None]
            line += [cell(found[-1]) if found else "" for found in (exits, drafts)]
        lines.append(line)
    table = markdown_table(head, lines, text_columns=2)
    return f"{SHORT_LEAD}\n\n{table}\n\n`python -m bench depth`"


def cell(row: Row, *, depth: bool = False) -> str:
    """A cell: speed-up, mean depth or acceptance rate, efficiencies."""
    text = f"{row['speed_up']:.2f}x"
    if depth and row["acceptance"] is not None:
        text += f" at {row['acceptance']:.0%}"
    elif depth and not row["mode"].startswith("Fixed"):
        text += f" at {row['mean_depth']:.1f}"
    shares = [row[name] for name in ("of_cut", "of_present") if row[name] is not None]
    return f"{text} ({' / '.join(f'{share:.0%}' for share in shares)})" if shares else text


REPORTS = (
    Report(
        "depth",
        {"depth in short": short, "depth": full},
        {"weights": ("model", "weights"), "modes": (*SETTING, "mode")},
    ),
)


def run(subjects: list[Subject], arguments: argparse.Namespace) -> Figures:
    """Measure all models with all kinds of weights on all numbers of threads."""
    modes: list[Row] = []
    sources: list[Row] = []
    load = partial(eecore.load, device="cpu", prefix_cache=False)
    for subject in subjects:
        for weights in arguments.weights:
            model = load(subject.directory, **WEIGHTS[weights])
            own = {"model": subject.name, "weights": weights}
            for threads in arguments.threads:
                began = time.perf_counter()
                torch.set_num_threads(threads)
                measured = Measurement(subject, model, weights, arguments.batches, arguments.steps)
                for _ in range(arguments.rounds):
                    measured.round()
                modes += [{**own, "threads": threads, **row} for row in measured.modes()]
                took = time.perf_counter() - began
                say(f"{subject.name} {weights}, {threads} threads: {took:.0f} s")
            num_bytes = measured.num_bytes
            sources.append({**own, "bytes": num_bytes, "from_cache": are_cached(num_bytes)})
    return {
        **machine(),
        "has_amx": has_amx(),
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "weights": sources,
        "modes": modes,
    }


def main(words: Sequence[str]) -> None:
    made = parser("depth", __doc__, batches=(1, 8, 32), rounds=4)
    chosen = [name for name in SUBJECTS if name != "tiny"]
    made.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=chosen)
    made.add_argument("--weights", nargs="+", choices=KINDS, default=KINDS)
    made.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    made.add_argument("--steps", type=int, default=8, help="a round")
    made.add_argument("--quick", action="store_true", help="2 rounds, batches 1 and 8, one thread")
    arguments = made.parse_args(words)
    if arguments.quick:
        arguments.rounds, arguments.batches, arguments.threads = 2, [1, 8], [1]
    with tempfile.TemporaryDirectory() as scratch:
        subjects = [SUBJECTS[name](Path(scratch)) for name in arguments.models]
        REPORTS[0].finish(run(subjects, arguments), arguments)
