"""``eecore train-exits``: a draft head for a frozen model, from text that it writes itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eecore.console.failures import UsageError
from eecore.console.loading import SEEDS, Debug, Threads, check_path, load
from eecore.console.signals import INTERRUPTED
from eecore.lab.commands.head_texts import (
    STATES,
    check_directories,
    what_is_asked,
    write_and_read,
)
from eecore.lab.commands.train import ProgressLine, shown_seconds
from eecore.readable import is_file, shown_path

if TYPE_CHECKING:
    from eecore.config import ModelConfig
    from eecore.generation import Model
    from eecore.json_fields import JsonFields
    from eecore.lab.training import HeadConfig, HeadRun, HeadStates, StatesSettings, TrainedHead
    from eecore.models import LlamaModel

__all__ = ["stored_weights", "train_exits"]

DATA, HEAD, RUN = "Answers", "Head", "Run"
TRAINING = "training"
PARTS = (0.25, 0.5)
"""Of the texts, with --learning-curve."""
STRETCH = 32


def train_exits(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model directory in Hugging Face layout, or a GGUF file."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The directory of the head to make.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Questions, one a line; .jsonl: strings, or objects with a prompt.",
            show_default="questions of everyday life, code and rewriting that ship with eecore",
            rich_help_panel=DATA,
        ),
    ] = None,
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            help="Files or directories of texts (.txt, .md, .rst) and Python code, which the model "
            "is asked to summarise, to rewrite, to explain; repeatable.",
            rich_help_panel=DATA,
        ),
    ] = None,
    own_questions: Annotated[
        bool,
        typer.Option(
            "--own-questions",
            help="Questions that the model thinks of, and others about its answers.",
            rich_help_panel=DATA,
        ),
    ] = False,
    tokens: Annotated[
        int,
        typer.Option(min=1, max=1 << 34, help="Of answers, to learn from.", rich_help_panel=DATA),
    ] = 500_000,
    answer_tokens: Annotated[
        int, typer.Option(min=3, help="Most of an answer.", rich_help_panel=DATA)
    ] = 256,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Where answers and states are kept.", show_default="OUT/work", rich_help_panel=DATA
        ),
    ] = None,
    also: Annotated[
        list[Path] | None,
        typer.Option(
            help="The work directory of another run, which is learnt from, too; repeatable.",
            rich_help_panel=DATA,
        ),
    ] = None,
    taps: Annotated[
        str | None,
        typer.Option(
            help="After which layers states are read; the last is all of them.",
            show_default="a third, two thirds and all of them",
            rich_help_panel=HEAD,
        ),
    ] = None,
    vocabulary: Annotated[
        int, typer.Option(min=1, help="Tokens that can be drafted.", rich_help_panel=HEAD)
    ] = 8192,
    blocks: Annotated[
        int, typer.Option(min=1, max=16, help="MLPs, one after the other.", rich_help_panel=HEAD)
    ] = 1,
    intermediate_size: Annotated[
        int | None,
        typer.Option(
            min=1, max=1 << 16, help="Of an MLP.", show_default="the model's", rich_help_panel=HEAD
        ),
    ] = None,
    attend: Annotated[
        int,
        typer.Option(
            min=0,
            max=64,
            help="Key heads of the model that it attends to: those that most look for what came "
            "after the same token.",
            rich_help_panel=HEAD,
        ),
    ] = 4,
    begin: Annotated[
        Path | None,
        typer.Option(
            help="A head of this model whose weights it begins with.",
            rich_help_panel=HEAD,
        ),
    ] = None,
    keep_vocabulary: Annotated[
        bool,
        typer.Option(
            "--keep-vocabulary",
            help="Draft the tokens that the head of --begin drafts, not those of the answers.",
            rich_help_panel=HEAD,
        ),
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=1e6, help="Training time, instead of --epochs.", rich_help_panel=RUN
        ),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1e6,
            help="Times through the text.",
            show_default="4",
            rich_help_panel=RUN,
        ),
    ] = None,
    drafts: Annotated[
        int, typer.Option(min=1, max=8, help="Of each row in training.", rich_help_panel=RUN)
    ] = 3,
    learning_rate: Annotated[float, typer.Option(rich_help_panel=RUN)] = 1e-3,
    batch_size: Annotated[
        int,
        typer.Option(
            min=1, max=1 << 16, help=f"Stretches of {STRETCH} tokens a step.", rich_help_panel=RUN
        ),
    ] = 32,
    precision: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(
            help="Of products; bfloat16 is faster on a CPU that multiplies it.",
            rich_help_panel=RUN,
        ),
    ] = "float32",
    learning_curve: Annotated[
        bool,
        typer.Option(
            "--learning-curve",
            help="Train on a quarter and on half of the text too, to see what more of it brings.",
            rich_help_panel=RUN,
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS, rich_help_panel=RUN)] = 0,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with what is in the work directory.", rich_help_panel=RUN
        ),
    ] = False,
    threads: Threads = None,
    debug: Debug = False,  # noqa: ARG001 (read where failures are reported)
) -> int:
    """Train a draft head for a model, which itself is not changed.

    The model answers questions, its states over the answers are kept, and the head learns to say
    what comes next. Each of the three steps survives a kill and Ctrl-C: the same command with
    --resume goes on.
    """
    path = check_path(model)
    if minutes is not None and epochs is not None:
        raise UsageError("--minutes: expected it or --epochs, got both")
    if keep_vocabulary and begin is None:
        raise UsageError("--keep-vocabulary: expected --begin with it, got none")
    where = work or out / "work"
    check_directories(out, where, resume, also or [])
    asked = what_is_asked(prompts, texts or [], own_questions, seed)
    _check_model(path, taps, vocabulary)
    loaded = load(model, threads=threads, device="cpu")
    network = _checked(loaded, model)
    weights = stored_weights(path, network)
    states = _states_settings(network, weights, taps, attend)

    from eecore.lab.answers import AnswerSettings
    from eecore.lab.training import HeadSizes, open_states, read_head, stop_on_signals

    settings = AnswerSettings(
        model=states.model,
        weights=weights,
        questions=asked.name,
        max_tokens=answer_tokens,
        seed=seed,
    )
    inner = intermediate_size or network.config.intermediate_size
    sizes = HeadSizes(
        *(states.hidden_size, len(states.taps), inner, blocks),
        num_attended=len(states.attended),
        queries=states.queries,
    )
    beginning = None
    if begin is not None:
        kept = vocabulary if keep_vocabulary else None
        beginning = read_head(begin, states.model, states.taps, sizes, kept, states.attended)
    where.mkdir(parents=True, exist_ok=True)
    with stop_on_signals() as stop, ProgressLine() as line:
        if not write_and_read(loaded, asked, tokens, where, settings, states, stop, line):
            return _interrupted(line)
        data = open_states([place / STATES for place in (where, *(also or []))], states)
        wanted: dict[str, Any] = {
            "intermediate_size": inner,
            "num_blocks": blocks,
            "vocabulary_size": vocabulary,
            "num_drafts": drafts,
            "learning_rate": learning_rate,
            "batch_size": batch_size,
            "stretch": STRETCH,
            "seed": seed,
            "precision": precision,
            "keep_vocabulary": keep_vocabulary,
            "begins_with": "" if beginning is None else beginning.sha256,
        }
        budget = (minutes, epochs)
        shares = (*PARTS, 1.0) if learning_curve else (1.0,)
        by_tokens = []
        for share in shares:
            place = where / TRAINING
            run = _train(network, data, wanted, budget, place, share, beginning, stop, line)
            if run is None:
                return _interrupted(line)
            by_tokens.append((len(run.data), run.agreement()[0]))
            if share == 1:
                _finish(out, network, run, by_tokens, line)
    print(f"wrote {out}")
    return 0


def stored_weights(path: Path, network: LlamaModel) -> str:
    """What most of a model's weights are stored in: ``Q4_1``, ``int8``, ``float32``, ..."""
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
    """What the header of a model says is enough to refuse it."""
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
    """Ascending layer counts, the last of all layers."""
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
    from eecore.lab.training import StatesSettings, choose_attended
    from eecore.models import network_digest

    config = network.config
    settings = StatesSettings(
        model=network_digest(network),
        weights=weights,
        hidden_size=config.hidden_size,
        taps=_taps(taps, config),
    )
    attended = choose_attended(network, attend) if attend else ()
    if not attended:
        return settings
    return replace(
        settings,
        attended=attended,
        head_dim=config.head_dim,
        queries=config.num_q_heads // config.num_kv_heads * config.head_dim,
    )


def _train(
    network: LlamaModel,
    data: HeadStates,
    wanted: dict[str, Any],
    budget: tuple[float | None, float | None],
    directory: Path,
    share: float,
    beginning: TrainedHead | None,
    stop: Callable[[], bool],
    line: ProgressLine,
) -> HeadRun | None:
    """A run over so much of the text, from where it stopped; None when told to stop."""
    from eecore.lab.training import HeadConfig, HeadRun

    place = directory if share == 1 else directory / f"part-{share:g}"
    config = _saved_config(place, wanted)
    if config is None:
        first = HeadConfig(steps=1, **wanted)
        probe = HeadRun(network, data, first, place, share=share, beginning=beginning)
        probe.close()
        config = _with_steps(probe, budget, share)
        _save_config(place, config)
    run = HeadRun(network, data, config, place, share=share, beginning=beginning, resume=True)
    try:
        if 0 < run.step < config.steps:
            line.keep(f"resuming training after step {run.step} of {config.steps}")

        def show(report: Any) -> None:
            line.say(
                f"step {report.step}/{report.steps}, {shown_seconds(report.seconds_left)} left, "
                f"loss {report.loss:.3f}, agreement {report.agreement:.2f}",
                last=report.step == report.steps,
            )
            if report.held_out is not None:
                shares = " ".join(f"{value:.3f}" for value in report.held_out)
                line.keep(f"step {report.step}: held-out agreement by draft: {shares}")

        finished = run.all_steps(show, stop)
    finally:
        run.close()
    return run if finished else None


def _with_steps(
    probe: HeadRun, budget: tuple[float | None, float | None], share: float
) -> HeadConfig:
    from eecore.lab.training import steps_in

    minutes, epochs = budget
    if minutes is not None:
        return steps_in(probe, 60 * minutes * share)
    times = 4.0 if epochs is None else epochs
    return replace(probe.config, steps=max(1, round(times * probe.steps_per_epoch)))


def _saved_config(place: Path, wanted: dict[str, Any]) -> HeadConfig | None:
    """The settings of the run that is there, whose number of steps holds."""
    from eecore.errors import TrainingError
    from eecore.json_fields import JsonFields
    from eecore.lab.training import HeadConfig

    path = place / "settings.json"
    if not is_file(path):
        return None
    fields = JsonFields.read(path, TrainingError)
    steps = fields.integer("steps", 1)
    for name, expected in wanted.items():
        got = _field(fields, name, expected)
        if got != expected:
            raise fields.wrong(name, f"{expected}, as this command has", got)
    return HeadConfig(steps=steps, **wanted)


def _field(fields: JsonFields, name: str, like: object) -> object:
    if isinstance(like, bool):
        return fields.flag(name)
    return fields.text(name) if isinstance(like, str) else fields.number(name)


def _save_config(place: Path, config: HeadConfig) -> None:
    from dataclasses import asdict

    from eecore.files import write_text

    write_text(place / "settings.json", json.dumps(asdict(config), indent=1) + "\n")


def _finish(
    out: Path,
    network: LlamaModel,
    run: HeadRun,
    by_tokens: list[tuple[int, float]],
    line: ProgressLine,
) -> None:
    from importlib.util import find_spec

    from eecore.lab.training import HeadFacts, plot_head, save_head

    facts = HeadFacts(run.agreement(), by_tokens, run.agreement(greedy=True))
    save_head(out, network, run, facts)
    if find_spec("matplotlib") is not None:
        plot_head(out, facts)
    shares = " ".join(f"{value:.3f}" for value in facts.by_position)
    line.keep(f"held-out agreement by draft: {shares}")
