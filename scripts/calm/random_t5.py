"""A random T5 of T5 v1.1 small's sizes, to measure the cost of exits at this size of layers.

    python scripts/calm/random_t5.py data/intents models/calm-random-small
    python -m bench calm models/calm-random-small --data data/intents/test.jsonl --count 32 \\
        --max-tokens 32 --thresholds softmax=0,state=0,classifier=0 --exit-points 4

Every state passes the thresholds, so that all tokens but the first exit at the exit point.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train_calm import TASKS

from eecore.exits import ExitClassifier
from eecore.lab.training import save_classifier
from eecore.models import model_digest
from small_model import T5_MODEL, starting_point, train_tokenizer

SIZES = {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_heads": 6, "vocab_size": 32128}


def main(
    data: Annotated[Path, typer.Argument(help="The folder of train.jsonl.")],
    out: Annotated[Path, typer.Argument(help="The model directory to make.")],
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Write random weights, a tokenizer and an untrained classifier."""
    tokenizer = data / "t5"
    if not (tokenizer / "tokenizer.json").is_file():
        train_tokenizer(tokenizer, TASKS["intents"], data)
    start = starting_point({**T5_MODEL, **SIZES}, tokenizer, seed)
    start.model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, out / name)
    unsure = ExitClassifier(torch.zeros(2, SIZES["d_model"]), torch.zeros(2))
    about = {"model_sha256": model_digest(out)}
    save_classifier(unsure, out / "classifier.safetensors", about)


if __name__ == "__main__":
    typer.run(main)
