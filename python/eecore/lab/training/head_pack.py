"""A trained draft head as files: ``head.safetensors``, ``head.json`` and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from eecore.files import filling
from eecore.lab.training.head_run import HeadRun
from eecore.lab.training.libraries import library
from eecore.models import LlamaModel, network_digest
from eecore.models.readers.head_file import (
    ATTENDING_VERSION,
    CONFIG_NAME,
    KIND,
    VERSION,
    WEIGHTS_NAME,
)

__all__ = ["HeadFacts", "plot_head", "save_head"]

PLOT_FILE = "agreement.svg"
LEAST_WORTH = 0.05
"""How often a draft stands, that is made by default at least."""
MOST_DRAFTS = 6
THRESHOLD = 0.3
"""Less sure than this a draft is not worth the model's look at it."""


@dataclass(frozen=True)
class HeadFacts:
    """What a file says of a head besides its sizes.

    Attributes:
        by_position: how often each draft is right where those before it were, on held-out texts.
        by_tokens: tokens of answers that were learnt from, and how often the first draft was right
            then.
        greedy_by_position: the same as ``by_position``, on greedy answers alone.
    """

    by_position: Sequence[float]
    by_tokens: Sequence[tuple[int, float]]
    greedy_by_position: Sequence[float] = field(default=())


def save_head(out: Path, network: LlamaModel, run: HeadRun, facts: HeadFacts) -> None:
    """Write a head into a directory, which may be there; the rest of it is left alone."""
    about = _about(network, run, facts)
    tensors = run.head.tensors(torch.bfloat16)
    tensors["vocabulary"] = run.frozen.vocabulary.to(torch.int32)
    out.mkdir(parents=True, exist_ok=True)
    with filling(out) as partial:
        (partial / WEIGHTS_NAME).write_bytes(save(tensors, {"format": "pt"}))
        text = json.dumps(about, indent=1)
        (partial / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")


def plot_head(out: Path, facts: HeadFacts) -> None:
    """Draw what more text brings, and how far drafts stand, into a directory of a head."""
    figure_module: Any = library("matplotlib.figure")
    figure = figure_module.Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(*zip(*facts.by_tokens, strict=True), marker="o")
    left.set(xlabel="tokens learnt from", ylabel="agreement of the first draft", xscale="log")
    places = range(1, len(facts.by_position) + 1)
    right.plot(places, facts.by_position, marker="o", label="all held-out answers")
    if facts.greedy_by_position:
        right.plot(places, facts.greedy_by_position, marker="o", label="greedy ones")
    right.set(xlabel="draft", ylabel="agreement, those before it right", ylim=(0, 1))
    right.legend()
    with filling(out) as partial:
        figure.savefig(str(partial / PLOT_FILE))


def num_drafts(by_position: Sequence[float]) -> int:
    """Drafts that all stand often enough to be worth making; one at least."""
    stands, count = 1.0, 0
    for agreement in by_position[:MOST_DRAFTS]:
        stands *= agreement
        if stands < LEAST_WORTH:
            break
        count += 1
    return max(1, count)


def _attention(run: HeadRun) -> dict[str, Any]:
    layers, key_heads = zip(*run.data.settings.attended, strict=True)
    return {"layers": layers, "key_heads": key_heads, "queries": run.head.sizes.queries}


def _about(network: LlamaModel, run: HeadRun, facts: HeadFacts) -> dict[str, Any]:
    config, settings = network.config, run.data.settings
    return {
        "version": ATTENDING_VERSION if settings.attended else VERSION,
        "kind": KIND,
        "model": {
            "digest": network_digest(network),
            "num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
        },
        "weights": settings.weights,
        "taps": list(settings.taps),
        "intermediate_size": run.config.intermediate_size,
        "num_blocks": run.config.num_blocks,
        "vocabulary_size": run.config.vocabulary_size,
        **({"attention": _attention(run)} if settings.attended else {}),
        "training": {
            "tokens": len(run.data),
            "epochs": round(run.step / run.steps_per_epoch, 3),
            "steps": run.step,
            "seconds": round(run.seconds, 1),
            "curve": [list(point) for point in run.curve],
            "seed": run.config.seed,
            **({} if run.beginning is None else {"before": run.beginning.training}),
        },
        "agreement": {
            "by_position": [round(value, 4) for value in facts.by_position],
            "by_position_greedy": [round(value, 4) for value in facts.greedy_by_position],
            "by_tokens": [[tokens, round(value, 4)] for tokens, value in facts.by_tokens],
        },
        "policy": {"num_drafts": num_drafts(facts.by_position), "threshold": THRESHOLD},
    }
