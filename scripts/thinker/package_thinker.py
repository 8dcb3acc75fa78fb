"""Packages a trained thinker as bench/models/thinker: weights in bfloat16, its scores, its card.

python scripts/thinker/package_thinker.py models/thinker
"""

from __future__ import annotations

import json
import lzma
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "intents"))

import eecore
from bench.harness.places import THINKER
from bench.quality.chains import LENGTHS, chains
from bench.quality.think_model import answers, thought_figures
from package_intents import copy_model

BATCH = 8


def card(directory: Path, count: int, took: str) -> str:
    """README.md of the model, with the scores of its answers to questions of the test split."""
    model = eecore.load(directory, dtype="float32", kv_cache_tokens=16384)
    assert model.tokenizer is not None
    asked = list(islice(chains(0, "test"), count))
    outputs = answers(model, asked, BATCH, exit="full")
    about = json.loads((directory / "exits.json").read_text())
    training: dict[str, Any] = about["training"]
    held_out = about["held_out"]
    layers = range(1, about["num_layers"] + 1)
    shown = next(i for i, chain in enumerate(asked) if chain.attempts()[0][-1] != chain.answer)
    return (
        Path(__file__)
        .with_name("card.md")
        .read_text()
        .format(
            parameters=model.config.num_parameters / 1e6,
            layers=len(layers),
            question=asked[shown].question,
            thought=model.tokenizer.decode(outputs[shown].token_ids),
            shortest=LENGTHS[0],
            longest=LENGTHS[-1],
            steps=training["steps"],
            batch=training["batch_size"],
            tokens=about["training_tokens"] / 1e6,
            rate=training["learning_rate"],
            seed=training["seed"],
            took=took,
            exits=" | ".join(map(str, layers)),
            rules="---:|" * len(layers),
            losses=" | ".join(f"{loss:.3f}" for loss in held_out["loss"]),
            agreements=" | ".join(f"{share:.1%}" for share in held_out["agreement"]),
            count=count,
            **thought_figures(model.tokenizer, asked, outputs),
        )
    )


def main(
    model: Annotated[Path, typer.Argument(help="Made by train_thinker.py.")],
    took: Annotated[str, typer.Option(help="For the card.")] = "on one CPU core",
    count: Annotated[int, typer.Option(min=1, help="Questions to score.")] = 500,
    target: Annotated[Path, typer.Option(help="The folder to make.")] = THINKER,
    threads: Annotated[int, typer.Option(min=1)] = torch.get_num_threads(),
) -> None:
    """Package a model."""
    torch.set_num_threads(threads)
    copy_model(model, target)
    weights = target / "model.safetensors"
    (target / "model.safetensors.xz").write_bytes(lzma.compress(weights.read_bytes()))
    (target / "README.md").write_text(card(target, count, took))
    for path in target.iterdir():
        path.chmod(0o644)  # safetensors creates files that only the owner can read


if __name__ == "__main__":
    typer.run(main)
