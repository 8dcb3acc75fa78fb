"""The early-exit framework's evaluation of a T5: quality by measure and threshold of its exits.

python -m bench calm bench/models/calm-intents --data data/intents/test.jsonl

The model is one that scripts/calm/train_calm.py made. Full depth, half of the layers, and the
model's calibrated exits take turns, as in ``eecore evaluate calm``. Writes
bench/results/calm-intents.json and the table in bench/results/tasks.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import eecore
from bench.harness.command import parser
from bench.harness.exits import calibrated_policies
from bench.harness.machine import in_words, machine
from bench.harness.places import T5, unpacked_t5
from bench.harness.results import Figures, Report
from bench.harness.rows import Columns, Row, table_of
from eecore.calibration import read_examples
from eecore.lab.evaluation.calm import evaluate_calm
from eecore.models import model_digest


def threshold(row: Row) -> str:
    """The threshold of a confident exit, followed by those of single layers."""
    settings = row["settings"]
    if settings is None:
        return ""
    single = (f"{layer}: {value:g}" for layer, value in settings["thresholds"].items())
    return ", ".join([f"{settings['threshold']:g}", *single])


def markdown(result: Figures) -> str:
    """Quality by measure and exit."""
    found = result["evaluation"]
    rows_exit = {None: "", "each": "each", "all": "all {batch_size}"}
    quality: Columns = (
        ("technique", "{technique}"),
        ("rows exit", lambda row: rows_exit[row["batch"]].format_map(row)),
        ("threshold", threshold),
        (f"{found['metric']} to full", "{score_to_full:.4f}"),
        ("exact to full", "{exact_to_full:.4f}"),
        (f"{found['metric']} to label", "{score_to_label:.4f}"),
        ("exact to label", "{exact_to_label:.4f}"),
        ("exit rate", "{exit_rate:.1%}"),
        ("exit layer", "{mean_exit_layer:.2f}"),
    )
    # Where the batch exits together, the text depends on the other rows.
    first = found["batch_sizes"][0]
    rows = [r for r in found["rows"] if r["batch_size"] == first or r["batch"] == "all"]
    about = (
        f"{found['num_examples']} examples, {found['max_tokens']} new tokens at most, greedy; "
        f"{found['num_layers']} layers; {found['rounds']} round(s). Model "
        f"{result['model_sha256'][:12]} on {result['data']}, {result['dtype']}, "
        f"{result['threads']} thread(s). {in_words(result)}. `python -m bench calm`"
    )
    return f"{table_of(quality, rows, text_columns=2)}\n\n{about}"


REPORTS = (Report("calm-intents", {"calm-intents": markdown}),)


def run(arguments: argparse.Namespace) -> Figures:
    """All figures."""
    examples = read_examples(arguments.data, limit=arguments.count)
    model = eecore.load(arguments.model, device="cpu", prefix_cache=False, dtype="float32")
    sha256 = model_digest(arguments.model)
    report = evaluate_calm(
        model,
        examples,
        list(calibrated_policies(arguments.model).values()),
        batch_sizes=arguments.batch_size,
        max_tokens=arguments.max_tokens,
        rounds=arguments.rounds,
    )
    return {
        "model": arguments.model.name,
        "model_sha256": sha256,
        "data": arguments.data.name,
        "dtype": "float32",
        "threads": arguments.threads,
        **machine(),
        "evaluation": asdict(report),
    }


def main(words: Sequence[str]) -> None:
    made = parser("calm", __doc__, rounds=3, threads=1)
    made.add_argument("model", type=Path, help="a directory made by scripts/calm/train_calm.py")
    made.add_argument("--data", type=Path, required=True, help='JSON lines: {"input", "target"}')
    made.add_argument("--count", type=int, default=256, help="examples")
    made.add_argument("--max-tokens", type=int, default=96, help="new tokens a prompt")
    made.add_argument("--batch-size", type=int, nargs="+", default=[8, 32])
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    if arguments.model.resolve() == T5:
        unpacked_t5()
    try:
        result = run(arguments)
    except (eecore.EecoreError, OSError) as error:
        raise SystemExit(str(error)) from None
    REPORTS[0].finish(result, arguments)
