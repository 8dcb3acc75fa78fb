"""Packages a trained intent model as the model that ships with eecore.

    python scripts/intents/package_intents.py models/intents data/intents \\
        --plain models/intents-plain

Writes python/eecore/data/intent: weights in bfloat16, tokenizer, exits.json, the exit classifier
(CALM §3.3), a calibrated threshold for each measure (CALM §4), exact match by split and exit, and
the model card with all of it. Takes about half an hour on two cores.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

import eecore
from eecore.calibration import read_examples
from eecore.calibration.exit_scores import ExitScore, Scored, score_exits
from eecore.cli.app import run
from eecore.files.readable import MEASURES_FOLDER
from eecore.models import model_digest
from score_intents import LONGEST_PARSE, write_exact_match

TARGET = Path(__file__).resolve().parents[2] / "python" / "eecore" / "data" / "intent"
COPIED = ("tokenizer.json", "tokenizer_config.json")
# The loss of a parse is 1 unless it is exactly the full model's parse.
DELTA = 0.02  # the largest mean loss
EPSILON = 0.05  # the probability that the loss is larger
# Exit points by measure: few, since each check stops between layers, and a softmax check costs an
# LM head, as much as 0.8 of a layer. A token that exits earlier fills more layers from its state.
POINTS = {"softmax": "3,5", "state": "7", "classifier": "3,5,7"}
GRID = "1,0.9999,0.9995,0.999,0.998,0.995,0.99,0.98,0.97,0.95,0.925,0.9,0.85,0.8,0.7,0.6,0.5"


def copy_model(source: Path, target: Path) -> None:
    """Write weights in bfloat16, tokenizer and exits.json."""
    if target.exists():
        shutil.rmtree(target)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(target)
    for name in COPIED:
        shutil.copyfile(source / name, target / name)
    about = json.loads((source / "exits.json").read_text())
    about["model_sha256"] = model_digest(target)
    (target / "exits.json").write_text(json.dumps(about, indent=2) + "\n")


def must(*command: object) -> None:
    """Run a command of eecore; typer.Exit if it fails."""
    if run([str(word) for word in command]):
        raise typer.Exit(1)


def calibrate(target: Path, data: Path, prompts: int) -> None:
    """Train the classifier and calibrate the thresholds."""
    classifier = target / MEASURES_FOLDER / "classifier.safetensors"
    classifier.parent.mkdir()
    must("train-classifier", target, "--data", data / "train.jsonl", "--out", classifier)
    for measure, points in POINTS.items():
        options: list[object] = ["--classifier", classifier] if measure == "classifier" else []
        options += ["--exit-points", points]
        must(
            *("calibrate", target, "--data", data / "valid.jsonl", "--limit", prompts),
            *("--out", target / f"calibration-{measure}.json", "--measure", measure, *options),
            *("--delta", DELTA, "--epsilon", EPSILON, "--similarity", "exact", "--grid", GRID),
            *("--max-tokens", LONGEST_PARSE, "--dtype", "float32"),
        )


def exit_scores(directory: Path, data: Path, count: int) -> list[ExitScore]:
    """Scores of every exit on the targets of the test split, with the stored weights."""
    model = eecore.load(directory, dtype="float32", kv_cache_tokens=256)
    assert model.tokenizer is not None
    sequences = []
    for example in read_examples(data / "test.jsonl", limit=count, needs_target=True):
        given = model.tokenizer.encode(example.prompt)
        learnt = model.tokenizer.encode(example.target or "", add_special_tokens=False)
        sequences.append(Scored([*given, *learnt, 0], len(given)))
    return score_exits(model.network, sequences, model.config.exit_layers)


def card(
    target: Path, scores: list[ExitScore], plain: list[ExitScore] | None, took: str, count: int
) -> str:
    """README.md of the model."""
    about = json.loads((target / "exits.json").read_text())
    training: dict[str, Any] = about["training"]
    exact = json.loads((target / "exact_match.json").read_text())
    layers = [score.exit_layer for score in scores]
    rows = [
        "| exit layer | " + " | ".join(map(str, layers)) + " |",
        "|---|" + "---:|" * len(layers),
        "| loss of the target (nats a token) | "
        + " | ".join(f"{math.log(score.perplexity):.3f}" for score in scores)
        + " |",
        "| agrees with the last layer | "
        + " | ".join(f"{score.agreement:.1%}" for score in scores)
        + " |",
    ]
    for split, by_exit in exact.items():
        cells = " | ".join(f"{by_exit[str(layer)]:.1%}" for layer in layers)
        rows.append(f"| exact match, {split} | {cells} |")
    thresholds = []
    for measure, points in POINTS.items():
        found = json.loads((target / f"calibration-{measure}.json").read_text())
        chosen = [step for step in found["steps"] if step["threshold"] == found["threshold"]]
        depth = chosen[0]["mean_exit_layer"] if chosen else len(layers)
        thresholds.append(
            f"| {measure} | {points} | {found['threshold']:g} | {depth:.2f} | "
            f"{found['num_prompts']} |"
        )
    baseline = ""
    if plain is not None:
        ours, theirs = (math.log(each[-1].perplexity) for each in (scores, plain))
        baseline = (
            f"\nThe same model trained on the same batches without dropout and early exits has a "
            f"last-layer loss of {theirs:.4f} nats a token on the test split; this one has "
            f"{ours:.4f} ({ours / theirs - 1:+.1%}).\n"
        )
    return (
        Path(__file__)
        .with_name("card.md")
        .read_text()
        .format(
            parameters=sum(
                p.numel() for p in AutoModelForCausalLM.from_pretrained(target).parameters()
            )
            / 1e6,
            steps=training["steps"],
            batch=training["batch_size"],
            rate=training["learning_rate"],
            tokens=about["training_tokens"] / 1e6,
            took=took,
            count=count,
            scores="\n".join(rows),
            baseline=baseline,
            thresholds="\n".join(thresholds),
            delta=DELTA,
            epsilon=EPSILON,
            confidence=1 - EPSILON,
        )
    )


def main(
    model: Annotated[Path, typer.Argument(help="Made by train_intents.py.")],
    data: Annotated[Path, typer.Argument(help="Made by make_data.py.")],
    plain: Annotated[
        Path | None, typer.Option(help="Made by train_intents.py --plain, to compare with.")
    ] = None,
    took: Annotated[str, typer.Option(help="For the card.")] = "on two CPU cores",
    prompts: Annotated[int, typer.Option(min=1, help="To calibrate on.")] = 3000,
    count: Annotated[int, typer.Option(min=1, help="To score, of each split.")] = 1000,
    target: Annotated[Path, typer.Option(help="Where the package has it.")] = TARGET,
    card_only: Annotated[bool, typer.Option("--card-only", help="Write only the card.")] = False,
    threads: Annotated[int, typer.Option(min=1)] = torch.get_num_threads(),
) -> None:
    """Package a model."""
    torch.set_num_threads(threads)
    if not card_only:
        copy_model(model, target)
        calibrate(target, data, prompts)
        write_exact_match(target, data, count)
    scores = exit_scores(target, data, 3000)
    baseline = None if plain is None else exit_scores(plain, data, 3000)
    (target / "README.md").write_text(card(target, scores, baseline, took, count))
    for path in target.rglob("*.*"):
        path.chmod(0o644)  # safetensors creates files that only the owner can read


if __name__ == "__main__":
    typer.run(main)
