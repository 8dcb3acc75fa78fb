"""``eecore train``: trains a model for early exits."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from eecore.cli.failures import UsageError
from eecore.cli.loading import check_path, spinner
from eecore.cli.options import ProcessOptions, option, takes_options
from eecore.cli.process import INTERRUPTED
from eecore.errors import RequestError
from eecore.files.readable import is_file, kind_of, shown_path
from eecore.lab.commands.settings import MAX_BATCH, MAX_STEPS, Kept, Rates, say_settings

if TYPE_CHECKING:
    from eecore.lab.training import TokenData
    from eecore.lab.training.recipe import Loss
    from eecore.models import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The training data."""

    data: list[Path] = option(
        help='JSON lines of {"input", "target"}, {"messages"} or {"text"}, or plain text; may be '
        "repeated."
    )
    context: int = option(256, "Tokens of a sequence, at most.", min=2, max=1 << 24)
    truncate_inputs: bool = option(
        False, "Cut inputs that leave no room for targets, and conversations, at their end."
    )
    train_on_input: bool = option(
        False, "Also learn inputs and all messages, not only targets and the assistant's."
    )

    def read(self, paths: list[Path], tokenizer: Tokenizer, eos_token_id: int) -> TokenData:
        """The sequences of the data files."""
        from eecore.lab.training import read_data

        return read_data(
            paths,
            tokenizer,
            context=self.context,
            eos_token_id=eos_token_id,
            truncate_inputs=self.truncate_inputs,
            train_on_input=self.train_on_input,
        )


@dataclass(frozen=True, kw_only=True)
class Length:
    """The held-out data, the tokenizer, and the length of the run."""

    held_out: list[Path] | None = option(None, "Data to score every exit on; may be repeated.")
    tokenizer: Path | None = option(
        None, "A directory with tokenizer.json.", show_default="that of the model"
    )
    steps: int | None = option(
        None, "Training steps.", min=1, max=MAX_STEPS, show_default="one epoch"
    )
    epochs: float | None = option(None, "Passes over the data, instead of --steps.", min=0, max=1e9)


@dataclass(frozen=True, kw_only=True)
class Exits:
    """The loss over exits, and layer dropout."""

    PANEL: ClassVar[str] = "Early exits"
    loss: str = option(
        "layerskip",
        "layerskip: every layer under a curriculum; calm: every layer, weighted by depth; "
        "last: no early exits. Of a looped model also looped: every loop, weighted by its exit "
        "probability; gate: its exit gate alone.",
    )
    entropy: float | None = option(
        None,
        "looped: how much the entropy of the exit probabilities counts.",
        show_default="1",
    )
    tilt: float | None = option(
        None,
        "looped: loop t counts in proportion to t to this power, where loops are equally good.",
        show_default="0",
    )
    e_scale: float | None = option(
        None, "layerskip: the weight of earlier layers, 0..1.", show_default="1"
    )
    curriculum: str | None = option(
        None,
        "layerskip: gradual (from the last layer down), rotational:R (every R-th layer in "
        "turn) or all.",
        show_default="gradual",
    )
    layer_dropout: float | None = option(
        None,
        "Dropout rate of the last layer, 0 for none; from scratch it grows from 0 over the run.",
        show_default="0.2 with layerskip, else 0",
    )

    def weights(self) -> Loss:
        """The loss that the options name."""
        from eecore.lab.training.recipe import LOSSES

        kind = LOSSES.get(self.loss)
        if kind is None:
            raise UsageError(f"--loss: expected one of {', '.join(LOSSES)}, got {self.loss}")
        name, _, rotation = (self.curriculum or "").partition(":")
        if rotation and not rotation.isdecimal():
            raise UsageError(
                f"--curriculum: expected rotational:R, R a number, got {self.curriculum}"
            )
        settings: dict[str, Any] = {
            "e_scale": self.e_scale,
            "curriculum": name or None,
            "rotation": int(rotation) if rotation else None,
            "entropy": self.entropy,
            "tilt": self.tilt,
        }
        given = {name: value for name, value in settings.items() if value is not None}
        known = {each.name for each in fields(kind)}
        for name, value in given.items():
            if name not in known:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag}: expected none with --loss {self.loss}, got {value}")
        return kind(**given)

    def settings(self, loss: Loss) -> dict[str, object]:
        """The settings of the loss, defaults filled in."""
        names = ("e_scale", "curriculum", "entropy", "tilt")
        found = {name: getattr(loss, name, None) for name in names}
        if rotation := getattr(loss, "rotation", None):
            found["curriculum"] = f"rotational:{rotation}"
        return found

    def dropout(self, pretrained: bool) -> Any:
        """The layer dropout that the options name, growing over a run from scratch, or None."""
        from eecore.lab.training import LayerDropout

        default = 0.2 if self.loss == "layerskip" else 0.0
        rate = default if self.layer_dropout is None else self.layer_dropout
        return LayerDropout(rate, "constant" if pretrained else "exponential") if rate else None


@dataclass(frozen=True, kw_only=True)
class Optimizer(Rates):
    """The optimizer and its batches."""

    lora: int | None = option(
        None, "Train adapters of this rank.", min=1, show_default="every weight"
    )
    relative_rate: bool = option(
        False,
        "Scale each weight's rate by its initial size; for a T5 from scratch, with "
        "--learning-rate 0.01.",
    )
    weight_decay: float = option(0.1)
    accumulate: int = option(
        1,
        "Pieces in which a process computes its share of a batch, one after the other: less "
        "memory, the same steps.",
        min=1,
        max=MAX_BATCH,
    )
    packing: bool = option(
        False, "Several sequences share a row of --context tokens; --batch-size counts rows."
    )


@dataclass(frozen=True, kw_only=True)
class Run(Kept):
    """How a run is computed, saved and evaluated."""

    checkpoint_minutes: float = option(10.0, "Minutes between saves of the state.", min=0)
    evaluate_steps: int = option(500, "Steps between scores of the exits.", min=1, max=MAX_STEPS)
    precision: str | None = option(
        None, "float32, or bfloat16 (autocast).", show_default="bfloat16 on a GPU"
    )
    gradient_checkpointing: bool = option(False, "Less memory, more time.")
    device: str | None = option(None, show_default="cuda where there is a GPU")


@takes_options
def train(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_CONFIG",
            help="A model directory in Hugging Face layout; one without weights, or a config.json, "
            "is trained from scratch.",
        ),
    ],
    sequences: Sequences,
    out: Annotated[Path, typer.Option(help="The model directory to make.")],
    length: Length,
    exits: Exits,
    optimizer: Optimizer,
    run: Run,
    process: ProcessOptions,
) -> int:
    """Train a model for early exits: LayerSkip's recipe by default, or CALM's.

    The defaults are LayerSkip's for fine-tuning on a task. Ctrl-C saves the state; the same command
    with --resume goes on as if nothing had happened.
    """
    is_config = is_file(Path(model)) and Path(model).suffix != ".gguf"
    beginning = Path(model) if is_config else check_path(model, takes_gguf=False)
    if length.epochs is not None and math.isnan(length.epochs):
        raise UsageError(f"--epochs: expected a number, got {length.epochs}")
    if length.steps is not None and length.epochs is not None:
        raise UsageError("--steps: expected it or --epochs, got both")
    loss = exits.weights()
    for place in (*sequences.data, *(length.held_out or ())):  # checked before a model is loaded
        if kind_of(place) == "nothing":
            raise RequestError(f"{shown_path(place)}: No such file or directory")
    with spinner(f"loading {model}"):
        from eecore.lab.training.processes import first_alone_speaks

        where = training_device(run.device)
    options = (sequences, length, exits, optimizer, run)
    with first_alone_speaks():
        return _train(beginning, out, *options, loss, where, process.threads)


def _train(
    model: Path,
    out: Path,
    sequences: Sequences,
    length: Length,
    exits: Exits,
    optimizer: Optimizer,
    run: Run,
    loss: Loss,
    where: str,
    threads: int | None,
) -> int:
    with spinner(f"loading {model}"):
        import torch

        from eecore.lab.training import LoraSettings, TrainingConfig, loading, state_path
        from eecore.lab.training import train as run_training
        from eecore.lab.training.interrupts import stop_on_signals
        from eecore.lab.training.libraries import tensorboard_writer
        from eecore.lab.training.model_run import check_new
        from eecore.lab.training.processes import num_processes
        from eecore.lab.training.run_files import last_checkpoint, read_run

        if threads is not None:
            torch.set_num_threads(threads)
        if run.tensorboard:
            tensorboard_writer()
        if run.resume:
            read_run(state_path(out))
        else:
            check_new(out)
        start = loading.load_starting_point(model, tokenizer=length.tokenizer, seed=optimizer.seed)
        learnt = sequences.read(sequences.data, start.tokenizer, start.eos_token_id)
        held_out = None
        if length.held_out:
            held_out = sequences.read(length.held_out, start.tokenizer, start.eos_token_id)
    packing = sequences.context if optimizer.packing else None
    per_epoch = -(-len(learnt.rows(packing)) // optimizer.batch_size)
    times = 1.0 if length.epochs is None else length.epochs
    steps = length.steps or max(1, round(times * per_epoch))
    warmup, lora = optimizer.warmup_steps, optimizer.lora
    config = TrainingConfig(
        steps=steps,
        **optimizer.of_config,
        relative_rate=optimizer.relative_rate,
        warmup_steps=steps * 3 // 100 if warmup is None else warmup,
        weight_decay=optimizer.weight_decay,
        accumulate=optimizer.accumulate,
        packing=packing,
        loss=loss,
        layer_dropout=exits.dropout(start.pretrained),
        lora=None if lora is None else LoraSettings(lora, alpha=2.0 * lora),
        precision=run.precision or ("bfloat16" if where == "cuda" else "float32"),  # type: ignore[arg-type]
        gradient_checkpointing=run.gradient_checkpointing,
        checkpoint_seconds=60 * run.checkpoint_minutes,
        evaluate_steps=run.evaluate_steps,
        tensorboard=run.tensorboard,
    )
    dropout = config.layer_dropout
    say_settings(
        (sequences, length, exits, optimizer, run),
        **exits.settings(loss),
        layer_dropout=0.0 if dropout is None else dropout.max_rate,
        tokenizer=start.tokenizer_directory,
        steps=steps,
        epochs=steps / per_epoch,
        warmup_steps=config.warmup_steps,
        precision=config.precision,
        device=where,
        model=model,
        weights="pretrained" if start.pretrained else "random",
        out=out,
        sequences=len(learnt),
        learnt_tokens=int(learnt.num_learnt.sum()),
        processes=num_processes(),
    )
    with stop_on_signals() as stop:
        if run.resume:
            _, begun = last_checkpoint(state_path(out))
            print(f"resuming after step {begun} of {steps}", file=sys.stderr)
        result = run_training(
            start.model,
            learnt,
            config,
            out,
            held_out=held_out,
            tokenizer_directory=start.tokenizer_directory,
            resume=run.resume,
            device=where,
            should_stop=stop,
            shows=True,
        )
    if not result.finished:
        print(
            f"interrupted after step {result.step} of {steps}; the same command with --resume "
            "goes on from there",
            file=sys.stderr,
        )
        return INTERRUPTED
    print(f"wrote {out}")
    return 0


def training_device(name: str | None) -> str:
    """The device that the options name, or the best one."""
    import torch

    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cpu", "cuda"):
        raise UsageError(f"--device: expected cpu or cuda, got {chosen}")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device: expected cpu, got cuda on a machine without a GPU")
    return chosen
