"""A model that thinks longer than it needs to: whole thoughts beside thoughts that end early.

The questions are those of bench/quality/chains.py. Full thoughts, thoughts with a budget, and
thoughts that end once their answer stands take turns, alone and several at a time.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.harness.command import say
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.rows import Columns, Row, table_of
from bench.harness.turns import TimedCall, batches_of, median_ratio, seconds_of, take_turns
from bench.quality.chains import Chain, chains, stands_after
from eecore.calibration.procedure import parts_of
from eecore.calibration_file import ThoughtCalibration
from eecore.models import Tokenizer

KV_CACHE_TOKENS = 16384
CONTEXT = 1024
IN_THOUGHTS = eecore.ConfidentExit(0.9, part="thought")


def prompts(tokenizer: Tokenizer, asked: Sequence[Chain]) -> list[list[int]]:
    """The questions in the chat template."""
    return [tokenizer.encode_chat([{"role": "user", "content": chain.question}]) for chain in asked]


def answers(
    model: eecore.Model, asked: Sequence[Chain], batch: int, **options: Any
) -> list[eecore.Output]:
    """The outputs for questions, so many at a time."""
    assert model.tokenizer is not None
    given = batches_of(prompts(model.tokenizer, asked), batch)
    room = CONTEXT - max(len(prompt) for each in given for prompt in each)
    return [
        output
        for each in given
        for output in eecore.generate(model, each, **{"max_tokens": room, **options})
    ]


def is_right(output: eecore.Output, chain: Chain) -> bool:
    """Whether the text after the thought is the answer."""
    return output.text.strip() == chain.reply


def thought_figures(
    tokenizer: Tokenizer, asked: Sequence[Chain], outputs: Sequence[eecore.Output]
) -> Figures:
    """Exact match, tokens of the thoughts, and where in them the right answer first stands."""
    shares, changed = [], 0
    for chain, output in zip(asked, outputs, strict=True):
        thought = output.thought or ""
        first = thought.partition("\n\n")[0] + "\n\n"
        changed += stands_after(first, chain.answer) is None and is_right(output, chain)
        if (kept := stands_after(thought, chain.answer)) is not None:
            shares.append(len(tokenizer.encode(kept)) / len(tokenizer.encode(thought)))
    tokens = [output.stats.thought_tokens for output in outputs]
    right = sum(map(is_right, outputs, asked))
    return {
        "right": right / len(outputs),
        "thought_tokens": statistics.mean(tokens),
        "stands_after": statistics.mean(shares) if shares else None,
        "corrected": changed / len(outputs),
    }


def compare(
    model: eecore.Model,
    modes: Mapping[str, Mapping[str, Any]],
    *,
    count: int,
    batches: Sequence[int],
    rounds: int,
    exit: str = "full",
) -> list[Row]:
    """A row for each number of questions at a time and each mode.

    Args:
        modes: options of :func:`eecore.generate` by name; the first one is that of full thoughts,
            which the other modes are compared with.
        count: questions of the test split.
        rounds: in which all modes take turns, after one of warm-up.
        exit: the exit policy.
    """
    assert model.tokenizer is not None
    asked, rows = list(islice(chains(0, "test"), count)), list[Row]()
    for batch in batches:
        turns = take_turns(
            {
                name: partial(_turn, model, asked, batch, **{"exit": exit, **options})
                for name, options in modes.items()
            },
            rounds,
        )
        full, *_ = turns.values()
        for name, own in turns.items():
            outputs = own[-1].made
            row: Row = {"batch": batch, "thoughts": name, "seconds": min(seconds_of(own))}
            row["faster"] = median_ratio(seconds_of(own), seconds_of(full))
            row |= thought_figures(model.tokenizer, asked, outputs)
            pairs = zip(outputs, full[-1].made, strict=True)
            row["same"] = sum(one.text == other.text for one, other in pairs) / count
            stats = [output.stats for output in outputs]
            row["probe_rows"] = statistics.mean(each.probe_rows for each in stats)
            rows.append(row)
            say(row)
    return rows


def _turn(model: eecore.Model, asked: Sequence[Chain], batch: int, **options: Any) -> TimedCall:
    """The outputs for questions, and the mean seconds from a question to its whole answer."""
    outputs = answers(model, asked, batch, **options)
    return TimedCall(statistics.mean(output.stats.total_s for output in outputs), outputs)


def measure(directory: Path, arguments: argparse.Namespace) -> Figures:
    """The figures of a model whose thoughts are calibrated."""
    torch.set_num_threads(arguments.threads)
    found = ThoughtCalibration.beside(directory)
    model = eecore.load(directory, dtype=found.dtype, kv_cache_tokens=KV_CACHE_TOKENS)
    tokenizer, source = parts_of(model)
    stop = found.stop_for(source, tokenizer.sha256)
    asked = list(islice(chains(0, "test"), arguments.count))
    full = thought_figures(tokenizer, asked, answers(model, asked, max(arguments.batches)))
    modes: dict[str, dict[str, Any]] = {
        "full": {},
        f"at most {full['thought_tokens']:.0f} tokens": {
            "thinking_budget": round(full["thought_tokens"])
        },
        "probed, none ends early": {"think": replace(stop, threshold=math.inf)},
        "calibrated": {"think": stop},
        "exits in the thought": {"exit": IN_THOUGHTS},
        "calibrated, exits in the thought": {"think": stop, "exit": IN_THOUGHTS},
        "full, auto": {"exit": "auto"},
        "calibrated, auto": {"think": stop, "exit": "auto"},
    }
    rows = compare(
        model,
        modes,
        count=arguments.count,
        batches=arguments.batches,
        rounds=arguments.rounds,
    )
    return {
        "model": directory.name,
        **machine(),
        "threads": arguments.threads,
        "dtype": found.dtype,
        "count": arguments.count,
        "promise": found.promise,
        "stands_after": full["stands_after"],
        "corrected": full["corrected"],
        "rows": rows,
    }


def markdown(result: Figures) -> str:
    """The table of a model's thoughts."""
    columns: Columns = [
        ("thoughts", "{thoughts}"),
        ("at a time", "{batch}"),
        ("right", "{right:.1%}"),
        ("answer of the full thought", "{same:.1%}"),
        ("tokens of a thought", "{thought_tokens:.0f}"),
        ("rows of probes", "{probe_rows:.0f}"),
        ("ms to the answer", lambda row: f"{1e3 * row['seconds']:.0f}"),
        ("faster than full", "{faster:.2f}x"),
    ]
    about = (
        f"{result['model']}, {result['count']} questions of its test split, greedy, full depth but "
        f"for exits and auto, {result['dtype']}, {in_words(result)}, {result['threads']} "
        "thread(s). In a full thought the right answer stands after "
        f"{result['stands_after']:.0%} of its tokens; {result['corrected']:.0%} of the right "
        f"answers are found by a check. {result['promise']}. "
        "`python -m bench think --model bench/models/thinker`"
    )
    return f"{table_of(columns, result['rows'])}\n\n{about}"


REPORT = Report("think_model", {"think model": markdown}, {"rows": ("batch", "thoughts")})
