"""``model.generate`` of transformers as it is, and on eecore's engine: the same object, one run.

python bench/bench_transformers.py                 the model that ships, batch 1 and 8
python bench/bench_transformers.py --count 64 --rounds 5

Held-out utterances, greedy, prompts included; all modes take turns, and lossless ones have to give
transformers' own tokens. Writes bench/results/transformers.json and its table in bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

import eecore

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts" / "intents")]

from bench_intents import DATA, utterances  # noqa: E402
from harness import cpu_name, insert  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "transformers.json"
LONGEST_PARSE = 96  # tokens
EARLY_EXITS = (2, 3)
Arguments = dict[str, Any]


def modes(batch: int) -> dict[str, Arguments]:
    """Arguments of ``generate`` by name; transformers drafts for one sequence alone."""
    where = eecore.default_model()
    calibrated = eecore.ConfidentExit.calibrated(where / "calibration-softmax.json")
    found: dict[str, Arguments] = {"transformers": {}}
    if batch == 1:
        for layer in EARLY_EXITS:
            found[f"transformers, assistant_early_exit={layer}"] = {"assistant_early_exit": layer}
    for name, exit in (
        ("full", "full"),
        ("auto", "auto"),
        ("speculative:3,6", "speculative:3,6"),
        ("calibrated softmax", calibrated),
    ):
        found[f"eecore, {name}"] = {
            "custom_generate": eecore.generate_for_transformers,
            "exit": exit,
        }
    return found


def groups_of(prompts: list[list[int]], batch: int, pad: int) -> list[Arguments]:
    """Padded on the left, with masks."""
    found = []
    for first in range(0, len(prompts), batch):
        group = prompts[first : first + batch]
        longest = max(map(len, group))
        rows = [[pad] * (longest - len(each)) + each for each in group]
        mask = [[0] * (longest - len(each)) + [1] * len(each) for each in group]
        found.append({"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)})
    return found


def measure(
    model: PreTrainedModel, groups: list[Arguments], batch: int, rounds: int, pad: int
) -> list[dict[str, Any]]:
    """Tokens a second of each mode, and its speed-up over transformers alone: medians of rounds."""
    seconds: dict[str, list[float]] = {}
    answers: dict[str, list[list[int]]] = {}
    every = modes(batch)
    for number in range(rounds + 1):  # the first one warms up
        for name, arguments in every.items():
            texts: list[list[int]] = []
            began = time.perf_counter()
            for group in groups:
                given = {**group, **arguments, "pad_token_id": pad, "do_sample": False}
                made = model.generate(**given, max_new_tokens=LONGEST_PARSE)
                texts += [_without(row, pad) for row in made[:, group["input_ids"].shape[1] :]]
            if number:
                seconds.setdefault(name, []).append(time.perf_counter() - began)
            answers[name] = texts
    first = next(iter(every))
    for name, texts in answers.items():
        if texts != answers[first] and "calibrated" not in name:
            raise SystemExit(f"{name}: expected the tokens of transformers, got others")
    return [
        {
            "mode": name,
            "tokens_per_s": sum(map(len, answers[name])) / min(times),
            "speedup": statistics.median(a / b for a, b in zip(seconds[first], times, strict=True)),
        }
        for name, times in seconds.items()
    ]


def _without(row: torch.Tensor, pad: int) -> list[int]:
    tokens: list[int] = row.tolist()
    while tokens and tokens[-1] == pad:
        tokens.pop()
    return tokens


def markdown(result: dict[str, Any]) -> str:
    lines = ["| batch | `model.generate` | tokens/s | speed-up |", "|---:|---|---:|---:|"]
    lines += [
        f"| {row['batch']} | {row['mode']} | {row['tokens_per_s']:.0f} | {row['speedup']:.2f}x |"
        for row in result["rows"]
    ]
    lines += [
        "",
        f"The intent model in {result['dtype']}, {result['count']} held-out utterances, prompts "
        f"included, medians of {result['rounds']} turns; 1 thread, {result['cpu']}, "
        f"{result['cpu_capability']} kernels, torch {result['torch']}, transformers "
        f"{result['transformers']}. `python bench/bench_transformers.py`",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--count", type=int, default=32, help="utterances")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry-run", action="store_true", help="print the table, write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(eecore.default_model(), dtype=torch.float32)
    ours = eecore.from_transformers(model.eval())
    tokenizer = eecore.load(device="cpu").tokenizer
    assert tokenizer is not None
    prompts = [tokenizer.encode(r["input"]) for r in utterances(DATA, arguments.count)]
    pad = min(ours.config.eos_token_ids)
    rows = []
    for batch in arguments.batches:
        groups = groups_of(prompts, batch, pad)
        for row in measure(model, groups, batch, arguments.rounds, pad):
            rows.append({"batch": batch, **row})
            print(rows[-1], file=sys.stderr, flush=True)
    result = {
        "cpu": cpu_name(),
        "cpu_capability": eecore.build_info()["cpu_capability"],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": "float32",
        "count": arguments.count,
        "rounds": arguments.rounds,
        "rows": rows,
    }
    table = markdown(result)
    print(table)
    if not arguments.dry_run:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        insert(ROOT / "bench" / "RESULTS.md", "transformers", table)


if __name__ == "__main__":
    main()
