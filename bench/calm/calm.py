"""The early-exit framework's evaluation of a T5, and its full depth beside other engines.

python -m bench calm models/calm-intents --data data/intents/test.jsonl

The model is one that scripts/calm/train_calm.py made. Full depth, half of the layers, and confident
exits by softmax, classifier and state take turns (eecore evaluate calm); then Full() beside
transformers' and CTranslate2's greedy decoding of the same weights in float32, batch by batch in
turns. Writes bench/results/calm-NAME.json, where NAME is that of the model's directory, and its
page and figures into build/bench.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.calm.engines import Engine, figures, measure, own_engine, peer_engine, start_workers
from bench.calm.tables import page_of
from bench.harness.command import parser
from bench.harness.machine import machine
from bench.harness.results import Figures
from eecore.calibration import Example, read_examples
from eecore.cli.failures import UsageError
from eecore.lab.commands.evaluate import show_turn
from eecore.lab.commands.evaluate_calm import ConfidentExits
from eecore.lab.evaluation.calm import evaluate_calm
from eecore.models import model_digest


def full_depth(
    arguments: argparse.Namespace, model: eecore.Model, examples: list[Example], sha256: str
) -> dict[str, Any]:
    """eecore and the peers on the same batches."""
    assert model.tokenizer is not None
    prompts = [model.tokenizer.encode(example.prompt) for example in examples]
    left_out: dict[str, str] = {}
    workers, versions = start_workers(arguments.model, sha256, arguments.threads, left_out)
    own = own_engine(model, arguments.max_tokens)
    engines: list[Engine] = [own]
    engines += [peer_engine(worker, arguments.max_tokens) for worker in workers]
    rows: list[dict[str, Any]] = []
    try:
        for size in arguments.batch_size:
            measure(engines, prompts, size, arguments.rounds, left_out)
            rows += [figures(engine, own, size) for engine in engines]
    finally:
        for worker in workers:
            worker.close()
    return {"versions": versions, "left_out": left_out, "rows": rows}


def run(arguments: argparse.Namespace) -> Figures:
    """All figures."""
    exits = ConfidentExits(
        thresholds=arguments.thresholds,
        calibration=arguments.calibration,
        decay_tau=arguments.tau,
        exit_points=arguments.exit_points,
    )
    policies = exits.policies(arguments.model)
    examples = read_examples(arguments.data, limit=arguments.count)
    model = eecore.load(arguments.model, device="cpu", prefix_cache=False, dtype="float32")
    sha256 = model_digest(arguments.model)
    report = evaluate_calm(
        model,
        examples,
        policies,
        batch_sizes=arguments.batch_size,
        max_tokens=arguments.max_tokens,
        rounds=arguments.rounds,
        progress=lambda size, number, turn: show_turn(number, turn, f"batches of {size}, "),
    )
    result: Figures = {
        "model": arguments.model.name,
        "model_sha256": sha256,
        "data": arguments.data.name,
        "dtype": "float32",
        "threads": arguments.threads,
        **machine(),
        "evaluation": report.to_dict(),
        "full_depth": None,
    }
    if not arguments.skip_peers:
        result["full_depth"] = full_depth(arguments, model, examples, sha256)
    return result


def check_peers(directory: Path) -> None:
    """Exit where the peers could not run the model."""
    config = json.loads((directory / "config.json").read_text())
    if not config.get("is_encoder_decoder"):
        raise SystemExit(
            f"{directory}: expected an encoder-decoder model, got {config.get('model_type')}: "
            "run other models with --skip-peers"
        )


def main(words: Sequence[str]) -> None:
    made = parser("calm", __doc__, rounds=3, threads=1)
    made.add_argument("model", type=Path, help="a directory made by scripts/calm/train_calm.py")
    made.add_argument("--data", type=Path, required=True, help='JSON lines: {"input", "target"}')
    made.add_argument("--count", type=int, default=256, help="examples")
    made.add_argument("--max-tokens", type=int, default=96, help="new tokens a prompt")
    made.add_argument("--batch-size", type=int, nargs="+", default=[8, 32])
    made.add_argument("--thresholds", help="softmax=0.85,...; the paper's")
    made.add_argument("--calibration", type=Path, nargs="+", default=[], metavar="FILE")
    made.add_argument("--tau", type=float, help="the temperature of the decaying threshold")
    made.add_argument("--exit-points", help="2,4; all layers")
    made.add_argument("--skip-peers", action="store_true", help="eecore alone")
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    try:
        if not arguments.skip_peers:
            check_peers(arguments.model)
        result = run(arguments)
    except (eecore.EecoreError, UsageError, OSError) as error:
        raise SystemExit(str(error)) from None
    page_of(f"calm-{arguments.model.name.removeprefix('calm-')}").finish(result, arguments)
