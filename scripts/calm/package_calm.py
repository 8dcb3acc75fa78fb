"""Packages a trained T5 as the model that the benchmarks and tests use.

    python scripts/calm/package_calm.py models/calm-intents data/intents

Writes bench/models/calm-intents: weights in bfloat16, tokenizer, exits.json, learning curve, the
exit classifier (CALM §3.3), a threshold for each measure (CALM §4), the first held-out pairs as
examples.jsonl, and a card with exact match by exit.
"""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForSeq2SeqLM

import eecore
from eecore.cli.app import run
from eecore.models import model_digest

TARGET = Path(__file__).resolve().parents[2] / "bench" / "models" / "calm-intents"
COPIED = ("tokenizer.json", "tokenizer_config.json", "training/run.svg", "training/evaluations.csv")
# The loss of a text is 1 unless it is exactly the full model's text.
DELTA = 0.05  # the largest mean loss
EPSILON = 0.05  # the probability that the loss is larger
POINTS = "2,4"
GRID = "1,0.999,0.99,0.98,0.97,0.95,0.9,0.85,0.8,0.7,0.6,0.5"
LONGEST, EXAMPLES = 96, 100


def must(*command: object) -> None:
    """Run a command of eecore; typer.Exit if it fails."""
    if run([str(word) for word in command]):
        raise typer.Exit(1)


def copy_model(source: Path, target: Path) -> None:
    """Write weights in bfloat16, tokenizer, learning curve and exits.json."""
    if target.exists():
        shutil.rmtree(target)
    model = AutoModelForSeq2SeqLM.from_pretrained(source, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(target)
    for name in COPIED:
        shutil.copyfile(source / name, target / Path(name).name)
    about = json.loads((source / "exits.json").read_text())
    about["model_sha256"] = model_digest(target)
    (target / "exits.json").write_text(json.dumps(about, indent=2) + "\n")


def add_exits(target: Path, data: Path, prompts: int) -> None:
    """Train the classifier and calibrate the thresholds."""
    classifier = target / "classifier.safetensors"
    must(
        *("train-classifier", target, "--data", data / "train.jsonl", "--out", classifier),
        *("--steps", 1000, "--batch-size", 8),
    )
    for measure in ("softmax", "state", "classifier"):
        options: list[object] = ["--classifier", classifier] if measure == "classifier" else []
        must(
            *("calibrate", target, "--data", data / "valid.jsonl", "--limit", prompts),
            *("--out", target / f"calibration-{measure}.json", "--measure", measure, *options),
            *("--delta", DELTA, "--epsilon", EPSILON, "--similarity", "exact", "--grid", GRID),
            *("--max-tokens", LONGEST, "--exit-points", POINTS, "--dtype", "float32"),
        )


def exact_match(target: Path, data: Path, count: int) -> dict[int, float]:
    """Exact match on held-out texts, by exit layer."""
    model = eecore.load(target, dtype="float32", kv_cache_tokens=16384)
    records = [json.loads(line) for line in (data / "test.jsonl").read_text().splitlines()[:count]]
    shares = {}
    for exit_layer in range(1, model.config.num_layers + 1):
        outputs = eecore.generate(
            model,
            [record["input"] for record in records],
            exit=eecore.FixedExit(exit_layer),
            max_tokens=LONGEST,
        )
        right = sum(o.text == r["target"] for o, r in zip(outputs, records, strict=True))
        shares[exit_layer] = right / len(records)
    return shares


def card(target: Path, shares: dict[int, float], count: int, took: str) -> str:
    """README.md of the model."""
    about = json.loads((target / "exits.json").read_text())
    training, held_out = about["training"], about["held_out"]
    rows = [
        ["exit layer", *map(str, shares)],
        ["held-out loss (nats a token)", *(f"{loss:.3f}" for loss in held_out["loss"])],
        ["agrees with the last layer", *(f"{share:.1%}" for share in held_out["agreement"])],
        [f"exact match, first {count} of test", *(f"{share:.1%}" for share in shares.values())],
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---|" + "---:|" * len(shares))
    thresholds = []
    for measure in ("softmax", "state", "classifier"):
        found = json.loads((target / f"calibration-{measure}.json").read_text())
        thresholds.append(f"| {measure} | {found['threshold']:g} | {found['num_prompts']} |")
    return "\n".join(
        [
            "# calm-intents",
            "",
            "A T5 of 8.7M parameters, 8 layers in the encoder and 8 in the decoder, that turns",
            "what somebody says to a home into its parse, trained from nothing with CALM's loss",
            "for the benchmarks and tests of eecore. Data: `scripts/intents/make_data.py`",
            "(templates of `home-assistant-intents`, Apache-2.0). Weights in bfloat16;",
            "git has them compressed, `bench.harness.places.unpacked_t5` puts them beside that.",
            "",
            f"`scripts/calm/train_calm.py data/intents models/calm-intents --steps "
            f"{training['steps']}`, seed {training['seed']}, {about['training_tokens'] / 1e6:.1f}M "
            f"tokens, {took}; then `scripts/calm/package_calm.py`. The learning curve is "
            "`run.svg`, `evaluations.csv`.",
            "",
            *lines,
            "",
            f"Thresholds by Learn then Test, exit points {POINTS}: with probability "
            f"{1 - EPSILON:g} at most {DELTA:.0%} of the parses differ from the full model's "
            "(float32).",
            "",
            "| measure | threshold | prompts |",
            "|---|---:|---:|",
            *thresholds,
            "",
        ]
    )


def main(
    model: Annotated[Path, typer.Argument(help="Made by train_calm.py.")],
    data: Annotated[Path, typer.Argument(help="Made by make_data.py.")],
    took: Annotated[str, typer.Option(help="For the card.")] = "on one CPU core",
    prompts: Annotated[int, typer.Option(min=1, help="To calibrate on.")] = 400,
    count: Annotated[int, typer.Option(min=1, help="To score.")] = 1000,
    target: Annotated[Path, typer.Option(help="Where it goes.")] = TARGET,
    threads: Annotated[int, typer.Option(min=1)] = torch.get_num_threads(),
) -> None:
    """Package a model."""
    torch.set_num_threads(threads)
    copy_model(model, target)
    add_exits(target, data, prompts)
    lines = (data / "test.jsonl").read_text().splitlines(keepends=True)[:EXAMPLES]
    (target / "examples.jsonl").write_text("".join(lines))
    (target / "README.md").write_text(card(target, exact_match(target, data, count), count, took))
    weights = target / "model.safetensors"
    (target / f"{weights.name}.xz").write_bytes(lzma.compress(weights.read_bytes(), preset=9))
    for path in target.iterdir():
        path.chmod(0o644)  # safetensors creates files that only the owner can read


if __name__ == "__main__":
    typer.run(main)
