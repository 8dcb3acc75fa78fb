"""Exact match of a trained model's parses, by split and exit layer.

    python scripts/intents/score_intents.py models/intents data/intents --count 1000

Greedy, by eecore.generate: the model cut after each layer, and at full depth. Writes
exact_match.json into the model's directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import eecore
from make_data import SPLITS

LONGEST_PARSE = 96


def exact_match(directory: Path, data: Path, count: int) -> dict[str, dict[str, float]]:
    """Exact match of parses, by split and exit layer; prints each split's scores."""
    model = eecore.load(directory, dtype="float32", kv_cache_tokens=16384)
    num_layers = model.config.num_layers
    scores: dict[str, dict[str, float]] = {}
    for split in SPLITS[1:]:
        lines = (data / f"{split}.jsonl").read_text().splitlines()[:count]
        records = [json.loads(line) for line in lines]
        scores[split] = {}
        for exit_layer in reversed(model.config.exit_layers):
            policy = eecore.Full() if exit_layer == num_layers else eecore.FixedExit(exit_layer)
            outputs = eecore.generate(
                model,
                [record["input"] for record in records],
                exit=policy,
                max_tokens=LONGEST_PARSE,
            )
            right = sum(o.text == r["target"] for o, r in zip(outputs, records, strict=True))
            scores[split][str(exit_layer)] = right / len(records)
        shares = "  ".join(f"{layer}: {share:.3f}" for layer, share in scores[split].items())
        print(f"{split}, exact match by exit layer  {shares}", flush=True)
    return scores


def write_exact_match(model: Path, data: Path, count: int) -> None:
    """Score the first ``count`` utterances of each split; write exact_match.json."""
    scores = exact_match(model, data, count)
    (model / "exact_match.json").write_text(json.dumps(scores, indent=2) + "\n")


def main(
    model: Annotated[Path, typer.Argument(help="Made by train_intents.py.")],
    data: Annotated[Path, typer.Argument(help="Made by make_data.py.")],
    count: Annotated[int, typer.Option(min=1, help="Utterances of each split.")] = 1000,
) -> None:
    """Score every exit of a model."""
    write_exact_match(model, data, count)


if __name__ == "__main__":
    typer.run(main)
