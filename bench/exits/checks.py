"""The cost of a confidence check: exits at half of the layers, after more and more checks.

python -m bench checks                        SmolLM2-135M-Instruct's Q4_1 file and float32
python -m bench checks --batches 1 8 32 --rounds 5

All rows exit after half of the layers. Before, a check that no row passes runs after every layer,
after every third layer, or never. The share of ``FixedExit``'s speed-up that remains shows the cost
of the checks, by measure. Writes bench/results/checks.json and its table in bench/results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import eecore
from bench.harness.command import parser, say
from bench.harness.exits import NEVER
from bench.harness.machine import in_words, machine
from bench.harness.prompts import prompts_of
from bench.harness.results import Figures, Report
from bench.harness.rows import Cell, Row, table_of
from bench.harness.smollm2 import chat, loaded, smollm2_file
from bench.harness.turns import decoding_seconds
from eecore.exits import ConfidentExit, Exit, FixedExit, Full, Measure

MEASURES: tuple[Measure, ...] = ("softmax", "cut", "state")
CHECKS = {"one": "one", "third": "every third layer", "every": "every layer"}


def policies(num_layers: int) -> dict[str, Exit]:
    """Policies by name: full depth, a cut at half of the layers, exits there after checks."""
    last = num_layers // 2
    found: dict[str, Exit] = {"full": Full(), "fixed": FixedExit(last)}
    for measure in MEASURES:
        for name, step in zip(CHECKS, (last, 3, 1), strict=True):
            points = tuple(sorted({last, *range(last, 0, -step)}))
            never = dict.fromkeys(points[:-1], NEVER)
            policy = ConfidentExit(0.0, measure=measure, exit_points=points, thresholds=never)
            found[f"{measure}, {name}"] = policy
    return found


def measure(
    model: eecore.Model, prompts: list[list[int]], max_tokens: int, rounds: int
) -> dict[str, float]:
    """Milliseconds of a decoding step by policy: in turns, the fastest of each."""
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
            step = decoding_seconds(outputs) * 1e3 / (max_tokens - 1)
            best[name] = min(best.get(name, step), step)
    return best


def markdown(result: Figures) -> str:
    def gain(name: str) -> Cell:
        return lambda row: f"{row['ms']['full'] / row['ms'][name]:.2f}x"

    columns: list[tuple[str, Cell]] = [("weights", "{weights}"), ("batch", "{batch}")]
    columns += [("full, ms a step", "{ms[full]:.2f}"), ("cut at half", gain("fixed"))]
    for each in MEASURES:
        for name, words in CHECKS.items():
            head = f"{each}: {words}" if name == "one" else words
            columns.append((head, gain(f"{each}, {name}")))
    about = (
        f"Speed-up of a decoding step over `Full()`. {result['model']}, half of its "
        f"{result['num_layers']} layers; `cut` computes the logits of {result['cut']} of "
        f"{result['vocab_size']} tokens. Answers of {result['tokens']} tokens, the fastest of "
        f"{result['rounds']} turns; 1 thread, {in_words(result)}. `python -m bench checks`"
    )
    return f"{table_of(columns, result['rows'])}\n\n{about}"


REPORTS = (Report("checks", {"checks": markdown}, {"rows": ("weights", "batch")}),)


def main(words: Sequence[str]) -> None:
    made = parser("checks", __doc__, batches=(1, 8, 32), rounds=3)
    made.add_argument("--weights", nargs="+", default=["file", "float32"])
    made.add_argument("--tokens", type=int, default=33)
    arguments = made.parse_args(words)
    torch.set_num_threads(1)
    rows: list[Row] = []
    with smollm2_file() as file:
        for weights in arguments.weights:
            model = loaded(file, weights, kv_cache_tokens=16384)
            head = model.network.draft_head
            assert head is not None
            for batch in arguments.batches:
                texts = (prompts_of("chat", 20) * batch)[:batch]
                prompts = [chat(model, text) for text in texts]
                ms = measure(model, prompts, arguments.tokens, arguments.rounds)
                rows.append({"weights": weights, "batch": batch, "ms": ms})
                say(rows[-1])
    result = {
        "model": file.stem,
        "num_layers": model.config.num_layers,
        "vocab_size": model.config.vocab_size,
        "cut": len(head.vocabulary),
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        **machine(),
        "rows": rows,
    }
    REPORTS[0].finish(result, arguments)
