"""SmolLM2 in every exit mode, compared with full depth and with transformers' generate.

python -m bench modes [--max-tokens 64] [--rounds 3] [--threads 2]

All modes run the same weights in one process, one prompt at a time, greedy, in turns: each round
runs every mode once, and ratios are taken within a round, so that a busy machine slows both sides.
Writes bench/results/modes.json and the table in bench/results, in about 2 minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

import eecore
from bench.decode.worker import transformers
from bench.harness.ceilings import weights_lie
from bench.harness.command import parser
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.rows import Row, table_of
from bench.harness.smollm2 import chat, get_smollm2
from bench.harness.turns import TimedCall, median_ratio, seconds_of, take_turns, timed

QUESTIONS = (
    "What is photosynthesis, in simple words?",
    "Write a Python function that checks whether a number is prime.",
)
SKIPS = eecore.DraftAndVerify(frozenset({6}), frozenset(), num_drafts=1)
"""What ``eecore search`` finds on SmolLM2's answers to questions that are not asked here."""
FULL, PEER = "`Full()`", "transformers `generate`"
BITS = {"float32": "f32", "bfloat16": "bf16"}


def policies(num_layers: int) -> dict[str, eecore.exits.Exit]:
    """eecore's modes, by their names in the table."""
    late, points = num_layers - 3, tuple(range(num_layers - 6, num_layers, 2))
    confident = eecore.ConfidentExit(0.9, exit_points=points)
    return {
        FULL: eecore.Full(),
        f"`FixedExit({late})`": eecore.FixedExit(late),
        f"`ConfidentExit(0.9, exit_points={points})`": confident,
        f"`SelfSpeculative({late}, 2)`": eecore.SelfSpeculative(late, 2),
        "`DraftAndVerify(...)`": SKIPS,
    }


def row_of(name: str, turns: Mapping[str, Sequence[TimedCall]]) -> Row:
    """The figures of a mode, compared with full depth and with transformers.

    Each call returned eecore's outputs, or transformers' tokens.
    """

    def tokens_of(mode: str) -> list[list[int]]:
        made = turns[mode][-1].made
        return [each.token_ids if isinstance(each, eecore.Output) else each for each in made]

    seconds, tokens = seconds_of(turns[name]), tokens_of(name)
    outputs = [] if name == PEER else turns[name][-1].made
    count = sum(map(len, tokens))
    drafted = sum(output.stats.drafted for output in outputs)
    accepted = sum(output.stats.accepted for output in outputs)
    depth = sum(sum(output.exit_layers) for output in outputs)
    return {
        "name": name,
        "tokens_per_s_best": count / min(seconds),
        "ratio_to_full": median_ratio(seconds, seconds_of(turns[FULL])),
        "ratio_to_transformers": median_ratio(seconds, seconds_of(turns[PEER])),
        "mean_exit_layer": depth / count if outputs else None,
        "draft_acceptance": accepted / drafted if drafted else None,
        "same_tokens_as_full": tokens == tokens_of(FULL),
    }


def markdown(result: Figures) -> str:
    """The table, with a sentence on the measurement and the machine."""
    columns = [
        ("mode", "{name}"),
        ("tokens/s", "{tokens_per_s_best:.1f}"),
        ("to `Full()`", "{ratio_to_full:.2f}"),
        ("to transformers", "{ratio_to_transformers:.2f}"),
        ("mean exit layer", "{mean_exit_layer:.1f}"),
        ("drafts accepted", "{draft_acceptance:.0%}"),
        ("text of `Full()`", lambda row: "yes" if row["same_tokens_as_full"] else "no"),
    ]
    about = (
        f"SmolLM2-135M-Instruct ({result['num_layers']} layers, {result['dtype']}), "
        f"{result['num_prompts']} prompts one after the other, {result['max_tokens']} greedy "
        f"tokens each, {result['num_threads']} threads, {in_words(result)}, transformers "
        f"{result['transformers']}. tokens/s: best of {result['rounds']} rounds; ratios: median "
        f"over rounds. {result['weights']} `python -m bench modes`"
    )
    return f"{table_of(columns, result['modes'])}\n\n{about}"


REPORTS = (Report("modes", {"modes": markdown}, {"modes": ("name",)}, ("weights",)),)


def main(words: Sequence[str]) -> None:
    made = parser("modes", __doc__, rounds=3)
    made.add_argument("--max-tokens", type=int, default=64)
    made.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    directory, length = get_smollm2(), arguments.max_tokens
    model = eecore.load(directory, device="cpu", prefix_cache=False, kv_cache_tokens=2048)
    dtype = str(model.network.dtype).removeprefix("torch.")
    prompts = [chat(model, question) for question in QUESTIONS]
    peer = transformers(str(directory), BITS[dtype], arguments.threads)

    def one(policy: Any) -> Callable[[list[int]], Any]:
        given: Any = {"exit": policy, "max_tokens": length, "ignore_eos": True}
        return lambda prompt: eecore.generate(model, prompt, **given)[0]

    def turn_of(generate: Callable[[list[int]], Any]) -> Callable[[], TimedCall]:
        return lambda: timed(lambda: [generate(prompt) for prompt in prompts])

    runs = {name: turn_of(one(each)) for name, each in policies(model.config.num_layers).items()}
    runs[PEER] = turn_of(lambda prompt: peer([prompt], length)[0])
    turns = take_turns(runs, arguments.rounds)
    result = {
        **machine(),
        "num_threads": arguments.threads,
        "transformers": version("transformers"),
        "dtype": dtype,
        "num_layers": model.config.num_layers,
        "weights": weights_lie(model.config.num_parameters * model.network.dtype.itemsize),
        "num_prompts": len(prompts),
        "max_tokens": length,
        "rounds": arguments.rounds,
        "modes": [row_of(name, turns) for name in turns],
    }
    REPORTS[0].finish(result, arguments)
