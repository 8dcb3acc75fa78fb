"""The training of a model for early exits: from batches to a saved model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eecore.errors import TrainingError
from eecore.files.readable import kind_of, path_of, shown_path
from eecore.files.whole import filling
from eecore.lab.training.data import TokenData
from eecore.lab.training.exit_model import ExitModel, ExitScores
from eecore.lab.training.libraries import library, no_progress_bars, tensorboard_writer
from eecore.lab.training.processes import is_first, num_processes
from eecore.lab.training.recipe import LoraSettings, TrainingConfig
from eecore.lab.training.run_files import (
    check_run,
    is_begun,
    read_run,
    remove_state,
    write_run,
)
from eecore.models import model_digest

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run.

    Attributes:
        finished: False when it was stopped; ``train(..., resume=True)`` continues.
        step: steps done.
        tokens: tokens read.
        scores: the exits' on held-out data, if there is any.
    """

    finished: bool
    step: int
    tokens: int
    scores: ExitScores | None


def train(
    model: nn.Module,
    data: TokenData,
    config: TrainingConfig,
    out: str | Path,
    *,
    held_out: TokenData | None = None,
    tokenizer_directory: str | Path | None = None,
    resume: bool = False,
    device: str | None = None,
    should_stop: Callable[[], bool] | None = None,
    shows: bool = False,
) -> TrainingResult:
    """Train a transformers model for early exits and write it to a directory.

    ``out`` becomes a Hugging Face directory that ``eecore.load`` and transformers read;
    ``exits.json`` in it has the exits' scores, ``training/`` the checkpoint of a run and, once it
    is finished, ``trainer_state.json``, the Trainer's log. A stopped or killed run continues, once
    resumed, from its last checkpoint, as if it had not been stopped: with the same model, data and
    config on the same machine and number of threads it has the same log and weights bit for bit.

    In a process of several (``torchrun``; all on one file system) each computes its share of every
    batch, and the result is that of one process, up to rounding; the first one writes. A run is
    resumed with as many processes as it began with.

    Args:
        model: of a class that :class:`ExitModel` supports; trained in place.
        out: a new or empty directory, or with ``resume`` the run's.
        held_out: sequences to score the exits on.
        tokenizer_directory: its tokenizer files are copied to ``out``.
        resume: continue the run in ``out``.
        device: ``cpu`` or ``cuda``; None: the model's own.
        should_stop: called after each step; once it returns True in any process, the state is saved
            and the run ends.
        shows: whether a bar on stderr shows the progress.

    Raises:
        TrainingError: a setting, the data or the directory cannot be used.
    """
    directory = path_of(out, TrainingError)
    place = state_path(directory)
    on_cpu = (device or next(model.parameters()).device.type) == "cpu"
    _check_processes(config)
    if config.tensorboard:
        tensorboard_writer()
    exits = ExitModel.of(model)  # refuses an unsupported model before it is changed
    from eecore.lab.training.exit_trainer import ExitTrainer, check_exits

    check_exits(exits, data, config)
    torch.manual_seed(config.seed)
    if resume:
        read_run(place)
    else:
        check_new(directory)
    trained = model if config.lora is None else _with_lora(model, config.lora)
    if resume:
        check_run(place, config, data.digest(), trained)
    with closing(ExitTrainer(trained, data, config, place, held_out, on_cpu)) as trainer:
        if trainer.is_world_process_zero() and not resume:
            write_run(place, config, data.digest(), trained)
        finished = trainer.run(should_stop, shows=shows)
        if finished and held_out is not None and trainer.exit_scores is None:
            trainer.scores()  # stopped between the last step and here
    if finished and trainer.is_world_process_zero():
        _save(
            trained,
            directory,
            config=config,
            scores=trainer.exit_scores,
            tokens=trainer.tokens,
            tokenizer_directory=None if tokenizer_directory is None else Path(tokenizer_directory),
        )
        trainer.save_state()
        remove_state(place)
    trainer.accelerator.wait_for_everyone()
    return TrainingResult(finished, trainer.step, trainer.tokens, trainer.exit_scores)


def state_path(out: str | Path) -> Path:
    """The directory of the state and the logs of the run that writes to ``out``."""
    return Path(out) / "training"


def _check_processes(config: TrainingConfig) -> None:
    processes = num_processes()
    pieces = processes * config.accumulate
    if config.batch_size < pieces:
        raise TrainingError(
            f"batch_size: expected {pieces} or more, for {processes} processes and "
            f"accumulate={config.accumulate}, got {config.batch_size}"
        )


def check_new(out: Path) -> None:
    """Refuse a directory in which a new run cannot begin. Of several processes the first one looks:
    it may have begun to write when another one comes.

    Raises:
        TrainingError: it has files; a run that can be resumed is named.
    """
    if not is_first():
        return
    found = kind_of(out)
    if found != "nothing" and (found != "a directory" or any(out.iterdir())):
        hint = " (a run can be resumed there)" if is_begun(state_path(out)) else ""
        got = f"{shown_path(out)}{hint}"
        raise TrainingError(f"out: expected a new or empty directory, got {got}")


def _with_lora(model: nn.Module, settings: LoraSettings) -> nn.Module:
    peft = library("peft")
    wrapped: nn.Module = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules="all-linear",
        ),
    )
    return wrapped


def _save(
    model: Any,
    directory: Path,
    *,
    config: TrainingConfig,
    scores: ExitScores | None,
    tokens: int,
    tokenizer_directory: Path | None,
) -> None:
    """Write weights (adapters merged, and alone under ``adapter/``), tokenizer, exits.json."""
    with filling(directory) as partial:
        if hasattr(model, "merge_and_unload"):
            model.save_pretrained(str(partial / "adapter"))
            model = model.merge_and_unload()
        with no_progress_bars():
            model.save_pretrained(str(partial))
        place = tokenizer_directory or directory
        for name in TOKENIZER_FILES if place != directory else ():
            for source in place.glob(name):
                copied = partial / source.relative_to(place)
                copied.parent.mkdir(exist_ok=True)
                shutil.copyfile(source, copied)
        about = {
            "model_sha256": model_digest(partial),
            "num_layers": ExitModel.of(model).num_layers,
            "training": config.to_dict(),
            "training_tokens": tokens,
            "held_out": None if scores is None else asdict(scores),
        }
        (partial / "exits.json").write_text(json.dumps(about, indent=2) + "\n")
