"""Trains a small T5 with CALM's loss, then the exit classifier on the frozen model.

    python scripts/intents/make_data.py data/intents
    python scripts/calm/train_calm.py data/intents models/calm-intents

The recipe is in scripts/small_model.py. Ctrl-C saves; ``--resume`` continues the run with its
original settings. The model directory has the weights, the tokenizer, exits.json (the quality of
each exit), classifier.safetensors, and the log under training/.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eecore.cli.app import run
from small_model import T5_MODEL, Task, calm_recipe, train_small_model

INTENTS = Task(ask="</s>", context=256, vocab_size=2048, start="<pad>")


def main(
    data: Annotated[Path, typer.Argument(help="The folder of train.jsonl and valid.jsonl.")],
    out: Annotated[Path, typer.Argument(help="The model directory to make.")],
    steps: Annotated[int, typer.Option(min=1)] = 11000,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    learning_rate: Annotated[
        float, typer.Option(help="Relative to the scale of the initial weights.")
    ] = 1e-2,
    layers: Annotated[int, typer.Option(min=2, help="On either side.")] = T5_MODEL["num_layers"],
    classifier_steps: Annotated[int, typer.Option(min=1)] = 1000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in OUT.")] = False,
    threads: Annotated[int, typer.Option(min=1)] = torch.get_num_threads(),
) -> None:
    """Train the model, then its classifier."""
    torch.set_num_threads(threads)
    model = {**T5_MODEL, "num_layers": layers, "num_decoder_layers": layers}
    model["n_positions"] = INTENTS.context
    config = calm_recipe(batch_size, learning_rate, seed, steps)
    train_small_model(model, data / "t5", INTENTS, data, out, config, resume=resume)
    options = ["--steps", classifier_steps, "--batch-size", batch_size, "--seed", seed]
    files = ["--data", data / "train.jsonl", "--out", out / "classifier.safetensors"]
    context = ["--context", INTENTS.context]
    words = ["train-classifier", out, *files, *context, *options]
    raise typer.Exit(run([str(word) for word in words]))


if __name__ == "__main__":
    typer.run(main)
