"""The models whose exits and drafts are timed, and the modes in which each of them decodes.

A model that was trained for early exit runs on its own prompts with its calibrated thresholds. The
other models are forced to exit: all rows exit at a threshold of 0, after a check that no row
passes. For their drafts to be accepted, the weights damp what the layers after the exit add, which
does not change their time.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import eecore
from bench.decode.models import make_random_llama
from bench.harness.exits import MEASURES, NEVER, calibrated_policies
from bench.harness.places import MODELS, T5, unpacked
from bench.harness.smollm2 import get_smollm2

UNSURE = 1e-5  # scale of a classifier's weights: a larger one gives a large state confidence 1
DAMPING = 0.02
"""The factor at which about four of five drafts are accepted, in rounds of seven."""


@dataclass(frozen=True)
class Mode:
    """A policy and its name, in which L is the number of layers."""

    name: str
    policy: eecore.exits.Exit


@dataclass(frozen=True)
class Subject:
    """A model to be measured."""

    name: str
    directory: Path
    num_layers: int
    is_natural: bool
    """Whether the model exits by thresholds that were calibrated for it, on prompts of its task."""
    modes: list[Mode]
    prompts: list[str] | None
    """Texts, or None for prompts of a single token."""
    speculated_steps: int
    """Timed steps of self-speculation: few, since each gives many tokens and no text may end."""

    def tokens(self, model: eecore.Model, count: int, longest: int) -> list[list[int]]:
        """So many prompts, of at most so many tokens."""
        if self.prompts is None:
            return [[3 + row % (model.config.vocab_size - 3)] for row in range(count)]
        assert model.tokenizer is not None
        encoded = [model.tokenizer.encode(prompt)[:longest] for prompt in self.prompts]
        return [encoded[row % len(encoded)] for row in range(count)]


def depths(num_layers: int) -> dict[str, int]:
    """The depths at which a model is cut, by name."""
    return {"L/4": num_layers // 4, "L/2": num_layers // 2}


# Modes


def cuts(num_layers: int) -> list[Mode]:
    """Full depth first, then the model cut at two depths."""
    fixed = [
        Mode(f"FixedExit({name})", eecore.FixedExit(e)) for name, e in depths(num_layers).items()
    ]
    return [Mode("Full()", eecore.Full()), *fixed]


def speculations(num_layers: int, drafts: tuple[int, ...]) -> list[Mode]:
    layer = num_layers // 4
    return [
        Mode(f"SelfSpeculative(L/4, {count})", eecore.SelfSpeculative(layer, count))
        for count in drafts
    ]


def together_and_apart(name: str, policy: eecore.ConfidentExit) -> list[Mode]:
    """The policy in both batch modes; ``name`` has a placeholder for the batch mode."""
    return [
        Mode(name.format("each"), dataclasses.replace(policy, batch="each")),
        Mode(name.format("all"), dataclasses.replace(policy, batch="all")),
    ]


def calibrated_exits(directory: Path) -> list[Mode]:
    """The model's calibrated thresholds, without their guarantee, which holds for one dtype."""
    modes = []
    for measure, policy in calibrated_policies(directory).items():
        policy = dataclasses.replace(policy, calibration=None)
        modes += together_and_apart(f"{measure}, {{}}", policy)
    return modes


def forced_exits(num_layers: int, hidden_size: int) -> list[Mode]:
    """Policies by which all rows exit at one exit point and no row at the exit point before it."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, hidden_size, generator=generator) * UNSURE
    random = eecore.ExitClassifier(weight)
    modes = []
    for name, layer in depths(num_layers).items():
        for measure in MEASURES:
            policy = eecore.ConfidentExit(
                0.0,
                measure=measure,
                exit_points=(layer // 2, layer),
                thresholds={layer // 2: NEVER},
                classifier=random if measure == "classifier" else None,
            )
            modes += together_and_apart(f"{measure}, {{}}, {name}", policy)
    return modes


# Subjects


def natural(name: str, directory: Path) -> Subject:
    """A model trained for early exit on utterances to a smart home."""
    config = json.loads((directory / "config.json").read_text())
    num_layers = config.get("num_decoder_layers") or config["num_hidden_layers"]
    records = (T5 / "examples.jsonl").read_text().splitlines()
    return Subject(
        name,
        directory,
        num_layers,
        is_natural=True,
        modes=[
            *cuts(num_layers),
            *calibrated_exits(directory),
            *speculations(num_layers, (6, 8)),
        ],
        prompts=[json.loads(record)["input"] for record in records],
        speculated_steps=2,
    )


def forced(name: str, directory: Path) -> Subject:
    """A model that was not trained for early exit."""
    config = json.loads((directory / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    return Subject(
        name,
        damped(directory, num_layers // 4),
        num_layers,
        is_natural=False,
        modes=[
            *cuts(num_layers),
            *forced_exits(num_layers, config["hidden_size"]),
            *speculations(num_layers, (7,)),
        ],
        prompts=None,
        speculated_steps=5,
    )


def damped(directory: Path, first: int) -> Path:
    """A copy of a model whose layers from ``first`` on add little, made once, next to it."""
    target = directory.with_name(f"{directory.name}-damped")
    if (target / "config.json").is_file():
        return target
    target.mkdir(exist_ok=True)
    for file in directory.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            layer = name.removeprefix("model.layers.").split(".")[0]
            if layer.isdigit() and int(layer) >= first and ("o_proj" in name or "down_" in name):
                weights[name] = weight * DAMPING
        save_file(weights, target / file.name, metadata={"format": "pt"})
    for file in directory.glob("*.json"):
        if file.name != "config.json":
            shutil.copy(file, target)
    shutil.copy(directory / "config.json", target)  # last: it marks the copy as complete
    return target


def tiny(scratch: Path) -> Subject:
    """A tiny model for tests."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 8, "vocab_size": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 256}
    return forced("tiny", make_random_llama(scratch / "tiny", **sizes, **heads))


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "intent": lambda _: natural("intent", eecore.default_model()),
    "t5": lambda _: natural("calm-intents (T5)", unpacked(T5)),
    "random": lambda _: forced("random-llama-56m", make_random_llama(MODELS / "random-llama-56m")),
    "smollm2": lambda _: forced("smollm2-135m", get_smollm2()),
    "tiny": tiny,
}
