"""What a check of confidence costs: exits at half of the layers, with more and more checks before.

python bench/bench_checks.py                        SmolLM2-135M-Instruct's Q4_1 file and float32
python bench/bench_checks.py --batches 1 8 32 --prompts 4

Everybody leaves after half of the layers; before that a check that nobody passes comes after every
layer, every third one, or never. How much of what ``FixedExit`` gains is left tells what checks
cost, by measure. Writes bench/results/checks.json and its table in bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

import eecore
from eecore.exits import ConfidentExit, Exit, FixedExit, Full, Measure

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from bench_drafts import chat, loaded, smollm2_file, spent  # noqa: E402
from draft_prompts import prompts_of  # noqa: E402
from harness import cpu_name, insert  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "checks.json"
MEASURES: tuple[Measure, ...] = ("softmax", "cut", "state")
NEVER = math.nextafter(1.0, 0.0)  # a threshold of 1 would not be measured


def policies(num_layers: int) -> dict[str, Exit]:
    """By name: full depth, the model cut at half of it, and exits there with checks before."""
    last = num_layers // 2
    found: dict[str, Exit] = {"full": Full(), "fixed": FixedExit(last)}
    for measure in MEASURES:
        for name, step in (("one", last), ("third", 3), ("every", 1)):
            points = tuple(sorted({last, *range(last, 0, -step)}))
            found[f"{measure}, {name}"] = ConfidentExit(
                0.0,
                measure=measure,
                exit_points=points,
                thresholds=dict.fromkeys(points[:-1], NEVER),
            )
    return found


def measure(
    model: eecore.Model, prompts: list[list[int]], max_tokens: int, rounds: int
) -> dict[str, float]:
    """Seconds a decoding step by policy: all in turns, of each the fastest."""
    last = model.config.num_layers // 2
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, policy in policies(model.config.num_layers).items():
            outputs = eecore.generate(
                model, prompts, exit=policy, max_tokens=max_tokens, ignore_eos=True
            )
            depths = {layer for output in outputs for layer in output.exit_layers[1:]}
            if name != "full" and depths != {last}:
                raise SystemExit(f"{name}: expected exits at {last}, got {sorted(depths)}")
            first = max(output.stats.time_to_first_token_s for output in outputs)
            step = (spent(outputs) - first) / (max_tokens - 1)
            best[name] = min(best.get(name, step), step)
    return best


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "| weights | batch | full, ms a step | cut at half "
        + "".join(f"| {m}: one | each third | every layer " for m in MEASURES)
        + "|",
        "|---|---:|---:|---:" + "|---:|---:|---:" * len(MEASURES) + "|",
    ]
    for row in result["rows"]:
        steps = row["ms"]
        gains = [f"{steps['full'] / ms:.2f}x" for name, ms in steps.items() if name != "full"]
        lines.append(
            f"| {row['weights']} | {row['batch']} | {steps['full']:.2f} | {' | '.join(gains)} |"
        )
    lines += [
        "",
        f"Speed-up of a decoding step over `Full()`. {result['model']}, of whose "
        f"{result['num_layers']} layers half run; `cut` goes over {result['cut']} of "
        f"{result['vocab_size']} tokens. Answers of {result['tokens']} tokens, the fastest of "
        f"{result['rounds']} turns; 1 thread, {result['cpu']}, {result['cpu_capability']} kernels, "
        f"torch {result['torch']}. `python bench/bench_checks.py`",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", nargs="+", default=["file", "float32"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry-run", action="store_true", help="print the table, write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with smollm2_file(None) as file:
        for weights in arguments.weights:
            model = loaded(file, weights, None)
            head = model.network.draft_head
            assert head is not None
            for batch in arguments.batches:
                texts = (prompts_of("chat", 20) * batch)[:batch]
                prompts = [chat(model, text) for text in texts]
                steps = measure(model, prompts, arguments.tokens, arguments.rounds)
                ms = {name: seconds * 1e3 for name, seconds in steps.items()}
                rows.append({"weights": weights, "batch": batch, "ms": ms})
                print(rows[-1], file=sys.stderr, flush=True)
    result = {
        "model": file.stem,
        "num_layers": model.config.num_layers,
        "vocab_size": model.config.vocab_size,
        "cut": len(head.vocabulary),
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "cpu": cpu_name(),
        "cpu_capability": eecore.build_info()["cpu_capability"],
        "torch": torch.__version__,
        "rows": rows,
    }
    table = markdown(result)
    print(table)
    if not arguments.dry_run:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        insert(ROOT / "bench" / "RESULTS.md", "checks", table)


if __name__ == "__main__":
    main()
