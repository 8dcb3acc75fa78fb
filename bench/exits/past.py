"""What drafts out of past outputs bring ``Auto``: where requests recur, and where they do not.

python -m bench past                         SmolLM2-135M-Instruct's Q4_1 file
python -m bench past --model FILE.gguf --weights file float32 --batches 1 4

Two engines answer the same requests, one of which keeps its outputs (``draft_history_tokens``).
First they answer some requests, then those that are timed: the same once more (retries, a
benchmark that runs again), the same texts with another task, or others. Greedy; both write the same
tokens. Writes bench/results/past.json and the table of that name in bench/results/drafts.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.outputs import decoding_seconds
from bench.harness.prompts import REWRITINGS, SUMMARIES, prompts_of
from bench.harness.results import Figures, Report
from bench.harness.smollm2 import LONGEST_PROMPT, chat, loaded, smollm2_file
from bench.harness.turns import batches_of, rotated
from eecore.exits import Auto
from eecore.lab.evaluation.tables import markdown_table

HISTORY = 1 << 16
"""Tokens of past outputs that are kept."""
KINDS = ("chat", "summary", "rewriting")
CASES = ("the same again", "the same text, another task", "others")


def other_task(prompt: str) -> str:
    """A request about the same text."""
    for tasks in (SUMMARIES, REWRITINGS):
        begins = [task.partition("{}")[0] for task in tasks]
        for begin, other in zip(begins, reversed(begins), strict=True):
            if prompt.startswith(begin):
                return other + prompt.removeprefix(begin)
    return prompt


def requests(case: str, count: int) -> tuple[list[str], list[str]]:
    """What is asked first, and what is timed then: ``count`` prompts of each kind."""
    every = [prompts_of(kind, 2 * count) for kind in KINDS]
    first = [prompt for prompts in every for prompt in prompts[:count]]
    if case == CASES[0]:
        return first, first
    if case == CASES[1]:
        first = [prompt for prompt in first if other_task(prompt) != prompt]
        return first, [other_task(prompt) for prompt in first]
    return first, [prompt for prompts in every for prompt in prompts[count:]]


def measure(
    models: dict[str, eecore.Model], case: str, batch: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Seconds of decoding by each model, in turns, group by group."""

    def answer(name: str, prompts: Sequence[list[int]]) -> list[eecore.Output]:
        return eecore.generate(models[name], prompts, exit=Auto(), max_tokens=arguments.tokens)

    asked = [
        [ids for prompt in prompts if len(ids := chat(models["past"], prompt)) <= LONGEST_PROMPT]
        for prompts in requests(case, arguments.prompts)
    ]
    first, timed = (batches_of(prompts, batch) for prompts in asked)
    for group in first:
        for name in models:
            answer(name, group)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    drafted, accepted, tokens = 0, 0, 0
    for turn, group in enumerate(timed):
        texts = {}
        for name in rotated(list(models), turn):
            outputs = answer(name, group)
            texts[name] = [output.token_ids for output in outputs]
            seconds[name].append(decoding_seconds(outputs))
            if name == "past":
                tokens += sum(len(output.token_ids) - 1 for output in outputs)
                drafted += sum(output.stats.drafted for output in outputs)
                accepted += sum(output.stats.accepted for output in outputs)
        if texts["past"] != texts["plain"]:
            raise SystemExit("expected the tokens of an engine without past outputs, got others")
    plain, past = seconds["plain"], seconds["past"]
    return {
        "case": case,
        "batch": batch,
        "prompts": len(asked[1]),
        "tokens_per_s": tokens / sum(plain),
        "overall": sum(plain) / sum(past),
        "median": statistics.median(b / a for a, b in zip(past, plain, strict=True)),
        "drafted": drafted / tokens,
        "accepted": accepted / max(drafted, 1),
    }


def markdown(result: Figures) -> str:
    lines = [
        [
            row["weights"],
            f"{row['case']} ({row['prompts']})",
            str(row["batch"]),
            f"{row['tokens_per_s']:.0f}",
            f"{row['overall']:.2f}x",
            f"{row['median']:.2f}x",
            f"{row['drafted']:.2f}",
            f"{row['accepted']:.0%}",
        ]
        for row in result["rows"]
    ]
    columns = ["weights", "requests", "batch", "auto, tokens/s", "with past outputs"]
    columns += ["median of batches", "drafted, a token", "of these accepted"]
    about = (
        f"{result['model']}, greedy, at most {result['tokens']} tokens an answer, the same with "
        f"and without; {HISTORY} tokens are kept. Decoding alone, in turns. {result['threads']} "
        f"thread(s), {in_words(result)}. `python -m bench past`"
    )
    return f"{markdown_table(columns, lines, text_columns=2)}\n\n{about}"


REPORTS = (Report("past", {"past": markdown}, {"rows": ("weights", "case", "batch")}),)


def main(words: Sequence[str]) -> None:
    made = parser("past", __doc__, batches=(1, 4), threads=1)
    made.add_argument("--model", type=Path, help="a GGUF file; SmolLM2's where none is given")
    made.add_argument("--weights", nargs="+", default=["file"])
    made.add_argument("--prompts", type=int, default=8, help="of each kind")
    made.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    with smollm2_file(arguments.model) as file:
        result: Figures = {
            "model": file.stem,
            **machine("cpu"),
            "threads": arguments.threads,
            "tokens": arguments.tokens,
        }
        for weights in arguments.weights:
            for case in CASES:
                for batch in arguments.batches:
                    # New ones each time: what an engine wrote for the case before is forgotten.
                    models = {
                        "plain": loaded(file, weights, kv_cache_tokens=16384),
                        "past": loaded(
                            file, weights, kv_cache_tokens=16384, draft_history_tokens=HISTORY
                        ),
                    }
                    found = measure(models, case, batch, arguments)
                    rows.append({"weights": weights, **found})
                    say(rows[-1])
    REPORTS[0].finish({**result, "rows": rows}, arguments)
