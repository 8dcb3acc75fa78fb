"""Time to the first token of a long prompt, in eecore, transformers and llama.cpp.

python -m bench prefill [--prompt-tokens 512 2048 4096] [--threads 1 2]

The weights are the same; all run in turns, and ratios are taken within a round, so that a busy
machine slows all alike. transformers shares eecore's process; llama.cpp runs its own benchmark,
with flash attention and without. Writes bench/results/prefill.json and the table in
bench/results/decoding.md, in about 20 minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.decode.engines import LlamaCpp, convert, gguf_file
from bench.decode.worker import transformers
from bench.harness import peers
from bench.harness.ceilings import multiply_ceiling
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.rows import table_of
from bench.harness.smollm2 import get_smollm2
from bench.harness.turns import TimedCall, median_ratio, seconds_of, take_turns, timed

KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"weights": "int8", "dtype": "bfloat16"},
    "int4": {"weights": "int4", "dtype": "bfloat16"},
}
MULTIPLIED = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int4": torch.int8,
}
"""The numbers whose products each kind is made of."""
TRANSFORMERS_BITS = {"float32": "f32", "bfloat16": "bf16"}
PEERS = {
    "transformers": "ratio_to_transformers",
    "llama.cpp": "ratio_to_llama_cpp",
    "llama.cpp with flash attention": "ratio_to_llama_cpp_flash",
}
"""The name before the weights in a peer's row, and the figure of its ratio."""

Prompt = Callable[[list[int]], TimedCall]
"""Times a pass over a prompt, up to its first token."""


def eecore_prompt(directory: Path, settings: dict[str, Any], most: int) -> Prompt:
    """``most``: tokens of the longest prompt."""
    model = eecore.load(
        directory, device="cpu", prefix_cache=False, kv_cache_tokens=most + 64, **settings
    )
    return lambda prompt: timed(
        lambda: eecore.generate(model, prompt, max_tokens=1, ignore_eos=True)
    )


def transformers_prompt(directory: Path, bits: str) -> Prompt:
    generate = transformers(str(directory), bits, torch.get_num_threads())
    return lambda prompt: timed(lambda: generate([prompt], 1))


def llama_cpp_prompt(directory: Path, flash: bool) -> Prompt:
    """A prompt of random tokens in llama.cpp with int4, on as many threads as torch has."""

    def run(prompt: list[int]) -> TimedCall:
        engine = LlamaCpp("int4", torch.get_num_threads(), gguf_file(directory, "int4"))
        return TimedCall(engine.prompt_seconds(len(prompt), flash), None)

    return run


def runs_of(directory: Path, most: int, has_llama_cpp: bool = False) -> dict[str, Prompt]:
    """eecore with each kind of weights, followed by its peers that read the same weights."""
    runs: dict[str, Prompt] = {}
    for name, settings in KINDS.items():
        runs[name] = eecore_prompt(directory, settings, most)
        if name in TRANSFORMERS_BITS:
            runs[f"transformers {name}"] = transformers_prompt(directory, TRANSFORMERS_BITS[name])
        if has_llama_cpp and name == "int4":
            runs[f"llama.cpp {name}"] = llama_cpp_prompt(directory, False)
            runs[f"llama.cpp with flash attention {name}"] = llama_cpp_prompt(directory, True)
    return runs


def rows_of(
    runs: dict[str, Prompt], prompt: list[int], rounds: int, num_parameters: int
) -> list[dict[str, Any]]:
    """Figures on torch's threads; ``num_parameters``: of the layers, without the LM head."""
    turns = take_turns({name: partial(run, prompt) for name, run in runs.items()}, rounds)
    seconds = {name: seconds_of(its) for name, its in turns.items()}
    peaks = {dtype: multiply_ceiling(dtype) for dtype in set(MULTIPLIED.values())}
    rows = []
    for name, times in seconds.items():
        flops = 2 * num_parameters * len(prompt) / min(times)
        numbers = MULTIPLIED[name.rpartition(" ")[2]]
        row = {"threads": torch.get_num_threads(), "tokens": len(prompt), "name": name}
        row |= {"best_s": min(times), "of_ceiling": flops / peaks[numbers]}
        row["peak"] = str(numbers).removeprefix("torch.")
        for peer, ratio in PEERS.items():
            if f"{peer} {name}" in seconds:
                row[ratio] = median_ratio(times, seconds[f"{peer} {name}"])
        rows.append(row)
    return rows


def markdown(result: Figures) -> str:
    columns = [
        ("threads", "{threads}"),
        ("weights", "{name}"),
        ("tokens", "{tokens}"),
        ("ms", lambda row: f"{row['best_s'] * 1e3:.0f}"),
        ("tokens/s", lambda row: f"{row['tokens'] / row['best_s']:.0f}"),
        ("of a multiply peak", "{of_ceiling:.0%} of {peak}"),
        *((f"to {peer}", f"{{{ratio}:.2f}}x") for peer, ratio in PEERS.items()),
    ]
    rows = [row for row in result["rows"] if not row["name"].startswith(tuple(PEERS))]
    about = (
        f"SmolLM2-135M-Instruct, best of {result['rounds']} rounds; int8 and int4 weights with "
        "states in bfloat16. The peak is that of multiply-adds of the named numbers, the share "
        "that of the layers' products alone. Speed as a multiple of that of peers, median over "
        f"rounds: transformers {result['transformers']} in the same dtype, {result['llama.cpp']} "
        f"with the same 4-bit blocks. {in_words(result)}. `python -m bench prefill`"
    )
    return f"{table_of(columns, rows, text_columns=2)}\n\n{about}"


REPORTS = (Report("prefill", {"prefill": markdown}, {"rows": ("threads", "tokens", "name")}),)


def main(words: Sequence[str]) -> None:
    made = parser("prefill", __doc__, rounds=2)
    made.add_argument("--prompt-tokens", type=int, nargs="+", default=[512, 2048, 4096])
    made.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = made.parse_args(words)
    directory, most = get_smollm2(), max(arguments.prompt_tokens)
    has_llama_cpp = peers.prepare(["llama.cpp"])["llama.cpp"].available
    if has_llama_cpp:
        convert(directory, {"llama.cpp"})
    runs = runs_of(directory, most, has_llama_cpp)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(5, 40000, (most,), generator=generator).tolist()
    config = eecore.load(directory, kv_cache_tokens=16).config
    layers = config.num_parameters - config.vocab_size * config.hidden_size
    rows = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for tokens in arguments.prompt_tokens:
            rows += rows_of(runs, prompt[:tokens], arguments.rounds, layers)
            say(rows[-len(runs) :])
    result = {
        **machine(),
        "transformers": version("transformers"),
        "llama.cpp": peers.LLAMA_CPP if has_llama_cpp else "no llama.cpp",
        "rounds": arguments.rounds,
        "rows": rows,
    }
    REPORTS[0].finish(result, arguments)
