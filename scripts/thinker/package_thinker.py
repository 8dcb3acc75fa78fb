"""Packages a trained thinker as bench/models/thinker: weights in bfloat16, its scores, its card,
and a calibration of when its thoughts may end.

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
from bench.quality.think_model import KV_CACHE_TOKENS, answers, thought_figures
from eecore import ThoughtCalibration, ThoughtStop, calibrate_thoughts
from eecore.calibration import Example
from package_intents import copy_model

BATCH = 8
BUDGET = 512
"""Tokens of a thought in the calibration."""
RULE = ThoughtStop(1.0, agreeing=1, every=48)
MAX_LOSS = 0.05


def calibrate(model: eecore.Model, directory: Path, count: int) -> ThoughtCalibration:
    """Find when its thoughts may end, and save that beside the model."""
    asked = islice(chains(0, "calibrate"), count)
    questions = [Example(chain.question, str(chain.answer)) for chain in asked]
    found = calibrate_thoughts(model, questions, RULE, max_loss=MAX_LOSS, thinking_budget=BUDGET)
    found.save(ThoughtCalibration.file_of(directory))
    return found


def card(
    model: eecore.Model, directory: Path, found: ThoughtCalibration, count: int, took: str
) -> str:
    """README.md of the model, with the scores of its answers to questions of the test split."""
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
            promise=found.promise,
            every=found.stop.every,
            threshold=found.stop.threshold,
            saved=found.saved,
            **thought_figures(model.tokenizer, asked, outputs),
        )
    )


def main(
    model: Annotated[Path, typer.Argument(help="Made by train_thinker.py.")],
    took: Annotated[str, typer.Option(help="For the card.")] = "on one CPU core",
    count: Annotated[int, typer.Option(min=1, help="Questions to score.")] = 500,
    prompts: Annotated[int, typer.Option(min=1, help="Questions to calibrate on.")] = 600,
    target: Annotated[Path, typer.Option(help="The folder to make.")] = THINKER,
    threads: Annotated[int, typer.Option(min=1)] = torch.get_num_threads(),
) -> None:
    """Package a model."""
    torch.set_num_threads(threads)
    copy_model(model, target)
    weights = target / "model.safetensors"
    (target / "model.safetensors.xz").write_bytes(lzma.compress(weights.read_bytes()))
    loaded = eecore.load(target, dtype="float32", kv_cache_tokens=KV_CACHE_TOKENS)
    found = calibrate(loaded, target, prompts)
    (target / "README.md").write_text(card(loaded, target, found, count, took))
    for path in target.iterdir():
        path.chmod(0o644)  # safetensors creates files that only the owner can read


if __name__ == "__main__":
    typer.run(main)
