"""``eecore train``: a model learns to exit early."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from eecore.console.failures import UsageError
from eecore.console.loading import SEEDS, Debug, Threads, check_path, spinner
from eecore.console.signals import INTERRUPTED
from eecore.errors import RequestError
from eecore.readable import is_file, kind_of, shown_path

if TYPE_CHECKING:
    from eecore.lab.training import StepReport, TrainingConfig
    from eecore.lab.training.early_exit_loss import LossWeights

__all__ = ["ProgressLine", "shown_seconds", "train", "training_device"]

# Of a panel in --help.
EXITS, OPTIMIZER, RUN = "Early exits", "Optimizer", "Run"
LINE_SECONDS = 10.0
"""Seconds between two lines where stderr is not a terminal."""


def train(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_CONFIG",
            help="A model directory in Hugging Face layout; one without weights, or a config.json, "
            "is trained from scratch.",
        ),
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            help='JSON lines of {"input", "target"} or {"text"}, or plain text; may be repeated.'
        ),
    ],
    out: Annotated[Path, typer.Option(help="The model directory to make.")],
    held_out: Annotated[
        list[Path] | None, typer.Option(help="Data to score every exit on; may be repeated.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A directory with tokenizer.json.", show_default="that of the model"),
    ] = None,
    context: Annotated[
        int, typer.Option(min=2, max=1 << 24, help="Most tokens of a sequence.")
    ] = 256,
    truncate_inputs: Annotated[
        bool, typer.Option("--truncate-inputs", help="Cut inputs that leave no room for targets.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 40, help="Training steps.", show_default="one epoch"),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(min=0, max=1e9, help="Times through the data, instead of --steps."),
    ] = None,
    loss: Annotated[
        str,
        typer.Option(
            help="layerskip: every layer under a curriculum; calm: every layer, weighted by depth; "
            "last: no early exits.",
            rich_help_panel=EXITS,
        ),
    ] = "layerskip",
    e_scale: Annotated[
        float | None,
        typer.Option(
            help="layerskip: how heavy earlier layers are, 0..1.",
            show_default="1",
            rich_help_panel=EXITS,
        ),
    ] = None,
    curriculum: Annotated[
        str | None,
        typer.Option(
            help="layerskip: gradual (from the last layer down), rotational:R (every R-th layer in "
            "turn) or all.",
            show_default="gradual",
            rich_help_panel=EXITS,
        ),
    ] = None,
    layer_dropout: Annotated[
        float | None,
        typer.Option(
            help="Dropout rate of the last layer, 0 for none.",
            show_default="0.2 with layerskip, else 0",
            rich_help_panel=EXITS,
        ),
    ] = None,
    dropout_over_time: Annotated[
        str | None,
        typer.Option(
            help="constant, or exponential: growing from 0 over the run.",
            show_default="constant, from scratch exponential",
            rich_help_panel=EXITS,
        ),
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train adapters of this rank.",
            show_default="every weight",
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    learning_rate: Annotated[float, typer.Option(rich_help_panel=OPTIMIZER)] = 1e-4,
    relative_rate: Annotated[
        bool,
        typer.Option(
            "--relative-rate",
            help="The learning rate is a share of what each weight starts from; for a T5 from "
            "scratch, with --learning-rate 0.01.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = False,
    warmup_steps: Annotated[
        int | None,
        typer.Option(min=0, max=1 << 40, show_default="3 %", rich_help_panel=OPTIMIZER),
    ] = None,
    weight_decay: Annotated[float, typer.Option(rich_help_panel=OPTIMIZER)] = 0.1,
    batch_size: Annotated[
        int,
        typer.Option(min=1, max=1 << 20, help="Sequences a step.", rich_help_panel=OPTIMIZER),
    ] = 16,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS, rich_help_panel=OPTIMIZER)] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out.", rich_help_panel=RUN)
    ] = False,
    checkpoint_minutes: Annotated[
        float, typer.Option(min=0, help="Save the state so often.", rich_help_panel=RUN)
    ] = 10.0,
    evaluate_steps: Annotated[
        int,
        typer.Option(min=1, max=1 << 40, help="Score the exits so often.", rich_help_panel=RUN),
    ] = 500,
    precision: Annotated[
        str | None,
        typer.Option(
            help="float32, or bfloat16 (autocast).",
            show_default="bfloat16 on a GPU",
            rich_help_panel=RUN,
        ),
    ] = None,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing", help="Less memory, more time.", rich_help_panel=RUN
        ),
    ] = False,
    device: Annotated[
        str | None, typer.Option(show_default="cuda where there is a GPU", rich_help_panel=RUN)
    ] = None,
    threads: Threads = None,
    debug: Debug = False,  # noqa: ARG001 (read where failures are reported)
) -> int:
    """Train a model for early exits: LayerSkip's recipe by default, or CALM's.

    The defaults are LayerSkip's for fine-tuning on a task. Ctrl-C saves the state; the same command
    with --resume goes on as if nothing had happened.
    """
    is_config = is_file(Path(model)) and Path(model).suffix != ".gguf"
    beginning = Path(model) if is_config else check_path(model, takes_gguf=False)
    if epochs is not None and math.isnan(epochs):
        raise UsageError(f"--epochs: expected a number, got {epochs}")
    if steps is not None and epochs is not None:
        raise UsageError("--steps: expected it or --epochs, got both")
    exit_loss = _loss(loss, e_scale, curriculum)
    for place in (*data, *(held_out or ())):  # before a model is loaded
        if kind_of(place) == "nothing":
            raise RequestError(f"{shown_path(place)}: No such file or directory")
    with spinner(f"loading {model}"):
        import torch

        from eecore.lab.training import (
            TrainingConfig,
            check_new,
            read_data,
            read_state,
            state_path,
            stop_on_signals,
        )
        from eecore.lab.training import train as run_training
        from eecore.lab.training.loading import load_starting_point

        if threads is not None:
            torch.set_num_threads(threads)
        begun = 0
        if resume:
            begun = read_state(state_path(out)).step
        else:
            check_new(out)
        start = load_starting_point(beginning, tokenizer=tokenizer, seed=seed)
        reading: dict[str, Any] = {
            "context": context,
            "eos_token_id": start.eos_token_id,
            "truncate_inputs": truncate_inputs,
        }
        sequences = read_data(data, start.tokenizer, **reading)
        scored = read_data(held_out, start.tokenizer, **reading) if held_out else None
        where = training_device(device)
        start.model.to(where)
    per_epoch = -(-len(sequences) // batch_size)
    num_steps = steps or max(1, round((1.0 if epochs is None else epochs) * per_epoch))
    config = TrainingConfig(
        steps=num_steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        relative_rate=relative_rate,
        warmup_steps=num_steps * 3 // 100 if warmup_steps is None else warmup_steps,
        weight_decay=weight_decay,
        loss=exit_loss,
        layer_dropout=_layer_dropout(
            layer_dropout, dropout_over_time, loss == "layerskip", start.pretrained
        ),
        lora=_lora(lora),
        precision=precision or ("bfloat16" if where == "cuda" else "float32"),  # type: ignore[arg-type]
        gradient_checkpointing=gradient_checkpointing,
        seed=seed,
        checkpoint_seconds=60 * checkpoint_minutes,
        evaluate_steps=evaluate_steps,
    )
    _say_what_follows(config, len(sequences), start.pretrained, where)
    with stop_on_signals() as stop, ProgressLine() as line:
        if resume:
            line.keep(f"resuming after step {begun} of {num_steps}")
        result = run_training(
            start.model,
            sequences,
            config,
            out,
            held_out=scored,
            tokenizer_directory=start.tokenizer_directory,
            resume=resume,
            progress=line.show,
            should_stop=stop,
        )
    if not result.finished:
        print(
            f"interrupted after step {result.step} of {num_steps}; the same command with --resume "
            "goes on from there",
            file=sys.stderr,
        )
        return INTERRUPTED
    print(f"wrote {out}")
    return 0


class ProgressLine:
    """Where a run stands, in a line on stderr: overwritten on a terminal, else every 10 seconds."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("starting") if self._console.is_terminal else None
        self._shown_at = -LINE_SECONDS
        self._begun: dict[str, tuple[float, float]] = {}  # of each part: when, and at what count
        self.last = ""
        """What was said last, shown or not."""

    def __enter__(self) -> ProgressLine:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, report: StepReport) -> None:
        """A step that has been done; scores of the exits get a line that stays."""
        self.say(describe(report), last=report.step == report.steps)
        if report.scores is not None:
            shares = " ".join(f"{value:.2f}" for value in report.scores.agreement)
            self.keep(
                f"step {report.step}: held-out loss {report.scores.loss[-1]:.3f}, agreement with "
                f"the last layer by exit: {shares}"
            )

    def say(self, text: str, *, last: bool = False) -> None:
        """Where the run stands; the last one is always shown."""
        now = time.monotonic()
        self.last = text
        if self._status is not None:
            self._status.update(escape(text))
        elif now - self._shown_at >= LINE_SECONDS or last:
            self._shown_at = now
            print(text, file=sys.stderr, flush=True)

    def count(self, part: str, done: float, wanted: float, unit: str) -> None:
        """How far a part of the run has come, and about how long the rest of it takes."""
        now = time.monotonic()
        if part not in self._begun and 0 < done < wanted:
            self.keep(f"resuming {part} after {done:.0f} of {wanted:.0f} {unit}")
        begun, before = self._begun.setdefault(part, (now, done))
        left = ""
        if done > before:
            left = f", {shown_seconds((wanted - done) * (now - begun) / (done - before))} left"
        of = f"{done:.0f} of {wanted:.0f}"
        self.say(f"{part}: {of} {unit}{left if done < wanted else ''}", last=done >= wanted)

    def keep(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, soft_wrap=True, markup=False)


def shown_seconds(seconds: float) -> str:
    """A stretch of time, about."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def describe(report: StepReport) -> str:
    """One step, in a line."""
    left = (report.steps - report.step) * report.tokens / report.step / report.tokens_per_s
    exits = " ".join(f"{layer}:{loss:.2f}" for layer, loss in report.exit_losses.items())
    return (
        f"step {report.step}/{report.steps}, {report.tokens_per_s:.0f} tokens/s, "
        f"{left / 60:.0f} min left, loss {report.loss:.3f}, by exit {exits}"
    )


def _loss(kind: str, e_scale: float | None, curriculum: str | None) -> LossWeights:
    from eecore.lab.training.calm import CalmLoss
    from eecore.lab.training.early_exit_loss import EarlyExitLoss, LastLayerLoss

    if kind == "layerskip":
        name, _, rotation = (curriculum or "gradual").partition(":")
        if rotation and not rotation.isdecimal():
            raise UsageError(f"--curriculum: expected rotational:R, R a number, got {curriculum}")
        return EarlyExitLoss(
            1.0 if e_scale is None else e_scale,
            name,  # type: ignore[arg-type]
            int(rotation) if rotation else None,
        )
    if kind not in ("calm", "last"):
        raise UsageError(f"--loss: expected layerskip, calm or last, got {kind}")
    for option, value in (("--e-scale", e_scale), ("--curriculum", curriculum)):
        if value is not None:
            raise UsageError(f"{option}: expected none with --loss {kind}, got {value}")
    return CalmLoss() if kind == "calm" else LastLayerLoss()


def _layer_dropout(
    rate: float | None, over_time: str | None, layerskip: bool, pretrained: bool
) -> Any:
    from eecore.lab.training.layer_dropout import LayerDropout

    chosen = rate if rate is not None else 0.2 if layerskip else 0.0
    if chosen == 0 and over_time is not None:
        raise UsageError(f"--dropout-over-time: expected a --layer-dropout, got {over_time} alone")
    if chosen == 0:
        return None
    return LayerDropout(
        chosen,
        over_time or ("constant" if pretrained else "exponential"),  # type: ignore[arg-type]
    )


def _lora(rank: int | None) -> Any:
    from eecore.lab.training.recipe import LoraSettings

    return None if rank is None else LoraSettings(rank, alpha=2.0 * rank)


def training_device(name: str | None) -> str:
    """The device asked for, or the best there is."""
    import torch

    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cpu", "cuda"):
        raise UsageError(f"--device: expected cpu or cuda, got {chosen}")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device: expected cpu, got cuda on a machine without a GPU")
    return chosen


def _say_what_follows(
    config: TrainingConfig, num_sequences: int, pretrained: bool, device: str
) -> None:
    print(
        f"from {'the weights that are there' if pretrained else 'random weights'}: "
        f"{num_sequences} sequences, {config.steps} steps of {config.batch_size} "
        f"({config.steps * config.batch_size / num_sequences:.1f} epochs), on {device}; "
        f"{config.loss}, {config.layer_dropout or 'no layer dropout'}",
        file=sys.stderr,
    )
