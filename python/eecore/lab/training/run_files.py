"""The files of a run: what it was started with, and its last checkpoint.

``run.json`` has the settings and digests of the data and the model; transformers' checkpoints lie
beside it, and after the run the Trainer's ``trainer_state.json``, with the log of all steps.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from torch import nn

from eecore.errors import TrainingError
from eecore.files.json_fields import JsonFields
from eecore.files.readable import is_file
from eecore.files.whole import write_text
from eecore.lab.training.processes import num_processes
from eecore.lab.training.recipe import FREE_TO_CHANGE, RunConfig
from eecore.values import shown

RUN_FILE = "run.json"
FORMAT = "eecore training run 1"
MAX_STATE = 1 << 32
"""Bytes of the state of a checkpoint, which has a record of each step, at most."""


def write_run(directory: Path, config: RunConfig, data_digest: str, model: nn.Module) -> None:
    """Write what a run is started with."""
    about = {
        "format": FORMAT,
        "config": config.to_dict(),
        "data": data_digest,
        "model": shapes_digest(model),
        "processes": num_processes(),
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / RUN_FILE, json.dumps(about, indent=1) + "\n")


def read_run(directory: Path) -> JsonFields:
    """What a run was started with.

    Raises:
        TrainingError: there is no run, or its file is malformed.
    """
    fields = JsonFields.read(directory / RUN_FILE, TrainingError)
    if fields.text("format") != FORMAT:
        raise fields.wrong("format", repr(FORMAT), fields.text("format"))
    fields.only("format", "config", "data", "model", "processes")
    return fields


def check_run(directory: Path, config: RunConfig, data_digest: str, model: nn.Module) -> None:
    """Refuse to resume a run with other settings, data, weights or processes.

    Raises:
        TrainingError: the run began with others.
    """
    fields, path = read_run(directory), directory / RUN_FILE
    began = fields.inner("config")
    saved = {} if began is None else began.values
    own = json.loads(json.dumps(config.to_dict()))
    for name in sorted(saved.keys() | own.keys()):
        if saved.get(name) != own.get(name) and name not in FREE_TO_CHANGE:
            raise TrainingError(
                f"{path}: expected the settings that the run began with: "
                f"{name}={shown(saved.get(name))} against {shown(own.get(name))}"
            )
    expected = {"data": data_digest, "model": shapes_digest(model)}
    for name, digest in expected.items():
        if fields.text(name) != digest:
            raise TrainingError(
                f"{path}: {name}: expected that which the run began with, got another"
            )
    size, got = fields.integer("processes", 1), num_processes()
    if size != got:
        raise TrainingError(
            f"{path}: processes: expected {size}, as the run began with, got {got} "
            f"(torchrun --nproc-per-node {size})"
        )


def shapes_digest(model: nn.Module) -> str:
    """A hash of the names and shapes of a model's weights, and of which of them are trained."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {list(weight.shape)} {weight.requires_grad}\n".encode())
    return digest.hexdigest()


def last_checkpoint(directory: Path) -> tuple[Path | None, int]:
    """The newest whole checkpoint of a run, and its step; None and 0 before the first one.

    A checkpoint whose writing was cut short has no ``trainer_state.json``, which comes last.
    """
    for place in sorted(directory.glob("checkpoint-*"), key=_step_of, reverse=True):
        try:
            state = JsonFields.read(place / "trainer_state.json", TrainingError, most=MAX_STATE)
            if state.integer("global_step", 0) == _step_of(place):
                return place, _step_of(place)
        except TrainingError:
            continue
    return None, 0


def _step_of(checkpoint: Path) -> int:
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def remove_state(directory: Path) -> None:
    """Remove the checkpoints of a run that has finished, and its settings; its log stays."""
    for place in directory.glob("checkpoint-*"):
        shutil.rmtree(place)
    (directory / RUN_FILE).unlink(missing_ok=True)


def is_begun(directory: Path) -> bool:
    """Whether there is a run in a directory that can be resumed."""
    return is_file(directory / RUN_FILE)
