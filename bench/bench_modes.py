"""SmolLM2 in every exit mode, against its own full depth and transformers' generate.

All run the same weights in one process, one prompt at a time, greedy, in turns: each round runs
every mode once, and ratios are taken within a round, so that a busy machine slows both sides.
Writes bench/results/modes.json and the table in bench/RESULTS.md and README.md, in about 2 minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import eecore

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from get_smollm2 import get_smollm2  # noqa: E402
from harness import insert, weights_lie  # noqa: E402

QUESTIONS = (
    "What is photosynthesis, in simple words?",
    "Write a Python function that checks whether a number is prime.",
)
RESULTS = ROOT / "bench" / "results" / "modes.json"

Generate = Callable[[list[int]], tuple[list[int], "eecore.Output | None"]]


@dataclass
class Run:
    """One row of the table."""

    name: str
    generate: Generate
    seconds: list[float] = field(default_factory=list)
    """One a round, over all prompts."""
    tokens: list[list[int]] = field(default_factory=list)
    """Of each prompt; the same every round."""
    outputs: list[eecore.Output] = field(default_factory=list)


def eecore_runs(model: eecore.Model, max_tokens: int) -> list[Run]:
    """A run per exit mode."""
    num_layers = model.config.num_layers
    late = num_layers - 3

    def generate(exit: Any) -> Generate:
        def one(prompt: list[int]) -> tuple[list[int], eecore.Output]:
            output = eecore.generate(
                model, prompt, exit=exit, max_tokens=max_tokens, ignore_eos=True
            )[0]
            return output.token_ids, output

        return one

    skips = eecore.SkipSearch.load(ROOT / "scripts" / "smollm2_skips.json").policy()
    points = tuple(range(num_layers - 6, num_layers, 2))
    confident = eecore.ConfidentExit(0.9, exit_points=points)
    return [
        Run("`Full()`", generate(eecore.Full())),
        Run(f"`FixedExit({late})`", generate(eecore.FixedExit(late))),
        Run(f"`ConfidentExit(0.9, exit_points={points})`", generate(confident)),
        Run(f"`SelfSpeculative({late}, 2)`", generate(eecore.SelfSpeculative(late, 2))),
        Run("`DraftAndVerify(...)`", generate(skips)),
    ]


def transformers_run(directory: Path, dtype: torch.dtype, max_tokens: int) -> Run:
    """transformers' greedy generate on the same weights."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    network.generation_config.eos_token_id = None
    network.generation_config.pad_token_id = 0

    def one(prompt: list[int]) -> tuple[list[int], None]:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            out = network.generate(
                ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False
            )
        return out[0, len(prompt) :].tolist(), None

    return Run("transformers `generate`", one)


def measure(runs: list[Run], prompts: list[list[int]], rounds: int) -> None:
    """Run everything ``rounds`` times in turns, after one short warm-up each."""
    for run in runs:
        run.generate(prompts[0][:8])
    for _ in range(rounds):
        for run in runs:
            made = []
            started = time.perf_counter()
            for prompt in prompts:
                made.append(run.generate(prompt))
            run.seconds.append(time.perf_counter() - started)
            run.tokens = [tokens for tokens, _ in made]
            run.outputs = [output for _, output in made if output is not None]


def row(run: Run, full: Run, peer: Run) -> dict[str, Any]:
    """The figures of a run."""
    count = sum(map(len, run.tokens))
    drafted = sum(output.stats.drafted for output in run.outputs)
    accepted = sum(output.stats.accepted for output in run.outputs)
    depth = sum(sum(output.exit_layers) for output in run.outputs)

    def ratio(other: Run) -> float:
        pairs = zip(run.seconds, other.seconds, strict=True)
        return statistics.median(theirs / ours for ours, theirs in pairs)

    return {
        "name": run.name,
        "tokens_per_s_best": count / min(run.seconds),
        "tokens_per_s_median": count / statistics.median(run.seconds),
        "ratio_to_full": ratio(full),
        "ratio_to_transformers": ratio(peer),
        "mean_exit_layer": depth / count if run.outputs else None,
        "draft_acceptance": accepted / drafted if drafted else None,
        "same_tokens_as_full": run.tokens == full.tokens,
    }


def markdown(result: dict[str, Any]) -> str:
    """The table, with what it was measured on."""
    lines = [
        "| mode | tokens/s | to `Full()` | to transformers | mean exit layer | drafts accepted "
        "| text of `Full()` |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for figures in result["modes"]:
        depth, accepted = figures["mean_exit_layer"], figures["draft_acceptance"]
        cells = (
            figures["name"],
            f"{figures['tokens_per_s_best']:.1f}",
            f"{figures['ratio_to_full']:.2f}",
            f"{figures['ratio_to_transformers']:.2f}",
            "" if depth is None else f"{depth:.1f}",
            "" if accepted is None else f"{accepted:.0%}",
            "yes" if figures["same_tokens_as_full"] else "no",
        )
        lines.append(f"| {' | '.join(cells)} |")
    about = (
        f"SmolLM2-135M-Instruct ({result['num_layers']} layers, {result['dtype']}), "
        f"{result['num_prompts']} prompts one after the other, {result['max_tokens']} greedy "
        f"tokens each, {result['num_threads']} threads, {result['cpu_capability']} kernels, "
        f"transformers {result['transformers']}, torch {result['torch']}. tokens/s: best of "
        f"{result['rounds']} rounds; ratios: median over rounds. {result['weights']} "
        "`python bench/bench_modes.py`"
    )
    return "\n".join([*lines, "", about])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--dry-run", action="store_true", help="print the table, write nothing")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    import transformers

    directory = get_smollm2()
    model = eecore.load(directory, device="cpu", prefix_cache=False, kv_cache_tokens=2048)
    assert model.tokenizer is not None
    prompts = [
        model.tokenizer.encode(
            model.tokenizer.apply_chat_template([{"role": "user", "content": question}]),
            add_special_tokens=False,
        )
        for question in QUESTIONS
    ]
    runs = eecore_runs(model, arguments.max_tokens)
    peer = transformers_run(directory, model.network.dtype, arguments.max_tokens)
    measure([*runs, peer], prompts, arguments.rounds)
    result = {
        "machine": platform.machine(),
        "cpu_capability": eecore.build_info()["cpu_capability"],
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(model.network.dtype).removeprefix("torch."),
        "num_layers": model.config.num_layers,
        "weights": weights_lie(model.config.num_parameters * model.network.dtype.itemsize),
        "num_prompts": len(prompts),
        "max_tokens": arguments.max_tokens,
        "rounds": arguments.rounds,
        "modes": [row(run, runs[0], peer) for run in [*runs, peer]],
    }
    table = markdown(result)
    print(table)
    if not arguments.dry_run:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        for file in (ROOT / "bench" / "RESULTS.md", ROOT / "README.md"):
            insert(file, "modes", table)


if __name__ == "__main__":
    main()
