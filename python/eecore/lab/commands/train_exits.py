"""``eecore train-exits``: trains a draft head for a frozen model, on text that the model writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from eecore.console.failures import UsageError
from eecore.console.loading import check_path, load
from eecore.console.options import ProcessOptions, option, takes_options
from eecore.console.signals import INTERRUPTED
from eecore.lab.commands.head_texts import (
    STATES,
    Answers,
    check_directories,
    what_is_asked,
    write_and_read,
)
from eecore.lab.commands.progress import ProgressLine
from eecore.lab.commands.settings import MAX_STEPS, Kept, Rates, say_settings, want_one_process
from eecore.readable import is_file, shown_path

if TYPE_CHECKING:
    from eecore.config import ModelConfig
    from eecore.generation import Model
    from eecore.lab.training.harness import TrainingRun
    from eecore.lab.training.head_run import HeadTrainee
    from eecore.lab.training.head_states import StatesSettings
    from eecore.models import LlamaModel

__all__ = ["stored_weights", "train_exits"]

TRAINING = "training"
PARTS = (0.25, 0.5)
"""Shares of the texts for --learning-curve."""
STRETCH = 32
WARMUP = 20
"""The learning rate grows over one step in so many."""
TIMED_STEPS = 1000
"""Steps of the run whose speed converts --minutes to steps."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """The parts of the head, and the weights that it starts from."""

    PANEL: ClassVar[str] = "Head"
    taps: str | None = option(
        None,
        "Layers whose states are read; the last is the number of layers.",
        show_default="a third, two thirds and all of the layers",
    )
    vocabulary: int = option(8192, "Tokens that can be drafted.", min=1)
    blocks: int = option(1, "MLPs, one after the other.", min=1, max=16)
    intermediate_size: int | None = option(
        None, "Size of an MLP.", min=1, max=1 << 16, show_default="the model's"
    )
    attend: int = option(
        4,
        "Key heads of the model that the head attends to: those that attend most to what "
        "followed the same token.",
        min=0,
        max=64,
    )
    begin: Path | None = option(None, "A head of this model to start from.")
    keep_vocabulary: bool = option(
        False, "Keep the vocabulary of the head of --begin, instead of choosing one."
    )


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
    minutes: float | None = option(None, "Training time, instead of --epochs.", min=0.001, max=1e6)
    epochs: float | None = option(
        None, "Passes over the text.", min=0.001, max=1e6, show_default="4"
    )
    drafts: int = option(3, "Drafts of each row in training.", min=1, max=8)
    precision: Literal["float32", "bfloat16"] = option(
        "float32", "Precision of products; bfloat16 is faster on a CPU that has it."
    )
    learning_curve: bool = option(
        False, "Also train on a quarter and on half of the text, to see what more text gains."
    )


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
    if head.keep_vocabulary and head.begin is None:
        raise UsageError("--keep-vocabulary: expected --begin with it, got none")
    where = texts.work or out / "work"
    check_directories(out, where, run.resume, texts.also or [])
    asked = what_is_asked(texts, run.seed)
    _check_model(path, head.taps, head.vocabulary)
    loaded = load(path, threads=process.threads, device="cpu")
    network = _checked(loaded, model)
    states = _states_settings(network, stored_weights(path, network), head.taps, head.attend)

    from eecore.lab.answers.writing import AnswerSettings
    from eecore.lab.training.head_pack import save_head
    from eecore.lab.training.head_run import HeadConfig, HeadTrainee
    from eecore.lab.training.head_states import open_states
    from eecore.lab.training.interrupts import stop_on_signals
    from eecore.lab.training.trained_head import read_head

    settings = AnswerSettings(
        model=states.model,
        weights=states.weights,
        questions=asked.name,
        max_tokens=texts.answer_tokens,
        seed=run.seed,
    )
    inner = head.intermediate_size or network.config.intermediate_size
    beginning = None
    if head.begin is not None:
        sizes = states.sizes(inner, head.blocks)
        kept = head.vocabulary if head.keep_vocabulary else None
        beginning = read_head(head.begin, states.model, states.taps, sizes, kept, states.attended)
    config = HeadConfig(
        steps=TIMED_STEPS,
        intermediate_size=inner,
        num_blocks=head.blocks,
        vocabulary_size=head.vocabulary,
        num_drafts=run.drafts,
        **run.of_config,
        stretch=STRETCH,
        precision=run.precision,
        tensorboard=run.tensorboard,
        keep_vocabulary=head.keep_vocabulary,
        begins_with="" if beginning is None else beginning.sha256,
    )
    where.mkdir(parents=True, exist_ok=True)
    say_settings(
        (texts, head, run),
        taps=states.taps,
        intermediate_size=inner,
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
            trainee = HeadTrainee(network, data, config, share=share, beginning=beginning)
            place = where / TRAINING / ("" if share == 1 else f"part-{share:g}")
            trained = _train(trainee, run, place, share, stop, line)
            if trained is None:
                return _interrupted(line)
            by_tokens.append((len(trainee.data), trainee.agreement()[0]))
            if share == 1:
                found = save_head(out, network, trainee, trained, by_tokens)
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
    if vocabulary > config.vocab_size:
        raise UsageError(
            f"--vocabulary: expected at most the model's {config.vocab_size} tokens, "
            f"got {vocabulary}"
        )
    _taps(taps, config)


def _taps(given: str | None, config: ModelConfig) -> tuple[int, ...]:
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


def _states_settings(
    network: LlamaModel, weights: str, taps: str | None, attend: int
) -> StatesSettings:
    from eecore.lab.training.head_keys import choose_attended
    from eecore.lab.training.head_states import StatesSettings
    from eecore.models import network_digest

    config = network.config
    attended = choose_attended(network, attend) if attend else ()
    return StatesSettings(
        model=network_digest(network),
        weights=weights,
        hidden_size=config.hidden_size,
        taps=_taps(taps, config),
        attended=attended,
        head_dim=config.head_dim if attended else 0,
        queries=config.q_size // config.num_kv_heads if attended else 0,
    )


def _train(
    trainee: HeadTrainee,
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

    state, saved = directory / STATE_FILE, None
    is_begun = is_file(state)
    if is_begun:
        steps = read_state(state, type(trainee.config)).config.steps
    elif run.minutes is not None:
        steps = int(60 * run.minutes * share / seconds_per_step(trainee, points=1))
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
        return trained if trained.all_steps(line.show, stop) else None
