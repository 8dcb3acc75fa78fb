"""Trains a small Llama with early exits to describe a Debian package in one line.

    sudo apt-get -o Acquire::Languages=en update
    python scripts/synopsis/make_synopses.py data/synopsis
    python scripts/synopsis/train_synopsis.py data/synopsis models/synopsis --minutes 120
    eecore evaluate layerskip models/synopsis --data data/synopsis/test.jsonl --limit 200

The recipe is in scripts/small_model.py. Ctrl-C saves; ``--resume`` continues the run with its
original settings.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from small_model import MODEL, Length, Task, train_small_model

SYNOPSIS = Task(ask="<|synopsis|>", context=512, vocab_size=4096)


def main(
    data: Annotated[Path, typer.Argument(help="Made by make_synopses.py.")],
    out: Annotated[Path, typer.Argument(help="The model directory to make.")],
    minutes: Annotated[float | None, typer.Option(min=0.1, help="About how long to train.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of --minutes.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="No early exits, no dropout.")] = False,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    learning_rate: Annotated[float, typer.Option()] = 1e-3,
    layers: Annotated[int, typer.Option(min=2)] = MODEL["num_hidden_layers"],
    seed: Annotated[int, typer.Option(min=0)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in OUT.")] = False,
    threads: Annotated[int, typer.Option(min=1)] = torch.get_num_threads(),
) -> None:
    """Train, and write every exit's loss and agreement into the model's directory."""
    torch.set_num_threads(threads)
    train_small_model(
        SYNOPSIS,
        data,
        out,
        length=Length(steps, minutes),
        plain=plain,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        layers=layers,
        resume=resume,
    )


if __name__ == "__main__":
    typer.run(main)
