"""The models whose exits and drafts are timed, and the modes in which each of them decodes.

A model that was trained for early exit runs on its own prompts with its calibrated thresholds.
Others are made to exit: at a threshold of 0 everybody leaves, after a check that nobody passes. For
their drafts to be accepted, what layers behind the exit add is damped in the weights; it takes the
same time.
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
from bench.harness.places import MODELS, T5, unpacked_t5
from bench.harness.smollm2 import get_smollm2

UNSURE = 1e-5  # of a classifier: surer, a large state would be worth a confidence of 1
DAMPING = 0.02
"""So that about four of five drafts are accepted, in rounds of seven."""


@dataclass(frozen=True)
class Mode:
    """A row's policy; L is the number of layers in its name."""

    name: str
    policy: eecore.exits.Exit


@dataclass(frozen=True)
class Subject:
    """A model to be measured."""

    name: str
    directory: Path
    num_layers: int
    is_natural: bool
    """Exits by its own thresholds on its own prompts."""
    modes: list[Mode]
    prompts: list[str] | None
    """None: single tokens."""
    speculated_steps: int
    """Each gives many tokens, and behind its end a text is not what the model was trained for."""

    def tokens(self, model: eecore.Model, count: int, longest: int) -> list[list[int]]:
        """So many prompts, of at most so many tokens."""
        if self.prompts is None:
            return [[3 + row % (model.config.vocab_size - 3)] for row in range(count)]
        assert model.tokenizer is not None
        encoded = [model.tokenizer.encode(prompt)[:longest] for prompt in self.prompts]
        return [encoded[row % len(encoded)] for row in range(count)]


def depths(num_layers: int) -> dict[str, int]:
    """At which models are cut, by name."""
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
    """``name`` has a place for the batch mode."""
    return [
        Mode(name.format("each"), dataclasses.replace(policy, batch="each")),
        Mode(name.format("all"), dataclasses.replace(policy, batch="all")),
    ]


def calibrated_exits(directory: Path) -> list[Mode]:
    """The model's own thresholds, without their guarantee, which is for one dtype alone."""
    modes = []
    for measure, policy in calibrated_policies(directory).items():
        policy = dataclasses.replace(policy, calibration=None)
        modes += together_and_apart(f"{measure}, {{}}", policy)
    return modes


def forced_exits(num_layers: int, hidden_size: int) -> list[Mode]:
    """Everybody leaves at one exit point, and nobody at the one before it."""
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
    """Trained for early exit, on what people say to a home."""
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
    """Not trained for it."""
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
    """The model beside it whose layers from ``first`` on add little, made once."""
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
    shutil.copy(directory / "config.json", target)  # last: it says that the rest is there
    return target


def tiny(scratch: Path) -> Subject:
    """For tests."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 8, "vocab_size": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 256}
    return forced("tiny", make_random_llama(scratch / "tiny", **sizes, **heads))


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "intent": lambda _: natural("intent", eecore.default_model()),
    "t5": lambda _: natural("calm-intents (T5)", unpacked_t5()),
    "random": lambda _: forced("random-llama-56m", make_random_llama(MODELS / "random-llama-56m")),
    "smollm2": lambda _: forced("smollm2-135m", get_smollm2()),
    "tiny": tiny,
}
