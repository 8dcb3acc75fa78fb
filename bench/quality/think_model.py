"""A model that thinks longer than it needs to: whole thoughts beside thoughts that end early.

The questions are those of bench/quality/chains.py. Full thoughts, thoughts with a budget, and
thoughts that end once their answer stands take turns, alone and several at a time.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import eecore
from bench.harness.command import say
from bench.harness.results import Figures
from bench.harness.rows import Row, table_of
from bench.harness.turns import batches_of
from bench.quality.chains import Chain, chains, stands_after
from eecore.models import Tokenizer

CONTEXT = 1024


def prompts(tokenizer: Tokenizer, asked: Sequence[Chain]) -> list[list[int]]:
    """The questions in the chat template."""
    texts = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": chain.question}], add_generation_prompt=True
        )
        for chain in asked
    )
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


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
        seconds: dict[str, list[float]] = {name: [] for name in modes}
        made: dict[str, list[eecore.Output]] = {}
        for number in range(rounds + 1):
            for name, options in modes.items():
                outputs = made[name] = answers(model, asked, batch, exit=exit, **options)
                if number:
                    seconds[name].append(statistics.mean(o.stats.total_s for o in outputs))
            say(f"{batch} at a time, round {number} of {rounds}")
        full = next(iter(modes))
        for name, outputs in made.items():
            row: Row = {"batch": batch, "mode": name, "seconds": min(seconds[name])}
            ratios = (a / b for a, b in zip(seconds[full], seconds[name], strict=True))
            row["faster"] = statistics.median(ratios)
            row |= thought_figures(model.tokenizer, asked, outputs)
            pairs = zip(outputs, made[full], strict=True)
            row["same"] = sum(own.text == other.text for own, other in pairs) / count
            row["probe_rows"] = statistics.mean(
                getattr(output.stats, "probe_rows", 0) for output in outputs
            )
            ends = Counter(str(getattr(o.stats, "thought_end", None)) for o in outputs)
            row["ends"] = dict(ends)
            rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    """The table of :func:`compare`."""
    columns = [
        ("at a time", "{batch}"),
        ("thoughts", "{mode}"),
        ("right", "{right:.1%}"),
        ("answer of the full thought", "{same:.1%}"),
        ("tokens of a thought", "{thought_tokens:.0f}"),
        ("rows of probes", "{probe_rows:.0f}"),
        ("ms to the answer", lambda row: f"{1e3 * row['seconds']:.0f}"),
        ("faster", "{faster:.2f}x"),
    ]
    return table_of(columns, rows)
