"""``eecore train-exits``: trains a draft head for a frozen model, on text that the model writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from eecore.cli.failures import UsageError
from eecore.cli.loading import check_path, load
from eecore.cli.options import ProcessOptions, option, takes_options
from eecore.cli.process import INTERRUPTED
from eecore.files.readable import is_file, shown_path
from eecore.lab.commands.head_kinds import (
    ANCHORS,
    STRETCH,
    Block,
    Head,
    Recurrent,
    block_plan,
    recurrent_plan,
    refuse_others,
    taps_of,
)
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
    from eecore.generation import Model
    from eecore.lab.training.harness import TrainingRun
    from eecore.lab.training.head_run import DraftTrainee
    from eecore.models import LlamaModel

TRAINING = "training"
PARTS = (0.25, 0.5)
"""Shares of the texts for --learning-curve."""
WARMUP = 20
"""The learning rate grows over one step in so many."""


@dataclass(frozen=True, kw_only=True)
class Run(Kept, Rates):
    """The training of the head."""

    PANEL: ClassVar[str] = "Run"
    learning_rate: float = option(1e-3)
    final_learning_rate: float = option(
        0.05, "Rate at the schedule's end, as a share of --learning-rate.", min=0, max=1
    )
    warmup_steps: int | None = option(None, min=0, max=MAX_STEPS, show_default="5 %")
    batch_size: int | None = option(  # type: ignore[assignment]
        None,
        f"Stretches of {STRETCH} tokens a step; of a block head texts, {ANCHORS} blocks of each.",
        min=1,
        max=1 << 16,
        show_default="32, or 8 texts",
    )
    resume: bool = option(False, "Continue with the files in the work directory.")
    minutes: float | None = option(
        None,
        "Time of training and its evaluations, instead of --epochs. Writing and reading answers, "
        "measuring the finished head and --learning-curve take time beyond it.",
        min=0.001,
        max=1e6,
    )
    epochs: float | None = option(
        None, "Passes over the text.", min=0.001, max=1e6, show_default="4"
    )
    precision: Literal["float32", "bfloat16"] = option(
        "float32", "Precision of products; bfloat16 is faster on a CPU that has it."
    )
    learning_curve: bool = option(
        False, "Also train on a quarter and on half of the text, to see what more text gains."
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
    recurrent: Recurrent,
    block: Block,
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
    own, other = (block, recurrent) if head.kind == "block" else (recurrent, block)
    refuse_others(other, head.kind)
    if recurrent.keep_vocabulary and recurrent.begin is None:
        raise UsageError("--keep-vocabulary: expected --begin with it, got none")
    where = texts.work or out / "work"
    check_directories(out, where, head.kind, run.resume, texts.also or [])
    asked = what_is_asked(texts, run.seed)
    _check_model(path, head.taps, head.vocabulary)
    loaded = load(path, threads=process.threads, device="cpu")
    network = _checked(loaded, model)
    weights = stored_weights(path, network)

    from eecore.lab.answers.writing import AnswerSettings
    from eecore.lab.training.head_states import open_states
    from eecore.lab.training.interrupts import stop_on_signals

    if head.kind == "block":
        plan = block_plan(network, weights, head, block, run.of_config)
    else:
        plan = recurrent_plan(network, weights, head, recurrent, run.of_config)
    states = plan.states
    settings = AnswerSettings(
        model=states.model,
        weights=states.weights,
        questions=asked.name,
        max_tokens=texts.answer_tokens,
        seed=run.seed,
    )
    where.mkdir(parents=True, exist_ok=True)
    say_settings(
        (texts, head, own, run),
        taps=states.taps,
        **plan.settings,
        model=path,
        out=out,
        work=where,
    )
    with stop_on_signals() as stop, ProgressLine() as line:
        if not write_and_read(loaded, asked, texts.tokens, where, settings, states, stop, line):
            return _interrupted(line)
        data = open_states([place / STATES for place in (where, *(texts.also or []))], states)
        by_tokens = []
        for share in (*PARTS, 1.0) if run.learning_curve else (1.0,):
            trainee = plan.trainee(data, share)
            place = where / TRAINING / ("" if share == 1 else f"part-{share:g}")
            trained = _train(trainee, run, place, share, stop, line)
            if trained is None:
                return _interrupted(line)
            by_tokens.append((trainee.data.num_tokens, trainee.agreement()[0]))
            if share == 1:
                found = plan.save(out, trainee, trained, by_tokens)
                shares = " ".join(f"{value:.3f}" for value in found)
                line.keep(f"held-out agreement by draft: {shares}")
    print(f"wrote {out}")
    return 0


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


def _interrupted(line: ProgressLine) -> int:
    line.keep(f"interrupted at {line.last}; the same command with --resume goes on from there")
    return INTERRUPTED


def _check_model(path: Path, taps: str | None, vocabulary: int) -> None:
    """Refuse an unsuitable model by its header, before its weights are loaded."""
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
    if vocabulary > config.vocab_size:
        raise UsageError(
            f"--vocabulary: expected at most the model's {config.vocab_size} tokens, "
            f"got {vocabulary}"
        )
    taps_of(taps, config)


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


def _train(
    trainee: DraftTrainee,
    run: Run,
    directory: Path,
    share: float,
    stop: Callable[[], bool],
    line: ProgressLine,
) -> TrainingRun | None:
    """A training run over a share of the text, resumed where it stopped; None when stopped
    again.
    """
    from eecore.lab.training.harness import STATE_FILE, TrainingRun, seconds_per_step
    from eecore.lab.training.run_state import read_state, state_to_resume

    begun, evaluation = time.monotonic(), 0.0
    state, saved = directory / STATE_FILE, None
    is_begun = is_file(state)
    if is_begun:
        steps = read_state(state, type(trainee.config)).config.steps
    elif run.minutes is not None:
        trainee.evaluate()
        evaluation = time.monotonic() - begun
        a_step = seconds_per_step(trainee, points=1) + evaluation / trainee.config.evaluate_steps
        steps = int((60 * run.minutes * share - 3 * evaluation) / a_step)
    else:
        steps = round((4.0 if run.epochs is None else run.epochs) * trainee.steps_per_epoch)
    steps = max(1, steps)
    warmup = steps // WARMUP if run.warmup_steps is None else run.warmup_steps
    trainee.config = replace(trainee.config, steps=steps, warmup_steps=warmup)
    if is_begun:
        saved = state_to_resume(state, trainee.config, trainee.digest())
    with TrainingRun(trainee, directory, saved) as trained:
        if 0 < trained.step < steps:
            line.keep(f"resuming training after step {trained.step} of {steps}")
        spent = time.monotonic() - begun + 2 * evaluation  # before the first step and at the end
        limit = None if run.minutes is None else 60 * run.minutes * share - spent
        return trained if trained.all_steps(line.show, stop, limit) else None
