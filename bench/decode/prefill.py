"""Time to the first token of a long prompt, in eecore and in transformers with the same weights.

python -m bench prefill [--prompt-tokens 512] [--threads 1 2]

Both run in one process, in turns; ratios are taken within a round, so that a busy machine slows
both. Writes bench/results/prefill.json and the table in bench/RESULTS.md, in about 2 minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.decode.worker import transformers
from bench.harness.ceilings import multiply_ceiling
from bench.harness.command import parser
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.smollm2 import get_smollm2
from bench.harness.turns import TimedCall, median_ratio, seconds_of, take_turns, timed
from eecore.lab.evaluation.tables import markdown_table

KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"weights": "int8", "dtype": "bfloat16"},
    "int4": {"weights": "int4", "dtype": "bfloat16"},
}
PEER_BITS = {"float32": "f32", "bfloat16": "bf16"}

FirstToken = Callable[[list[int]], int]


def eecore_first_token(directory: Path, settings: dict[str, Any]) -> FirstToken:
    model = eecore.load(
        directory, device="cpu", prefix_cache=False, kv_cache_tokens=2048, **settings
    )

    def run(prompt: list[int]) -> int:
        return eecore.generate(model, prompt, max_tokens=1, ignore_eos=True)[0].token_ids[0]

    return run


def transformers_first_token(directory: Path, bits: str) -> FirstToken:
    generate = transformers(str(directory), bits, torch.get_num_threads())
    return lambda prompt: generate([prompt], 1)[0][0]


def runs_of(directory: Path) -> dict[str, FirstToken]:
    """eecore with each kind of weights, followed by transformers in the same dtype, if any."""
    runs: dict[str, FirstToken] = {}
    for name, settings in KINDS.items():
        runs[name] = eecore_first_token(directory, settings)
        if name in PEER_BITS:
            runs[f"transformers {name}"] = transformers_first_token(directory, PEER_BITS[name])
    return runs


def rows_of(
    runs: dict[str, FirstToken], prompt: list[int], rounds: int, num_parameters: int
) -> list[dict[str, Any]]:
    """Figures on torch's threads; ``num_parameters``: of the layers, without the LM head."""

    def turn_of(run: FirstToken) -> Callable[[], TimedCall]:
        return lambda: timed(lambda: run(prompt))

    turns = take_turns({name: turn_of(run) for name, run in runs.items()}, rounds)
    seconds = {name: seconds_of(its) for name, its in turns.items()}
    ceiling = multiply_ceiling(torch.float32)
    rows = []
    for name, times in seconds.items():
        peer = seconds.get(f"transformers {name}")
        flops = 2 * num_parameters * len(prompt) / min(times)
        rows.append(
            {
                "threads": torch.get_num_threads(),
                "name": name,
                "seconds": times,
                "best_s": min(times),
                "gflops": flops / 1e9,
                "of_ceiling": flops / ceiling,
                "ratio_to_transformers": median_ratio(times, peer) if peer else None,
            }
        )
    return rows


def markdown(result: Figures) -> str:
    lines = []
    for row in result["rows"]:
        ratio = row["ratio_to_transformers"]
        lines.append(
            [
                str(row["threads"]),
                row["name"],
                f"{row['best_s'] * 1e3:.0f}",
                f"{result['prompt_tokens'] / row['best_s']:.0f}",
                f"{row['gflops']:.0f}",
                f"{row['of_ceiling']:.2f}",
                "" if ratio is None else f"{ratio:.2f}",
            ]
        )
    about = (
        f"SmolLM2-135M-Instruct, a prompt of {result['prompt_tokens']} tokens, best of "
        f"{result['rounds']} rounds; ratio to transformers {result['transformers']} in the same "
        "dtype: median over rounds, above 1 is faster; int8 and int4 weights with states in "
        "bfloat16. The ceiling is that of float32 "
        f"multiply-adds. {in_words(result)}. `python -m bench prefill`"
    )
    head = ["threads", "weights", "ms", "tokens/s", "GFLOP/s"]
    head += ["of multiply ceiling", "to transformers"]
    return f"{markdown_table(head, lines, text_columns=2)}\n\n{about}"


REPORTS = (Report("prefill", {"prefill": markdown}, {"rows": ("threads", "name")}),)


def main(words: Sequence[str]) -> None:
    made = parser("prefill", __doc__, rounds=4)
    made.add_argument("--prompt-tokens", type=int, default=512)
    made.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = made.parse_args(words)
    directory = get_smollm2()
    runs = runs_of(directory)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(5, 40000, (arguments.prompt_tokens,), generator=generator).tolist()
    config = eecore.load(directory, kv_cache_tokens=16).config
    layers = config.num_parameters - config.vocab_size * config.hidden_size
    rows = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        rows += rows_of(runs, prompt, arguments.rounds, layers)
    result = {
        **machine(),
        "transformers": version("transformers"),
        "prompt_tokens": len(prompt),
        "rounds": arguments.rounds,
        "rows": rows,
    }
    REPORTS[0].finish(result, arguments)
