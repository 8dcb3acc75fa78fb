"""``eecore train-classifier``: the exit classifier of a model, for ``--measure classifier``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eecore.console.failures import UsageError
from eecore.console.files import check_out
from eecore.console.loading import SEEDS, Debug, ModelPath, Threads, check_path, spinner
from eecore.lab.commands.train import training_device


def train_classifier(
    model: ModelPath,
    data: Annotated[
        list[Path], typer.Option(help="Like the model's training data; may be repeated.")
    ],
    out: Annotated[Path, typer.Option(help="The safetensors file to make.")],
    steps: Annotated[int, typer.Option(min=1, max=1 << 40)] = 500,
    batch_size: Annotated[int, typer.Option(min=1, max=1 << 20, help="Sequences a step.")] = 16,
    learning_rate: Annotated[float, typer.Option()] = 1e-3,
    context: Annotated[
        int, typer.Option(min=2, max=1 << 24, help="Most tokens of a sequence.")
    ] = 256,
    truncate_inputs: Annotated[
        bool, typer.Option("--truncate-inputs", help="Cut inputs that leave no room for targets.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS)] = 0,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.", show_default="cuda where there is a GPU")
    ] = None,
    threads: Threads = None,
    debug: Debug = False,  # noqa: ARG001 (read where failures are reported)
) -> int:
    """Train the exit classifier (CALM) of a model, which itself is not changed.

    It learns from a layer's state whether exiting there would give the last layer's token. The
    states of quantised models are those that eecore runs, in their own bits, on the CPU.
    """
    directory = check_path(model)
    check_out("--out", out)
    with spinner(f"loading {model}"):
        import torch

        from eecore.lab.training import (
            BatchOrder,
            ClassifierConfig,
            ExitModel,
            FrozenModel,
            RunningModel,
            StartingPoint,
            collate,
            is_quantised,
            load_running_model,
            load_starting_point,
            model_digest,
            read_data,
            save_classifier,
            train_exit_classifier,
        )

        if threads is not None:
            torch.set_num_threads(threads)
        config = ClassifierConfig(learning_rate=learning_rate, seed=seed)
        exits: FrozenModel
        start: StartingPoint | RunningModel
        if is_quantised(directory):
            exits = start = load_running_model(directory, device)
        else:
            start = load_starting_point(directory)
            if not start.pretrained:
                raise UsageError(f"{model}: expected a model with weights, got none")
            exits = ExitModel.of(start.model.to(training_device(device)))
        sequences = read_data(
            data,
            start.tokenizer,
            context=context,
            eos_token_id=start.eos_token_id,
            truncate_inputs=truncate_inputs,
        )
    order = BatchOrder(sequences.lengths, batch_size, seed)
    batches = (
        collate(sequences, order.indices(step).tolist(), decoder_start=exits.decoder_start)
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
