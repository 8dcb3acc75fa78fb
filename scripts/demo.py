"""A demonstration of early exit and drafts: real models in every mode, compared with full depth.

First the model that ships with eecore, which was trained for early exit; then one that was not,
SmolLM2-135M-Instruct, which the first run downloads. Each mode first prints its texts, each token
in the colour of its depth; then all modes take turns, and a table has the medians.
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
from eecore.console.depth import DepthPainter, has_colours, is_lossless, legend_of, said_depths
from eecore.exits import Exit
from eecore.lab.evaluation.timed import TimedRun, time_policies
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
ROUNDS = 5
"""The number of turns of each mode."""
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


def parts(prompts: Sequence[str]) -> list[Part]:
    """Both models; the prompts are for the second."""
    return [
        Part(
            "intent, the model that ships with eecore",
            "loading the model",
            eecore.default_model,
            UTTERANCES,
            intent_modes,
            dtype="float32",  # of the calibration
        ),
        Part(
            "SmolLM2-135M-Instruct",
            "getting SmolLM2-135M-Instruct (a 93 MB download the first time)",
            get_smollm2,
            prompts,
            smollm2_modes,
            untrained=0.8,
        ),
    ]


def main(command_line: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("prompts", nargs="*", default=PROMPTS, help="for SmolLM2")
    arguments = parser.parse_args(command_line)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    console = Console(highlight=False, soft_wrap=True)
    code = 0
    for part in parts(arguments.prompts):
        try:
            show(console, part, arguments.max_tokens)
        except KeyboardInterrupt:
            console.print("\ninterrupted")
            code = 130
        except (eecore.EecoreError, RuntimeError, OSError) as error:
            print(f"demo: {error}", file=sys.stderr)
            code = 1
        if code:
            return code
    console.print(CLOSING)
    return 0


CLOSING = """
Next: eecore generate "dim the bedroom lamp to 40%" --depth --stats, or eecore generate --help.
Checkpoints trained for early exit, such as LayerSkip's, load the same way."""


def show(console: Console, part: Part, max_tokens: int) -> None:
    """Run every mode on every prompt, then all modes in turns; print a table of the times."""
    with console.status(part.waiting):
        directory = part.directory()
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
    for mode in modes:  # also a warm-up: records programs, and policies learn from drafts
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
            console.print()
            console.print(table(modes, part.runs))
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
        console.print(painter.add(step.token_ids, step.exit_layers, step.text), end="")
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


def table(modes: Sequence[Mode], runs: Sequence[TimedRun]) -> Table:
    """The table of all modes; full depth is the first run."""
    full, rounds = runs[0], len(runs[0].seconds)
    many = f"medians of {rounds} rounds" if rounds > 1 else "one round"
    result = Table(
        title=f"all prompts together, {many}", title_justify="left", caption_justify="left"
    )
    result.caption = "Drafts are verified together: more layers run a token, in fewer passes."
    for name in ("mode", "tokens/s", "beside full depth", "layers run a token", "text"):
        result.add_column(name, justify="left" if name in ("mode", "text") else "right")
    for mode, run in zip(modes, runs, strict=False):
        run_layers = sum(output.stats.layers_run for output in run.outputs)
        after_first = run.tokens - len(run.outputs)  # without the first tokens, of the prompts
        num_layers = run.outputs[0].stats.num_layers
        result.add_row(
            mode.name,
            f"{run.tokens / statistics.median(run.seconds):.1f}",
            f"{run.speedup_over(full):.2f}x",
            f"{run_layers / after_first:.1f} of {num_layers}" if after_first else "-",
            said_text(mode.exit, run, full),
        )
    return result


def said_text(policy: Exit, run: TimedRun, full: TimedRun) -> str:
    """A comparison of the run's texts with full depth's."""
    if run is full:
        return "full depth's"
    pairs = zip(run.outputs, full.outputs, strict=True)
    same = sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs)
    if is_lossless(policy):
        return "lossless: the same" if run.same_tokens(full) else "lossless, yet not the same"
    return f"the same for {same} of {len(full.outputs)}"


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
