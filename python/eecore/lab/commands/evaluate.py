"""``eecore evaluate`` and ``eecore sweep``: what exits and speculation gain."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eecore.cli.exit_options import ExitOptions, SkipsFile, parse_layers
from eecore.cli.failures import UsageError
from eecore.cli.files import beside, check_out
from eecore.cli.loading import ModelPath, check_path
from eecore.cli.options import LoadOptions, option, takes_options
from eecore.cli.process import INTERRUPTED
from eecore.exit_text import Policies
from eecore.files.builtin import BUILTIN
from eecore.files.whole import write_text
from eecore.lab.commands.progress import ProgressLine

if TYPE_CHECKING:
    from eecore.calibration import Example
    from eecore.exits import Exit
    from eecore.lab.evaluation.timed import TimedRun

Rounds = Annotated[int, typer.Option(min=1, help="Rounds, in which each takes its turn.")]


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of an evaluation, and the length of the answers."""

    data: Path = option(help='JSON lines of {"input": prompt, "target": label}.')
    max_tokens: int = option(64, "New tokens a prompt.", min=1)
    limit: int | None = option(None, "Examples to use.", min=1, show_default="all")

    def read(self) -> list[Example]:
        """The prompts and their labels."""
        from eecore.calibration import read_examples

        return read_examples(self.data, limit=self.limit)


@takes_options
def evaluate(
    model: ModelPath,
    prompts: Prompts,
    loading: LoadOptions,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="As --exit of generate, or an object as over HTTP, such as "
            '\'{"mode": "confident", "measure": "state", "threshold": 0.95, "batch": "all"}\'; '
            "may be repeated.",
            show_default="exits after a quarter, half and three quarters of the layers",
        ),
    ] = None,
    skips: SkipsFile = None,
    layers: Annotated[
        str | None, typer.Option(help="Exits to score: 4,8,12 or none.", show_default="all")
    ] = None,
    metric: Annotated[str, typer.Option(help="rouge2, rougeL or exact.")] = "rouge2",
    batch_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Prompts that run together; may be repeated.", show_default="1"),
    ] = None,
    rounds: Rounds = 3,
    out: Annotated[
        Path | None, typer.Option(help="Also write NAME.json and NAME.md.", metavar="NAME")
    ] = None,
) -> int:
    """The tables of the papers: every exit, and modes side by side with quality, exit rate and
    speed.
    """
    directory = check_path(model)
    check_out("--out", out, is_stem=True)

    from eecore.calibration import SIMILARITIES
    from eecore.exits import ConfidentExit
    from eecore.lab.evaluation.modes import evaluate_modes
    from eecore.models import read_config

    if metric not in SIMILARITIES:
        raise UsageError(f"--metric: expected {', '.join(SIMILARITIES)}, got {metric!r}")
    examples = prompts.read()
    config = read_config(directory)
    policies = [
        _policy(words, directory, skips) for words in mode or _default_modes(config.exit_layers)
    ]
    for policy in policies:
        policy.check(config)
    chosen = None
    if layers is not None:
        chosen = () if layers == "none" else parse_layers("--layers", layers)
    confident = [each for each in policies if isinstance(each, ConfidentExit)]
    calibrated = next((each for each in confident if each.calibration is not None), None)
    report = evaluate_modes(
        loading.load(directory, calibrated),
        examples,
        policies,
        layers=chosen,
        metric=metric,
        max_tokens=prompts.max_tokens,
        batch_sizes=tuple(dict.fromkeys(batch_size or (1,))),
        rounds=rounds,
        progress=_show_turn,
    )
    print(report.markdown())
    if out is not None:
        write_text(beside(out, "json"), json.dumps(asdict(report), indent=2) + "\n")
        write_text(beside(out, "md"), report.markdown() + "\n")
    return 0


def _policy(said: str, directory: Path, skips: Path | None) -> Exit:
    """The policy of a ``--mode``."""
    if not said.startswith("{"):
        own = skips if said.startswith("draft-verify") else None
        return ExitOptions(said, skips=own).policy(directory)
    try:
        given = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--mode: expected an object in JSON, got {said!r}: {error}") from None
    return Policies(directory).of(given)


@takes_options
def sweep(
    model: ModelPath,
    prompts: Prompts,
    loading: LoadOptions,
    exit_layers: Annotated[
        str | None,
        typer.Option(help="Layers that draft: 4,8,12.", show_default="eighths, to three quarters"),
    ] = None,
    num_drafts: Annotated[str, typer.Option(help="Draft lengths.")] = "2,4,6,8",
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that run together.")] = 1,
    rounds: Rounds = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write NAME.json and NAME.md.", metavar="NAME"),
    ] = None,
    write: Annotated[
        bool,
        typer.Option(
            "--write",
            help="Record in the model's exits.json how often its exits agree with its last layer; "
            "--exit auto chooses the layers that draft by it.",
        ),
    ] = False,
) -> int:
    """Time self-speculation over exit layers and draft lengths on your prompts; print the
    fastest.

    Ctrl-C keeps what was measured so far.
    """
    directory = check_path(model)
    check_out("--out", out, is_stem=True)

    from eecore.exits import SelfSpeculative
    from eecore.lab.evaluation.sweep import default_exit_layers, known_exits, sweep_speculation
    from eecore.lab.training.interrupts import stop_on_signals
    from eecore.models import exits_file, read_config

    texts = [example.prompt for example in prompts.read()]
    drafts = parse_layers("--num-drafts", num_drafts, what="numbers")
    config = read_config(directory)
    layers = default_exit_layers(config.exit_layers)
    if exit_layers is not None:
        layers = list(parse_layers("--exit-layers", exit_layers))
    for flag, given in (("--exit-layers", layers), ("--num-drafts", drafts)):
        if not given:
            raise UsageError(f"{flag}: expected one or more, got none")
    for layer in layers:
        for count in drafts:
            SelfSpeculative(layer, count).check(config)
    if write:
        if model == BUILTIN:
            raise UsageError(f"--write: expected a model of your own, got {BUILTIN}")
        known_exits(directory, config.num_layers)
        check_out("--write", exits_file(directory))
    loaded = loading.load(directory)
    answers = len(texts) * rounds * (2 + len(layers) * len(drafts))
    with stop_on_signals() as stop, ProgressLine() as line:
        line.count("sweep", 0, answers, "answers")
        groups, asked = -(-len(texts) // batch_size), 0

        def stops() -> bool:
            nonlocal asked
            asked += 1
            turns, group = divmod(asked, groups)
            answered = turns * len(texts) + group * batch_size
            line.count("sweep", answered, answers, "answers")
            return stop()

        found = sweep_speculation(
            loaded,
            texts,
            exit_layers=layers,
            num_drafts=drafts,
            max_tokens=prompts.max_tokens,
            batch_size=batch_size,
            rounds=rounds,
            measures_agreement=write,
            progress=lambda number, run: line.keep(described_turn(number, run)),
            should_stop=stops,
        )
    if not found.cells:
        print("interrupted before the first pair was measured", file=sys.stderr)
        return INTERRUPTED
    print(found.markdown())
    best = found.best
    print(
        f"\nbest: --exit speculative:{best.exit_layer},{best.num_drafts}, {best.speedup:.2f} times "
        f"full depth ({best.tokens_per_s:.1f} against {found.full_tokens_per_s:.1f} tokens/s)"
    )
    print(f"--exit auto: {found.auto_speedup:.2f} times full depth")
    if best.speedup <= 1.0:
        print("no pair is faster than full depth on these prompts")
    if out is not None:
        found.save(beside(out, "json"))
        write_text(beside(out, "md"), found.markdown() + "\n")
    if not found.finished:
        kept = f"; wrote {out}.json and .md of what was measured" if out is not None else ""
        print(f"interrupted at {line.last}{kept}", file=sys.stderr)
        return INTERRUPTED
    if write:
        drafting = " or ".join(map(str, found.drafting_layers)) or "none of its"
        print(f"wrote {found.record(directory)}: auto drafts with {drafting} first layers")
    return 0


def _default_modes(exit_layers: range) -> list[str]:
    from eecore.lab.evaluation.sweep import default_exit_layers

    exits = default_exit_layers(exit_layers, 4)
    return [f"fixed:{e}" for e in exits] + [f"speculative:{e},6" for e in exits]


def _show_turn(batch_size: int, number: int, run: TimedRun) -> None:
    """Print a line on stderr about a run's turn in a round."""
    where = f"batches of {batch_size}, " if batch_size > 1 else ""
    print(f"{where}{described_turn(number, run)}", file=sys.stderr, flush=True)


def described_turn(number: int, run: TimedRun) -> str:
    """The speed of a run in a round, in words."""
    return f"round {number + 1}: {run.name}: {run.tokens / run.seconds[-1]:.1f} tokens/s"
