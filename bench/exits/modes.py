"""SmolLM2 in every exit mode, compared with full depth and with transformers' generate.

python -m bench modes [--max-tokens 64] [--rounds 3] [--threads 2]

All modes run the same weights in one process, one prompt at a time, greedy, in turns: each round
runs every mode once, and ratios are taken within a round, so that a busy machine slows both sides.
Writes bench/results/modes.json and the table in bench/results, in about 2 minutes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import eecore
from bench.decode.worker import transformers
from bench.harness.ceilings import weights_lie
from bench.harness.command import parser
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.smollm2 import chat, get_smollm2
from bench.harness.turns import TimedCall, median_ratio, seconds_of, take_turns, timed
from eecore.lab.evaluation.tables import markdown_table

QUESTIONS = (
    "What is photosynthesis, in simple words?",
    "Write a Python function that checks whether a number is prime.",
)
SKIPS = eecore.DraftAndVerify(frozenset({6}), frozenset(), num_drafts=1)
"""What ``eecore search`` finds on SmolLM2's answers to questions that are not asked here."""
FULL, PEER = "`Full()`", "transformers `generate`"
BITS = {"float32": "f32", "bfloat16": "bf16"}


class Made(NamedTuple):
    """The tokens that a mode generates for a prompt, and eecore's output."""

    tokens: list[int]
    output: eecore.Output | None = None


Generate = Callable[[list[int]], Made]


def eecore_modes(model: eecore.Model, max_tokens: int) -> dict[str, Generate]:
    """eecore's modes, by their names in the table."""
    num_layers = model.config.num_layers
    late = num_layers - 3

    def generate(exit: Any) -> Generate:
        def one(prompt: list[int]) -> Made:
            output = eecore.generate(
                model, prompt, exit=exit, max_tokens=max_tokens, ignore_eos=True
            )[0]
            return Made(output.token_ids, output)

        return one

    points = tuple(range(num_layers - 6, num_layers, 2))
    confident = eecore.ConfidentExit(0.9, exit_points=points)
    return {
        FULL: generate(eecore.Full()),
        f"`FixedExit({late})`": generate(eecore.FixedExit(late)),
        f"`ConfidentExit(0.9, exit_points={points})`": generate(confident),
        f"`SelfSpeculative({late}, 2)`": generate(eecore.SelfSpeculative(late, 2)),
        "`DraftAndVerify(...)`": generate(SKIPS),
    }


def transformers_mode(directory: Path, dtype: str, max_tokens: int) -> Generate:
    """transformers' greedy generate on the same weights."""
    generate = transformers(str(directory), BITS[dtype], torch.get_num_threads())
    return lambda prompt: Made(generate([prompt], max_tokens)[0])


def measure(
    modes: Mapping[str, Generate], prompts: list[list[int]], rounds: int
) -> dict[str, list[TimedCall]]:
    """The timed calls of every mode, each over all prompts."""

    def turn_of(generate: Generate) -> Callable[[], TimedCall]:
        return lambda: timed(lambda: [generate(prompt) for prompt in prompts])

    return take_turns({name: turn_of(generate) for name, generate in modes.items()}, rounds)


def row_of(name: str, turns: Mapping[str, Sequence[TimedCall]]) -> dict[str, Any]:
    """The figures of a mode, compared with full depth and with transformers."""
    made: list[Made] = turns[name][-1].made
    seconds = seconds_of(turns[name])
    outputs = [each.output for each in made if each.output is not None]
    count = sum(len(each.tokens) for each in made)
    drafted = sum(output.stats.drafted for output in outputs)
    accepted = sum(output.stats.accepted for output in outputs)
    depth = sum(sum(output.exit_layers) for output in outputs)
    tokens, full = ([each.tokens for each in turns[who][-1].made] for who in (name, FULL))
    return {
        "name": name,
        "tokens_per_s_best": count / min(seconds),
        "tokens_per_s_median": count / statistics.median(seconds),
        "ratio_to_full": median_ratio(seconds, seconds_of(turns[FULL])),
        "ratio_to_transformers": median_ratio(seconds, seconds_of(turns[PEER])),
        "mean_exit_layer": depth / count if outputs else None,
        "draft_acceptance": accepted / drafted if drafted else None,
        "same_tokens_as_full": tokens == full,
    }


def markdown(result: Figures) -> str:
    """The table, with a sentence on the measurement and the machine."""
    lines = []
    for row in result["modes"]:
        depth, accepted = row["mean_exit_layer"], row["draft_acceptance"]
        lines.append(
            [
                row["name"],
                f"{row['tokens_per_s_best']:.1f}",
                f"{row['ratio_to_full']:.2f}",
                f"{row['ratio_to_transformers']:.2f}",
                "" if depth is None else f"{depth:.1f}",
                "" if accepted is None else f"{accepted:.0%}",
                "yes" if row["same_tokens_as_full"] else "no",
            ]
        )
    head = ["mode", "tokens/s", "to `Full()`", "to transformers", "mean exit layer"]
    head += ["drafts accepted", "text of `Full()`"]
    about = (
        f"SmolLM2-135M-Instruct ({result['num_layers']} layers, {result['dtype']}), "
        f"{result['num_prompts']} prompts one after the other, {result['max_tokens']} greedy "
        f"tokens each, {result['num_threads']} threads, {in_words(result)}, transformers "
        f"{result['transformers']}. tokens/s: best of {result['rounds']} rounds; ratios: median "
        f"over rounds. {result['weights']} `python -m bench modes`"
    )
    return f"{markdown_table(head, lines)}\n\n{about}"


REPORTS = (Report("modes", {"modes": markdown}, {"modes": ("name",)}, ("weights",)),)


def main(words: Sequence[str]) -> None:
    made = parser("modes", __doc__, rounds=3)
    made.add_argument("--max-tokens", type=int, default=64)
    made.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    directory = get_smollm2()
    model = eecore.load(directory, device="cpu", prefix_cache=False, kv_cache_tokens=2048)
    dtype = str(model.network.dtype).removeprefix("torch.")
    prompts = [chat(model, question) for question in QUESTIONS]
    modes = eecore_modes(model, arguments.max_tokens)
    modes[PEER] = transformers_mode(directory, dtype, arguments.max_tokens)
    turns = measure(modes, prompts, arguments.rounds)
    result = {
        **machine(),
        "num_threads": arguments.threads,
        "transformers": version("transformers"),
        "dtype": dtype,
        "num_layers": model.config.num_layers,
        "weights": weights_lie(model.config.num_parameters * model.network.dtype.itemsize),
        "num_prompts": len(prompts),
        "max_tokens": arguments.max_tokens,
        "rounds": arguments.rounds,
        "modes": [row_of(name, turns) for name in turns],
    }
    REPORTS[0].finish(result, arguments)
