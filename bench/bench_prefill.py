"""Time to the first token of a long prompt, against transformers on the same weights and dtype.

Both run in one process, in turns; ratios are taken within a round, so that a busy machine slows
both. Writes bench/results/prefill.json and the table in bench/RESULTS.md, in about 2 minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import eecore
import harness

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from get_smollm2 import get_smollm2  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "prefill.json"
KINDS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"weights": "int8", "dtype": "bfloat16"},
    "int4": {"weights": "int4", "dtype": "bfloat16"},
}
PEER_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

FirstToken = Callable[[list[int]], int]


def eecore_first_token(directory: Path, settings: dict[str, str]) -> FirstToken:
    model = eecore.load(
        directory, device="cpu", prefix_cache=False, kv_cache_tokens=2048, **settings
    )

    def run(prompt: list[int]) -> int:
        return eecore.generate(model, prompt, max_tokens=1, ignore_eos=True)[0].token_ids[0]

    return run


def transformers_first_token(directory: Path, dtype: torch.dtype) -> FirstToken:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    network.generation_config.eos_token_id = None
    network.generation_config.pad_token_id = 0

    def run(prompt: list[int]) -> int:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = network.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False
            )
        return int(out[0, -1])

    return run


def measure(runs: dict[str, FirstToken], prompt: list[int], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run in each round, after one short warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(prompt[:40])
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            run(prompt)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "| threads | weights | ms | tokens/s | GFLOP/s | of multiply ceiling | to transformers |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        ratio = row["ratio_to_transformers"]
        lines.append(
            f"| {row['threads']} | {row['name']} | {row['best_s'] * 1e3:.0f} "
            f"| {result['prompt_tokens'] / row['best_s']:.0f} | {row['gflops']:.0f} "
            f"| {row['of_ceiling']:.2f} | {'' if ratio is None else f'{ratio:.2f}'} |"
        )
    about = (
        f"SmolLM2-135M-Instruct, a prompt of {result['prompt_tokens']} tokens, best of "
        f"{result['rounds']} rounds; ratio to transformers {result['transformers']} in the same "
        "dtype: median over rounds, above 1 is faster; int8 and int4 weights with states in "
        "bfloat16. The ceiling is that of float32 "
        f"multiply-adds. {result['cpu']}, {result['cpu_capability']} kernels, torch "
        f"{result['torch']}. `python bench/bench_prefill.py`"
    )
    return "\n".join([*lines, "", about])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dry-run", action="store_true", help="print the table, write nothing")
    arguments = parser.parse_args()
    import transformers

    directory = get_smollm2()
    runs: dict[str, FirstToken] = {}
    for name, settings in KINDS.items():
        runs[name] = eecore_first_token(directory, settings)
        if name in PEER_DTYPES:
            runs[f"transformers {name}"] = transformers_first_token(directory, PEER_DTYPES[name])
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(5, 40000, (arguments.prompt_tokens,), generator=generator).tolist()

    # Of the layers only: the LM head sees one row.
    config = eecore.load(directory, kv_cache_tokens=16).config
    layers = config.num_parameters - config.vocab_size * config.hidden_size
    rows = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        seconds = measure(runs, prompt, arguments.rounds)
        ceiling = harness.multiply_ceiling(torch.float32)
        for name, times in seconds.items():
            peer = seconds.get(f"transformers {name}")
            pairs = zip(times, peer, strict=True) if peer else ()
            flops = 2 * layers * len(prompt) / min(times)
            rows.append(
                {
                    "threads": threads,
                    "name": name,
                    "seconds": times,
                    "best_s": min(times),
                    "gflops": flops / 1e9,
                    "of_ceiling": flops / ceiling,
                    "ratio_to_transformers": statistics.median(b / a for a, b in pairs)
                    if peer
                    else None,
                }
            )
    result = {
        "cpu": harness.cpu_name(),
        "machine": platform.machine(),
        "cpu_capability": eecore.build_info()["cpu_capability"],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "prompt_tokens": len(prompt),
        "rounds": arguments.rounds,
        "rows": rows,
    }
    table = markdown(result)
    print(table)
    if not arguments.dry_run:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        harness.insert(ROOT / "bench" / "RESULTS.md", "prefill", table)


if __name__ == "__main__":
    main()
