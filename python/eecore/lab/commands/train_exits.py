"""``eecore train-exits``: trains a draft head for a frozen model, on text that the model writes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from eecore.cli.failures import UsageError
from eecore.cli.loading import check_path, load
from eecore.cli.options import ProcessOptions, option, takes_options
from eecore.cli.process import INTERRUPTED
from eecore.files.readable import is_file, shown_path
from eecore.lab.commands.head_texts import (
    STATES,
    Answers,
    check_directories,
    what_is_asked,
    write_and_read,
)
from eecore.lab.commands.progress import ProgressLine
from eecore.lab.commands.settings import MAX_STEPS, Kept, Rates, say_settings, want_one_process

if TYPE_CHECKING:
    from eecore.config import ModelConfig
    from eecore.generation import Model
    from eecore.lab.training.head_run import HeadTask, HeadTrainer
    from eecore.models import LlamaModel

TRAINING = "training"
STRETCH = 32
TIMED_STEPS = 1000
"""Steps of the run whose speed converts --minutes to steps."""
WARMUP = 20
"""The learning rate grows over one step in so many."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """The parts of the head, and the weights that it starts from."""

    PANEL: ClassVar[str] = "Head"
    taps: str | None = option(
        None,
        "Layers whose states are read; the last is the number of layers.",
        show_default="a third, two thirds and all of the layers",
    )
    vocabulary: int | None = option(
        None, "Tokens that can be drafted.", min=1, show_default="8192, or those of --begin"
    )
    intermediate_size: int | None = option(
        None, "Size of the MLP.", min=1, max=1 << 16, show_default="the model's"
    )
    attend: int = option(
        4,
        "Key heads of the model that the head attends to: those that attend most to what "
        "followed the same token.",
        min=0,
        max=64,
    )
    drafts: int = option(3, "Drafts of each row in training.", min=1, max=8)
    begin: Path | None = option(None, "A head of this model to start from; its vocabulary is kept.")


@dataclass(frozen=True, kw_only=True)
class Run(Kept, Rates):
    """The training of the head."""

    PANEL: ClassVar[str] = "Run"
    learning_rate: float = option(1e-3)
    final_learning_rate: float = option(
        0.05, "Rate at the schedule's end, as a share of --learning-rate.", min=0, max=1
    )
    warmup_steps: int | None = option(None, min=0, max=MAX_STEPS, show_default="5 %")
    batch_size: int = option(32, f"Stretches of {STRETCH} tokens a step.", min=1, max=1 << 16)
    resume: bool = option(False, "Continue with the files in the work directory.")
    minutes: float | None = option(
        None,
        "Time of training and its evaluations, instead of --epochs. Writing and reading answers, "
        "and measuring the finished head take time beyond it.",
        min=0.001,
        max=1e6,
    )
    epochs: float | None = option(
        None, "Passes over the text.", min=0.001, max=1e6, show_default="4"
    )
    precision: Literal["float32", "bfloat16"] = option(
        "float32", "Precision of products; bfloat16 is faster on a CPU that has it."
    )

    @property
    def of_config(self) -> dict[str, Any]:
        more = {"precision": self.precision, "tensorboard": self.tensorboard}
        return {**super().of_config, **more}


@takes_options
def train_exits(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model directory in Hugging Face layout, or a GGUF file."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The directory of the head to make.")],
    texts: Answers,
    head: Head,
    run: Run,
    process: ProcessOptions,
) -> int:
    """Train a draft head for a model, which itself is not changed.

    The model answers questions, its states over the answers are kept, and the head learns to
    predict the next tokens. Each of the three parts survives a kill and Ctrl-C: the same command
    with --resume continues.
    """
    want_one_process("train-exits")
    path = check_path(model)
    if run.minutes is not None and run.epochs is not None:
        raise UsageError("--minutes: expected it or --epochs, got both")
    where = texts.work or out / "work"
    check_directories(out, where, run.resume)
    asked = what_is_asked(texts, run.seed)
    taps = _check_model(path, head)
    loaded = load(path, threads=process.threads, device="cpu")
    network = _checked(loaded, model)

    from eecore.lab.answers.writing import AnswerSettings
    from eecore.lab.training.head_keys import choose_attended
    from eecore.lab.training.head_pack import save_head
    from eecore.lab.training.head_run import HeadConfig, HeadTask
    from eecore.lab.training.head_states import StatesSettings, open_states
    from eecore.lab.training.interrupts import stop_on_signals
    from eecore.lab.training.trained_head import read_head
    from eecore.models import network_digest

    shape = network.config
    attended = choose_attended(network, head.attend) if head.attend else ()
    states = StatesSettings(
        model=network_digest(network),
        weights=stored_weights(path, network),
        hidden_size=shape.hidden_size,
        taps=taps,
        attended=attended,
        head_dim=shape.head_dim if attended else 0,
        queries=shape.q_size // shape.num_kv_heads if attended else 0,
    )
    config = HeadConfig(
        steps=TIMED_STEPS,
        intermediate_size=head.intermediate_size or shape.intermediate_size,
        vocabulary_size=head.vocabulary or 8192,
        num_drafts=head.drafts,
        stretch=STRETCH,
        **run.of_config,
    )
    beginning = None
    if head.begin is not None:
        sizes = states.sizes(config.intermediate_size)
        beginning = read_head(head.begin, states.model, taps, sizes, head.vocabulary, attended)
        size = len(beginning.vocabulary)
        config = replace(config, begins_with=beginning.sha256, vocabulary_size=size)
    settings = AnswerSettings(
        model=states.model,
        weights=states.weights,
        questions=asked.name,
        max_tokens=texts.answer_tokens,
        seed=run.seed,
    )
    where.mkdir(parents=True, exist_ok=True)
    say_settings(
        (texts, head, run),
        taps=taps,
        vocabulary=config.vocabulary_size,
        intermediate_size=config.intermediate_size,
        model=path,
        out=out,
        work=where,
    )
    with stop_on_signals() as stop:
        with ProgressLine() as line:
            if not write_and_read(loaded, asked, texts.tokens, where, settings, states, stop, line):
                return interrupted(line.last)
        task = HeadTask(network, open_states(where / STATES, states), config, beginning)
        trained = _train(task, run, where / TRAINING, stop)
        if not trained.finished:
            return interrupted(f"step {trained.step} of {trained.config.steps}")
        found = save_head(out, network, task, trained)
    print(
        f"held-out agreement by draft: {' '.join(f'{value:.3f}' for value in found)}",
        file=sys.stderr,
    )
    print(f"wrote {out}")
    return 0


def interrupted(at: str) -> int:
    """Say where the command was interrupted; its exit code."""
    print(f"interrupted at {at}; the same command with --resume goes on there", file=sys.stderr)
    return INTERRUPTED


def stored_weights(path: Path, network: LlamaModel) -> str:
    """The most frequent format of a model's weights: ``Q4_1``, ``int8``, ``float32``, ..."""
    if is_file(path):
        from collections import Counter

        from eecore.models.readers.gguf_checkpoint import GGUFCheckpoint

        checkpoint = GGUFCheckpoint(path)
        sizes: Counter[str] = Counter()
        for name in checkpoint.names:
            sizes[checkpoint.kind(name)] += checkpoint.num_bytes(name)
        return sizes.most_common(1)[0][0]
    if network.weights.qkv.is_quantised:
        from eecore.models import read_layout

        layout = read_layout(path)
        return "quantised" if layout is None else layout.method
    return str(network.dtype).removeprefix("torch.")


def _check_model(path: Path, head: Head) -> tuple[int, ...]:
    """The taps; an unsuitable model is refused by its header, before its weights are loaded."""
    from eecore.config import ModelConfig
    from eecore.errors import ModelError
    from eecore.models import read_config

    config = read_config(path)
    if not isinstance(config, ModelConfig):
        raise ModelError(
            f"{shown_path(path)}: expected a model without an encoder, got {config.architecture}"
        )
    if config.num_loops > 1:
        raise ModelError(
            f"{shown_path(path)}: expected a model without loops for a head, got one that runs its "
            f"layers {config.num_loops} times; SelfSpeculative drafts with its first loop"
        )
    if head.vocabulary is not None and head.vocabulary > config.vocab_size:
        raise UsageError(
            f"--vocabulary: expected at most the model's {config.vocab_size} tokens, "
            f"got {head.vocabulary}"
        )
    return _taps_of(head.taps, config)


def _taps_of(given: str | None, config: ModelConfig) -> tuple[int, ...]:
    """The layers whose states are taken, ascending; the last is the number of layers."""
    layers = config.num_layers
    if given is None:
        return tuple(sorted({max(1, layers // 3), max(1, 2 * layers // 3), layers}))
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and len(part) < 6 for part in parts):
        raise UsageError(f"--taps: expected layers such as 10,20,30, got {given}")
    taps = [int(part) for part in parts]
    ascending = all(a < b for a, b in pairwise(taps))
    if not ascending or not taps[0] >= 1 or taps[-1] != layers:
        raise UsageError(
            f"--taps: expected ascending layers of 1..{layers}, the last {layers}, got {given}"
        )
    return tuple(taps)


def _checked(model: Model, name: str) -> LlamaModel:
    from eecore.errors import ModelError
    from eecore.models import LlamaModel

    if model.tokenizer is None:
        raise ModelError(f"{name}: expected a model with a tokenizer, got none")
    model.tokenizer.apply_chat_template([{"role": "user", "content": "?"}])
    assert isinstance(model.network, LlamaModel)
    if not model.network.config.eos_token_ids:
        raise ModelError(f"{name}: expected an eos_token_id, which ends texts, got none")
    return model.network


def _train(task: HeadTask, run: Run, directory: Path, stop: Callable[[], bool]) -> HeadTrainer:
    """The training run, resumed where it stopped, to its end or until it is stopped again."""
    from eecore.lab.training.head_run import HeadTrainer
    from eecore.lab.training.run_files import (
        check_run,
        is_begun,
        last_checkpoint,
        read_run,
        write_run,
    )

    begun, evaluation, config = time.monotonic(), 0.0, task.config
    resumes = is_begun(directory)
    if resumes:
        began = read_run(directory).inner("config")
        steps = 1 if began is None else began.integer("steps", 1)
    elif run.minutes is not None:
        task.agreement(config.evaluated_rows)
        evaluation = time.monotonic() - begun
        a_step = HeadTrainer(task, config, directory).seconds_per_step()
        a_step += evaluation / config.evaluate_steps
        steps = int((60 * run.minutes - 3 * evaluation) / a_step)
    else:
        steps = round((4.0 if run.epochs is None else run.epochs) * task.order.steps_per_epoch)
    steps = max(1, steps)
    warmup = steps // WARMUP if run.warmup_steps is None else run.warmup_steps
    config = replace(config, steps=steps, warmup_steps=warmup)
    if resumes:
        check_run(directory, config, task.digest(), task.head)
    else:
        write_run(directory, config, task.digest(), task.head)
    trainer = HeadTrainer(task, config, directory)
    _, step = last_checkpoint(directory)
    if 0 < step < steps:
        print(f"resuming training after step {step} of {steps}", file=sys.stderr)
    spent = time.monotonic() - begun + evaluation  # before the first step, and at the end
    limit = None if run.minutes is None else 60 * run.minutes - spent
    trainer.run(stop, limit, shows=True)
    return trainer
