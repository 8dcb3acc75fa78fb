"""A trained draft head as files: ``head.safetensors``, ``head.json``, and a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from eecore.files.whole import filling
from eecore.lab.plots import plot_head
from eecore.lab.training.harness import TrainingRun
from eecore.lab.training.head_run import DraftTrainee, HeadTrainee
from eecore.lab.training.run_log import read_logs
from eecore.models import LlamaModel, network_digest
from eecore.models.readers.head_file import (
    ATTENDING_VERSION,
    CONFIG_NAME,
    KIND,
    VERSION,
    WEIGHTS_NAME,
)

MIN_ACCEPTED = 0.05
"""Acceptance rate from which on a draft is made by default."""
MAX_DRAFTS = 6
"""The longest draft that is made by default."""
THRESHOLD = 0.3
"""The confidence below which a draft is not worth verifying."""


def save_head(
    out: Path,
    network: LlamaModel,
    trainee: HeadTrainee,
    run: TrainingRun,
    by_tokens: Sequence[tuple[int, float]],
) -> list[float]:
    """Write a head into a directory, which may exist; its other files stay.

    Args:
        out: the directory.
        network: the head's model.
        trainee: the head.
        run: the run that trained it.
        by_tokens: tokens of answers that heads learnt from, with their first draft's agreement.

    Returns:
        For each position how often the draft is right where those before it were, on held-out
        texts.
    """
    measured = Measured.of(trainee, by_tokens)
    about = {
        **_about(network, trainee, run),
        "agreement": measured.facts,
        "policy": {"num_drafts": num_drafts(measured.by_position), "threshold": THRESHOLD},
    }
    tensors = trainee.head.tensors(torch.bfloat16)
    tensors["vocabulary"] = trainee.frozen.vocabulary.to(torch.int32)
    return measured.write(out, WEIGHTS_NAME, tensors, {CONFIG_NAME: about})


@dataclass(frozen=True)
class Measured:
    """What a trained head agrees on with its model, on held-out texts.

    Attributes:
        by_position: for each position how often the draft is right where those before it were.
        greedy: likewise, on the greedy texts only.
        by_tokens: tokens of answers that heads learnt from, with their first draft's agreement.
    """

    by_position: list[float]
    greedy: list[float]
    by_tokens: Sequence[tuple[int, float]]

    @classmethod
    def of(cls, trainee: DraftTrainee, by_tokens: Sequence[tuple[int, float]]) -> Measured:
        """Measure a head."""
        return cls(trainee.agreement(), trainee.agreement(greedy=True), by_tokens)

    @property
    def facts(self) -> dict[str, Any]:
        """The shares for JSON."""
        return {
            "by_position": [round(value, 4) for value in self.by_position],
            "by_position_greedy": [round(value, 4) for value in self.greedy],
            "by_tokens": [[tokens, round(value, 4)] for tokens, value in self.by_tokens],
        }

    def write(
        self, out: Path, weights: str, tensors: dict[str, Tensor], facts: Mapping[str, Any]
    ) -> list[float]:
        """Write a head into a directory, with a plot where matplotlib is there.

        Args:
            out: the directory.
            weights: the name of the file of tensors.
            tensors: the head's tensors.
            facts: the contents of JSON files by name.

        Returns:
            The shares by position.
        """
        out.mkdir(parents=True, exist_ok=True)
        with filling(out) as partial:
            (partial / weights).write_bytes(save(tensors, {"format": "pt"}))
            for name, values in facts.items():
                text = json.dumps(values, indent=1) + "\n"
                (partial / name).write_text(text, encoding="utf-8")
        if find_spec("matplotlib") is not None:
            plot_head(out / "agreement.svg", self.by_tokens, self.by_position, self.greedy)
        return self.by_position


def num_drafts(by_position: Sequence[float]) -> int:
    """The draft length up to which drafts are accepted often enough; at least one."""
    accepted, count = 1.0, 0
    for agreement in by_position[:MAX_DRAFTS]:
        accepted *= agreement
        if accepted < MIN_ACCEPTED:
            break
        count += 1
    return max(1, count)


def _about(network: LlamaModel, trainee: HeadTrainee, run: TrainingRun) -> dict[str, Any]:
    shape, settings, config = network.config, trainee.data.settings, trainee.config
    attention, before = {}, {}
    if settings.attended:
        layers, key_heads = zip(*settings.attended, strict=True)
        about = {"layers": layers, "key_heads": key_heads, "queries": settings.queries}
        attention = {"attention": about}
    if trainee.beginning is not None:
        before = {"before": trainee.beginning.training}
    return {
        "version": ATTENDING_VERSION if settings.attended else VERSION,
        "kind": KIND,
        "model": {
            "digest": network_digest(network),
            "num_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
        },
        "weights": settings.weights,
        "taps": list(settings.taps),
        "intermediate_size": config.intermediate_size,
        "num_blocks": config.num_blocks,
        "vocabulary_size": config.vocabulary_size,
        **attention,
        "training": {**training_facts(trainee, run), **before},
    }


def training_facts(trainee: DraftTrainee, run: TrainingRun) -> dict[str, Any]:
    """How a head was trained, for JSON."""
    return {
        "tokens": trainee.data.num_tokens,
        "epochs": round(run.step / trainee.steps_per_epoch, 3),
        "steps": run.step,
        "seconds": round(run.seconds, 3),
        "curve": _curve(run.directory),
        "seed": trainee.config.seed,
    }


def _curve(directory: Path) -> list[list[float]]:
    """Step, training loss and held-out agreement of the first draft."""
    steps, evaluations = read_logs(directory)
    losses = dict(zip(steps["step"], steps["loss"], strict=True))
    pairs = zip(evaluations["step"], evaluations["agreement_1"], strict=True)
    return [
        [int(step), round(losses[step] or 0.0, 4), round(agreement or 0.0, 4)]
        for step, agreement in pairs
        if step  # an evaluation before the first step has no loss
    ]
