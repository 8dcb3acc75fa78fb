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
from pathlib import Path

import torch

import eecore
from bench.depth.measurement import Measurement
from bench.depth.models import SUBJECTS, Subject
from bench.depth.tables import full, short
from bench.harness.ceilings import are_cached
from bench.harness.command import parser, say
from bench.harness.machine import has_amx, machine
from bench.harness.results import Figures, Report
from bench.harness.smollm2 import WEIGHTS

KINDS = ("float32", "bfloat16", "int8")
PARTS = ("modes", "hosts", "mixes")
SETTING = ("model", "weights", "threads", "batch")
REPORTS = (
    Report(
        "depth",
        {"depth in short": short, "depth": full},
        {
            "weights": ("model", "weights"),
            "modes": (*SETTING, "mode"),
            "hosts": SETTING,
            "mixes": (*SETTING, "mix"),
        },
    ),
)


def run(subjects: list[Subject], arguments: argparse.Namespace) -> Figures:
    """Measure all models with all kinds of weights on all numbers of threads."""
    result: Figures = {
        **machine(),
        "has_amx": has_amx(),
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "weights": [],
        **{part: [] for part in PARTS},
    }
    for subject in subjects:
        for weights in arguments.weights:
            model = eecore.load(
                subject.directory, device="cpu", prefix_cache=False, **WEIGHTS[weights]
            )
            for threads in arguments.threads:
                began = time.perf_counter()
                torch.set_num_threads(threads)
                measured = Measurement(subject, model, weights, arguments.batches, arguments.steps)
                for _ in range(arguments.rounds):
                    measured.round()
                what = {"model": subject.name, "weights": weights, "threads": threads}
                for part in PARTS:
                    result[part] += [{**what, **row} for row in getattr(measured, part)()]
                seconds = time.perf_counter() - began
                say(f"{' '.join(map(str, what.values()))}: {seconds:.0f} s")
            result["weights"].append(
                {
                    "model": subject.name,
                    "weights": weights,
                    "bytes": measured.num_bytes,
                    "from_cache": are_cached(measured.num_bytes),
                }
            )
    return result


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
