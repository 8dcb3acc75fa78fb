"""``eecore train-classifier``: the exit classifier of a model, for ``--measure classifier``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from eecore.cli.failures import UsageError
from eecore.cli.files import check_out
from eecore.cli.loading import SEEDS, Device, ModelPath, check_path, spinner
from eecore.cli.options import ProcessOptions, option, takes_options
from eecore.lab.commands.settings import MAX_BATCH, MAX_STEPS, want_one_process
from eecore.lab.commands.train import Sequences, training_device


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of the training."""

    steps: int = option(500, min=1, max=MAX_STEPS)
    batch_size: int = option(16, "Sequences a step.", min=1, max=MAX_BATCH)
    learning_rate: float = option(1e-3)
    seed: int = option(0, min=0, max=SEEDS)
    device: Device = None


@takes_options
def train_classifier(
    model: ModelPath,
    sequences: Sequences,
    out: Annotated[Path, typer.Option(help="The safetensors file to make.")],
    recipe: Recipe,
    process: ProcessOptions,
) -> int:
    """Train the exit classifier (CALM) of a model, which itself is not changed.

    It learns from a layer's state whether exiting there would give the last layer's token. The
    states of quantised models are those that eecore runs, in their own bits, on the CPU.
    """
    want_one_process("train-classifier")
    directory = check_path(model)
    check_out("--out", out)
    with spinner(f"loading {model}"):
        import torch

        from eecore.lab.training import (
            BatchOrder,
            ClassifierConfig,
            ExitModel,
            StartingPoint,
            collate,
            load_starting_point,
            save_classifier,
            train_exit_classifier,
        )
        from eecore.lab.training.frozen_model import (
            FrozenModel,
            RunningModel,
            is_quantised,
            load_running_model,
        )
        from eecore.models import model_digest

        if process.threads is not None:
            torch.set_num_threads(process.threads)
        config = ClassifierConfig(learning_rate=recipe.learning_rate, seed=recipe.seed)
        exits: FrozenModel
        start: StartingPoint | RunningModel
        if is_quantised(directory):
            exits = start = load_running_model(directory, recipe.device)
        else:
            start = load_starting_point(directory)
            if not start.pretrained:
                raise UsageError(f"{model}: expected a model with weights, got none")
            exits = ExitModel.of(start.model.to(training_device(recipe.device)))
        data = sequences.read(sequences.data, start.tokenizer, start.eos_token_id)
    order, steps = BatchOrder(data.lengths, recipe.batch_size, recipe.seed), recipe.steps
    batches = (
        collate(data, order.indices(step).tolist(), decoder_start=exits.decoder_start)
        for step in range(steps)
    )
    losses: list[float] = []
    with spinner("training the classifier"):
        classifier = train_exit_classifier(
            exits, batches, config, progress=lambda _step, loss: losses.append(loss)
        )
    save_classifier(
        classifier,
        out,
        {"model_sha256": model_digest(directory), "num_layers": str(exits.num_layers)},
    )
    tenth = max(1, steps // 10)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    print(f"loss {first:.4f} at first, {last:.4f} at last; wrote {out}")
    return 0
