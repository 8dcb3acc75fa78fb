"""``eecore train-classifier``: the exit classifier of a model, for ``--measure classifier``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from eecore.cli.files import check_out
from eecore.cli.loading import SEEDS, Device, ModelPath, check_path, load, spinner
from eecore.cli.options import ProcessOptions, option, takes_options
from eecore.lab.commands.settings import MAX_BATCH, MAX_STEPS, want_one_process
from eecore.lab.commands.train import Sequences


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of the training."""

    steps: int = option(500, min=1, max=MAX_STEPS)
    batch_size: int = option(16, "Sequences a step.", min=1, max=MAX_BATCH)
    learning_rate: float = option(1e-3, min=1e-12, max=1e3)
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
    states are those that eecore runs, those of quantised models in their own bits.
    """
    want_one_process("train-classifier")
    directory = check_path(model)
    check_out("--out", out)
    with spinner(f"loading {model}"):
        from eecore.errors import TrainingError
        from eecore.lab.training.calm import save_classifier, train_exit_classifier
        from eecore.lab.training.data import BatchOrder
        from eecore.models import model_digest

        loaded = load(directory, threads=process.threads, device=recipe.device)
        if loaded.tokenizer is None:
            raise TrainingError(f"{model}: expected a model with a tokenizer, got none")
        if not loaded.config.eos_token_ids:
            raise TrainingError(f"{model}: expected an eos_token_id, which ends texts, got none")
        data = sequences.read(sequences.data, loaded.tokenizer, loaded.config.eos_token_ids[0])
    order, steps = BatchOrder(data.lengths, recipe.batch_size, recipe.seed), recipe.steps
    losses: list[float] = []
    with spinner("training the classifier"):
        classifier = train_exit_classifier(
            loaded.network,
            data,
            (order.indices(step).tolist() for step in range(steps)),
            learning_rate=recipe.learning_rate,
            seed=recipe.seed,
            progress=lambda _step, loss: losses.append(loss),
        )
    about = {"model_sha256": model_digest(directory), "num_layers": str(loaded.config.num_layers)}
    save_classifier(classifier, out, about)
    tenth = max(1, steps // 10)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    print(f"loss {first:.4f} at first, {last:.4f} at last; wrote {out}")
    return 0
