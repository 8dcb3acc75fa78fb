"""Real models in every exit mode: streamed text with each token's exit depth, and a table.

First the model that ships with eecore, which was trained for early exit; then one that was not,
SmolLM2-135M-Instruct, which is fetched on the first run. What each mode means for them is said
along the way.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import eecore
from eecore.console.depth import DepthPainter, depth_legend, has_colours, runs
from eecore.exits import Exit
from get_smollm2 import get_smollm2

UTTERANCES = (
    "turn the kitchen lights down to 20 percent",
    "start a 25 minute timer for the pasta",
)
PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
)
SKIPS = Path(__file__).parent / "smollm2_skips.json"


@dataclass
class Mode:
    """One way to run the model, and what came of it."""

    name: str
    says: str
    exit: Exit
    outputs: list[eecore.Output] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Part:
    """A model, what it is asked, and in which modes.

    Attributes:
        name: of the model.
        waiting: what is said while it is being had.
        directory: has it.
        prompts: as shown.
        tokens: a prompt as the model reads it.
        modes: for a model of so many layers.
        colours_from: no mode leaves before this layer.
        dtype: to run in; None for the device's own.
    """

    name: str
    waiting: str
    directory: Callable[[], Path]
    prompts: Sequence[str]
    tokens: Callable[[eecore.Model, str], list[int]]
    modes: Callable[[int], list[Mode]]
    colours_from: int
    dtype: str | None = None
    done: list[Mode] = field(default_factory=list)


def intent_modes(num_layers: int) -> list[Mode]:
    """The modes, for the model that was trained for early exit."""
    calibration = eecore.default_model() / "calibration-softmax.json"
    half, quarter = num_layers // 2, num_layers // 4
    return [
        Mode("full", "every layer for every token", eecore.Full()),
        Mode(
            "confident exit",
            "a token leaves once its two best candidates are far apart. The threshold is "
            "calibrated: what it may cost is promised, see the model card",
            eecore.ConfidentExit.calibrated(calibration),
        ),
        Mode(
            "fixed exit",
            f"the model cut after layer {half}, where it was trained to speak too",
            eecore.FixedExit(half),
        ),
        Mode(
            "self-speculative",
            f"the first {quarter} layers draft, all verify: the text is that of full, sooner",
            eecore.SelfSpeculative(exit_layer=quarter, num_drafts=6),
        ),
    ]


def smollm2_modes(num_layers: int) -> list[Mode]:
    """The modes, for a model of so many layers that was never trained for early exit."""
    return [
        Mode("full", "every layer for every token", eecore.Full()),
        Mode(
            "confident exit",
            "a token leaves once its two best candidates are far apart; the layers it skips get "
            "their keys and values from the exit state. The threshold was picked by hand: no "
            "promise about the text. Asking costs an LM head, for a model this small as much as 8 "
            "layers",
            eecore.ConfidentExit(0.9, exit_points=tuple(range(num_layers - 6, num_layers, 2))),
        ),
        Mode(
            "fixed exit",
            f"the model cut after layer {num_layers - 3}. It was not trained to stop there, and it "
            "shows",
            eecore.FixedExit(num_layers - 3),
        ),
        Mode(
            "self-speculative",
            f"the first {num_layers - 3} layers draft, all verify: the text is that of full. "
            "Drafts this deep save nothing; models trained for early exit draft with far fewer "
            "layers",
            eecore.SelfSpeculative(exit_layer=num_layers - 3, num_drafts=2),
        ),
        Mode(
            "draft and verify",
            "the draft leaves out sublayers that a search on real text found least missed, all "
            "layers verify: the text is that of full, and the model needs no training",
            eecore.SkipSearch.load(SKIPS).policy(),
        ),
        Mode(
            "draft head",
            "a small head behind the last layer drafts, all layers verify: the text is that of "
            "full. It was trained in half an hour on what the model writes itself; no layer drafts",
            eecore.HeadDrafts(),
        ),
        Mode(
            "auto",
            "round by round what is fastest: full depth, drafts of the head, or of the text itself",
            eecore.Auto(),
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
            encode,
            intent_modes,
            colours_from=1,
            dtype="float32",  # the calibration's
        ),
        Part(
            "SmolLM2-135M-Instruct",
            "getting SmolLM2-135M-Instruct (a 93 MB download the first time)",
            get_smollm2,
            prompts,
            chat,
            smollm2_modes,
            colours_from=12,
        ),
    ]


def main(command_line: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=48)
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
        if part.done:
            console.print()
            console.print(table(part.done))
        if code:
            return code
    console.print(CLOSING)
    return 0


CLOSING = """\
Next: eecore generate "dim the bedroom lamp to 40%" --depth --stats, or eecore generate --help.
Checkpoints trained for early exit, such as LayerSkip's, load the same way."""


def show(console: Console, part: Part, max_tokens: int) -> None:
    """Run every mode on every prompt; finished modes go into ``part.done``."""
    with console.status(part.waiting):
        directory = part.directory()
    with console.status("loading the model"):
        model = eecore.load(directory, dtype=part.dtype, kv_cache_tokens=4096)
        asked = [part.tokens(model, prompt) for prompt in part.prompts]
        eecore.generate(model, asked[0], max_tokens=2)  # the first pass touches all weights
    build = eecore.build_info()
    console.print(
        f"\n[bold]{part.name}[/bold]: {model.config.num_layers} layers, "
        f"{str(model.network.dtype).removeprefix('torch.')} on {model.network.device.type} "
        f"({build['cpu_capability']}, {torch.get_num_threads()} threads)"
    )
    if has_colours(console):
        console.print(depth_legend(part.colours_from, model.config.num_layers))
    for mode in part.modes(model.config.num_layers):
        console.print(f"\n[bold]{mode.name}[/bold]: {mode.says}")
        for prompt, ids in zip(part.prompts, asked, strict=True):
            console.print(f"[dim]> {prompt}[/dim]")
            stream(console, model, ids, mode, max_tokens, part.colours_from)
        part.done.append(mode)


def encode(model: eecore.Model, prompt: str) -> list[int]:
    """The tokens of a prompt as it is."""
    assert model.tokenizer is not None
    return model.tokenizer.encode(prompt)


def chat(model: eecore.Model, prompt: str) -> list[int]:
    """The tokens of a conversation that begins with the prompt."""
    assert model.tokenizer is not None
    return model.tokenizer.encode_chat([{"role": "user", "content": prompt}])


def stream(
    console: Console,
    model: eecore.Model,
    prompt: list[int],
    mode: Mode,
    max_tokens: int,
    colours_from: int,
) -> None:
    """Generate one text, printed as it comes, each token in the colour of its exit layer."""
    painter = DepthPainter(model, prompt, colours_from)
    started = time.perf_counter()
    for step in eecore.stream(model, prompt, exit=mode.exit, max_tokens=max_tokens):
        console.print(painter.add(step.token_ids, step.exit_layers, step.text), end="")
        if step.output is not None:
            mode.outputs.append(step.output)
    mode.seconds += time.perf_counter() - started
    console.print()
    if not has_colours(console):
        console.print(f"(exit layers: {runs(mode.outputs[-1].exit_layers)})")


def table(done: list[Mode]) -> Table:
    """What the modes did, side by side."""
    result = Table(title="all prompts together", title_justify="left")
    for name in ("mode", "tokens/s", "mean exit layer", "drafts accepted", "same text as full?"):
        result.add_column(name, justify="left" if name == "mode" else "right")
    full = [output.token_ids for output in done[0].outputs]
    for mode in done:
        tokens = sum(len(output.token_ids) for output in mode.outputs)
        depth = sum(sum(output.exit_layers) for output in mode.outputs)
        drafted = sum(output.stats.drafted for output in mode.outputs)
        accepted = sum(output.stats.accepted for output in mode.outputs)
        same = sum(o.token_ids == f for o, f in zip(mode.outputs, full, strict=True))
        result.add_row(
            mode.name,
            f"{tokens / mode.seconds:.1f}",
            f"{depth / tokens:.1f}",
            f"{accepted / drafted:.0%} of {drafted}" if drafted else "-",
            "yes" if same == len(full) else f"{same} of {len(full)}",
        )
    return result


if __name__ == "__main__":
    sys.exit(main())
