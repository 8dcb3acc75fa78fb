"""A run's state in one safetensors file: weights, optimizer, random numbers, how far it has come.

The file is complete or not there (:mod:`eecore.files`).
Nothing in it is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from eecore.errors import TrainingError
from eecore.files import replacing
from eecore.training.recipe import TrainingConfig

__all__ = ["RunState", "load_state", "read_state", "save_state"]

FORMAT = "eecore training state 1"
OPTIMIZER_PARTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class RunState:
    """How far a run has come.

    Attributes:
        step: steps done; also the position in the data, whose order follows from the seed.
        tokens: tokens read.
        data_digest: of the training data.
        config: its settings.
    """

    step: int
    tokens: int
    data_digest: str
    config: TrainingConfig


def save_state(
    path: Path, state: RunState, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write the state, in place of the one before."""
    tensors = {f"parameter.{name}": p.detach() for name, p in _trained(model)}
    for name, parameter in _trained(model):
        for part, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{part}.{name}"] = value
    tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    about = {
        "step": state.step,
        "tokens": state.tokens,
        "data_digest": state.data_digest,
        "config": state.config.to_dict(),
    }
    with replacing(path) as partial:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            partial,
            {"format": FORMAT, "state": json.dumps(about)},
        )


def read_state(path: Path) -> RunState:
    """How far the run of a state file has come; reads no tensors."""
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"format {metadata.get('format')!r}")
        about = json.loads(metadata["state"])
        config = TrainingConfig.from_dict(about.pop("config"))
        return RunState(config=config, **about)
    except FileNotFoundError:
        raise TrainingError(f"{path}: expected the state of a run, got nothing") from None
    except TrainingError:
        raise
    except (OSError, SafetensorError, ValueError, TypeError, LookupError) as error:
        raise TrainingError(f"{path}: expected the state of a run, got: {error}") from None


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put weights, optimizer and random numbers back as they were saved."""
    with safe_open(str(path), "pt") as file:
        stored = set(file.keys())
        wanted = {f"parameter.{name}" for name, _ in _trained(model)}
        held = {name for name in stored if name.startswith("parameter.")}
        if wanted != held:
            stranger = min(wanted ^ held).removeprefix("parameter.")
            raise TrainingError(
                f"{path}: expected the trained weights of this model, got others: "
                f"{stranger} is in one of them alone"
            )
        for name, parameter in _trained(model):
            value = file.get_tensor(f"parameter.{name}")
            if value.shape != parameter.shape:
                raise TrainingError(
                    f"{path}: {name}: expected {list(parameter.shape)}, got {list(value.shape)}"
                )
            parameter.data.copy_(value)
            optimizer.state[parameter] = _optimizer_state(file, stored, name, parameter)
        torch.set_rng_state(file.get_tensor("random.cpu"))
        if torch.cuda.is_available() and "random.cuda" in stored:
            torch.cuda.set_rng_state(file.get_tensor("random.cuda"))


def _optimizer_state(
    file: Any, stored: set[str], name: str, parameter: nn.Parameter
) -> dict[str, Tensor]:
    """AdamW's numbers of one parameter; none when it has had no gradient yet."""
    keys = {part: f"optimizer.{part}.{name}" for part in OPTIMIZER_PARTS}
    return {
        part: file.get_tensor(key) if part == "step" else file.get_tensor(key).to(parameter.device)
        for part, key in keys.items()
        if key in stored
    }


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)
