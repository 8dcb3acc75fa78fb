"""Trains a small Llama with early exits to parse utterances to a smart home.

    python scripts/intents/make_data.py data/intents
    python scripts/intents/train_intents.py data/intents models/intents
    python scripts/intents/train_intents.py data/intents models/intents-plain --plain
    python scripts/intents/train_intents.py data/intents models/looped-loops --loops 4

The recipe is in scripts/small_model.py; ``--plain`` trains without dropout and losses of early
exits. Ctrl-C saves; ``--resume`` continues the run with its original settings. At the end every
exit is scored by exact match: see score_intents.py.

With ``--loops`` the model is an Ouro, which runs its layers several times. Its exit gate is trained
in a second stage:

    eecore train models/looped-loops --data data/intents/train.jsonl --out models/looped \\
        --loss gate --steps 500 --learning-rate 0.01
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from score_intents import write_exact_match
from small_model import MODEL, Task, recipe, train_small_model

INTENTS = Task(ask="<|parse|>", context=256, vocab_size=2048)


def main(
    data: Annotated[Path, typer.Argument(help="Made by make_data.py.")],
    out: Annotated[Path, typer.Argument(help="The model directory to make.")],
    steps: Annotated[int, typer.Option(min=1)] = 14000,
    plain: Annotated[bool, typer.Option("--plain", help="No early exits, no dropout.")] = False,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    learning_rate: Annotated[float, typer.Option()] = 1.5e-3,
    layers: Annotated[int, typer.Option(min=2)] = MODEL["num_hidden_layers"],
    loops: Annotated[int, typer.Option(min=1, help="Loops over the layers.")] = 1,
    evaluated: Annotated[
        int, typer.Option(min=1, help="Utterances of each split for exact match.")
    ] = 200,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in OUT.")] = False,
    threads: Annotated[int, typer.Option(min=1)] = torch.get_num_threads(),
) -> None:
    """Train, then score every exit."""
    torch.set_num_threads(threads)
    if layers % loops:
        raise typer.BadParameter(f"--layers: expected a multiple of {loops}, got {layers}")
    model = {**MODEL, "num_hidden_layers": layers // loops}
    model["max_position_embeddings"] = INTENTS.context
    if loops > 1:
        model |= {"architectures": ["OuroForCausalLM"], "model_type": "ouro"}
        # The usual 0.02 is for wider models: this one learns more slowly from it.
        model |= {"total_ut_steps": loops, "initializer_range": MODEL["hidden_size"] ** -0.5}
    config = recipe(plain, loops > 1, batch_size, learning_rate, seed, steps)
    train_small_model(model, data, INTENTS, data, out, config, resume=resume)
    write_exact_match(out, data, evaluated)


if __name__ == "__main__":
    typer.run(main)
