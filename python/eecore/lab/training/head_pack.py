"""A trained draft head as files: ``head.safetensors`` and ``head.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from eecore.files.whole import filling
from eecore.lab.training.head_run import HeadTask, HeadTrainer
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


def save_head(out: Path, network: LlamaModel, task: HeadTask, run: HeadTrainer) -> list[float]:
    """Write a head into a directory, which may exist; its other files stay.

    Args:
        out: the directory.
        network: the head's model.
        task: the head, and what it learnt from.
        run: the run that trained it.

    Returns:
        For each position how often the draft is right where those before it were, on held-out
        texts.
    """
    by_position, greedy = task.agreement(), task.agreement(greedy=True)
    about = {
        **_about(network, task, run),
        "agreement": {
            "by_position": [round(value, 4) for value in by_position],
            "by_position_greedy": [round(value, 4) for value in greedy],
        },
        "policy": {"num_drafts": num_drafts(by_position), "threshold": THRESHOLD},
    }
    tensors = task.head.tensors(torch.bfloat16)
    tensors["vocabulary"] = task.frozen.vocabulary.to(torch.int32)
    out.mkdir(parents=True, exist_ok=True)
    with filling(out) as partial:
        (partial / WEIGHTS_NAME).write_bytes(save(tensors, {"format": "pt"}))
        (partial / CONFIG_NAME).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return by_position


def num_drafts(by_position: Sequence[float]) -> int:
    """The draft length up to which drafts are accepted often enough; at least one."""
    accepted, count = 1.0, 0
    for agreement in by_position[:MAX_DRAFTS]:
        accepted *= agreement
        if accepted < MIN_ACCEPTED:
            break
        count += 1
    return max(1, count)


def _about(network: LlamaModel, task: HeadTask, run: HeadTrainer) -> dict[str, Any]:
    shape, settings, config = network.config, task.settings, run.config
    attention, before = {}, {}
    if settings.attended:
        layers, key_heads = zip(*settings.attended, strict=True)
        about = {"layers": layers, "key_heads": key_heads, "queries": settings.queries}
        attention = {"attention": about}
    if task.beginning is not None:
        before = {"before": task.beginning.training}
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
        "num_blocks": task.head.sizes.num_blocks,
        "vocabulary_size": len(task.frozen.vocabulary),
        **attention,
        "training": {
            "tokens": len(task.data),
            "epochs": round(run.step / task.order.steps_per_epoch, 3),
            "steps": run.step,
            "seconds": round(run.seconds, 3),
            "curve": _curve(run.state.log_history),
            "seed": config.seed,
            **before,
        },
    }


def _curve(history: Sequence[Mapping[str, float]]) -> list[list[float]]:
    """Step, training loss and held-out agreement of the first draft."""
    losses = {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
    return [
        [entry["step"], round(losses[entry["step"]], 4), round(entry["eval_agreement_1"], 4)]
        for entry in history
        if "eval_agreement_1" in entry and entry["step"]  # the first one comes before any loss
    ]
