"""Drafts of eecore and of its peers on one model and the same prompts: tokens/s, in one run.

python -m bench draft-peers [--prompts 8] [--tokens 96] [--threads 1]

SmolLM2-135M-Instruct in float32, one prompt at a time, compared with transformers and economize;
and its Q4_1 file, compared with llama.cpp at full depth. Only decoding is timed, prompt by prompt
in turns. Writes bench/results/draft-peers.json and the table in bench/results.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.decode.engines import LlamaCpp
from bench.decode.one_by_one import (
    START_TIMEOUT_S,
    Decode,
    eecore_decode,
    peer_decode,
    peer_process,
)
from bench.decode.parses import Parse, PeerMode
from bench.harness import peers
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.processes import EngineError, Process
from bench.harness.prompts import KINDS, prompts_of
from bench.harness.results import Figures, Report
from bench.harness.smollm2 import LONGEST_PROMPT, chat, get_smollm2, loaded, smollm2_file
from bench.harness.turns import rotated
from eecore.exits import Auto, Exit, Full, HeadDrafts, PromptLookup
from eecore.lab.evaluation.tables import markdown_table

EARLY_EXIT = 6  # the exit layer of drafts, of 30 layers
DRAFTS = 5  # the maximum draft length
THRESHOLD = 0.6  # the confidence below which drafting stops
OURS: dict[str, Exit] = {
    "Full()": Full(),
    "PromptLookup()": PromptLookup(),
    "HeadDrafts()": HeadDrafts(),
    "Auto()": Auto(),
}
THEIRS = (
    PeerMode("full"),
    PeerMode("lookup", 0, DRAFTS),
    PeerMode("economize", EARLY_EXIT, DRAFTS, THRESHOLD),
    PeerMode("hybrid", EARLY_EXIT, DRAFTS, THRESHOLD),
)
OneDecode = Callable[[list[int]], Parse]


class Row:
    """Figures of one way to decode, by kind of prompts."""

    def __init__(self, weights: str, engine: str, decode: OneDecode) -> None:
        self.weights, self.engine, self.decode = weights, engine, decode
        self.tokens = dict.fromkeys(KINDS, 0)
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.same = self.answers = 0
        self.failed = ""

    def take(self, kind: str, prompt: list[int], expected: list[int] | None) -> list[int]:
        """Decode one prompt and record its time; returns the tokens."""
        parse = self.decode(prompt)
        self.tokens[kind] += len(parse.tokens) - parse.first_tokens
        self.seconds[kind] += parse.seconds - parse.first_seconds
        self.answers += 1
        self.same += expected is None or parse.tokens == expected
        return parse.tokens

    def figures(self) -> dict[str, Any]:
        by_kind = {kind: self.tokens[kind] / self.seconds[kind] for kind in KINDS}
        return {
            "weights": self.weights,
            "engine": self.engine,
            "tokens_per_s": by_kind,
            "overall": sum(self.tokens.values()) / sum(self.seconds.values()),
            "same_as_full": self.same / self.answers,
        }


def warm_up(rows: Sequence[Row], prompts: dict[str, list[list[int]]]) -> None:
    """Decode once by every row, untimed."""
    for row in rows:
        with contextlib.suppress(EngineError):  # the timed run reports it
            row.decode(prompts[KINDS[0]][0])


def take_turns(rows: Sequence[Row], prompts: dict[str, list[list[int]]]) -> list[Row]:
    """Decode every prompt by every row, in turns; rows that fail are left out, with the reason."""
    first, *others = rows
    for kind in KINDS:
        for turn, prompt in enumerate(prompts[kind]):
            expected = first.take(kind, prompt, None)
            for row in rotated(others, turn):
                if row.failed:
                    continue
                try:
                    row.take(kind, prompt, expected)
                except EngineError as error:
                    row.failed = str(error)
                    say(f"{row.engine}: {error}")
    return [row for row in rows if not row.failed]


def one(decode: Decode) -> OneDecode:
    return lambda prompt: decode([prompt])[0]


def our_rows(weights: str, model: eecore.Model, max_tokens: int) -> list[Row]:
    return [
        Row(weights, f"eecore `{name}`", one(eecore_decode(model, exit, max_tokens)))
        for name, exit in OURS.items()
    ]


def their_rows(process: Process, max_tokens: int) -> list[Row]:
    return [
        Row("float32", mode.name, one(peer_decode(process, mode, max_tokens))) for mode in THEIRS
    ]


def encoded(model: eecore.Model, count: int) -> dict[str, list[list[int]]]:
    prompts = {kind: [chat(model, text) for text in prompts_of(kind, count)] for kind in KINDS}
    return {kind: [p for p in its if len(p) <= LONGEST_PROMPT] for kind, its in prompts.items()}


def measure_floats(file: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows in float32: of eecore, of transformers and of economize."""
    there = peers.prepare(["transformers", "economize"])
    with tempfile.TemporaryDirectory() as scratch:
        directory = get_smollm2(Path(scratch) / "model", file)
        model = eecore.load(
            directory, device="cpu", dtype="float32", kv_cache_tokens=4096, prefix_cache=False
        )
        rows, process = our_rows("float32", model, arguments.tokens), None
        try:
            if all(there[name].available for name in ("transformers", "economize")):
                process = peer_process(directory, "float32", arguments.threads)
                process.answer(START_TIMEOUT_S)
                rows += their_rows(process, arguments.tokens)
            prompts = encoded(model, arguments.prompts)
            warm_up(rows, prompts)
            done = take_turns(rows, prompts)
        finally:
            if process is not None:
                process.close()
    return [row.figures() for row in done]


def measure_file(file: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows on the Q4_1 file: of eecore, and of llama.cpp at full depth on any text."""
    model = loaded(file, kv_cache_tokens=4096)
    theirs = None
    if peers.prepare(["llama.cpp"])["llama.cpp"].available:
        theirs = LlamaCpp("file", arguments.threads, file)
        theirs.wait_until_loaded()
    rows = our_rows("file", model, arguments.tokens)
    prompts = encoded(model, arguments.prompts)
    warm_up(rows, prompts)
    speeds: list[float] = []
    for turn in range(arguments.prompts):
        its = {kind: prompts[kind][turn : turn + 1] for kind in KINDS}
        take_turns(rows, its)
        if theirs is not None:
            speeds.append(arguments.tokens / theirs.seconds(1, arguments.tokens))
    figures = [row.figures() for row in rows]
    if speeds:
        speed = statistics.median_high(speeds)
        figures.append(
            {
                "weights": "file",
                "engine": "llama.cpp, full depth",
                "tokens_per_s": dict.fromkeys(KINDS, speed),
                "overall": speed,
                "same_as_full": None,
            }
        )
    return figures


def markdown(result: Figures) -> str:
    lines = []
    for row in result["rows"]:
        by_kind = [f"{row['tokens_per_s'][kind]:.0f}" for kind in KINDS]
        same = "" if row["same_as_full"] is None else f"{row['same_as_full']:.0%}"
        lines.append([row["weights"], row["engine"], *by_kind, f"{row['overall']:.0f}", same])
    head = ["weights", "tokens/s of", *KINDS, "overall", "answers of `Full()`"]
    about = (
        f"{result['model']}, batch 1, {result['prompts']} prompts of each kind, greedy, at most "
        f"{result['tokens']} tokens an answer. Only decoding is timed, prompt by prompt in turns. "
        "In brackets after economize's drafts: the exit layer, the maximum draft length, and the "
        f"confidence below which drafting stops. {result['threads']} thread(s), "
        f"{in_words(result)}, {result['peers']}. `python -m bench draft-peers`"
    )
    return f"{markdown_table(head, lines, text_columns=2)}\n\n{about}"


REPORTS = (Report("draft-peers", {"draft-peers": markdown}, {"rows": ("weights", "engine")}),)


def main(words: Sequence[str]) -> None:
    made = parser("draft-peers", __doc__, threads=1)
    made.add_argument("--prompts", type=int, default=8, help="of each kind")
    made.add_argument("--tokens", type=int, default=96, help="tokens of an answer, at most")
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    with smollm2_file() as file:
        rows = measure_file(file, arguments) + measure_floats(file, arguments)
    theirs = (peers.TRANSFORMERS, peers.ECONOMIZE)
    result = {
        "model": file.stem,
        **machine(),
        "prompts": arguments.prompts,
        "tokens": arguments.tokens,
        "threads": arguments.threads,
        "peers": ", ".join(
            [*(peer.replace("==", " ") for peer in theirs), f"llama.cpp of {peers.LLAMA_CPP}"]
        ),
        "rows": rows,
    }
    REPORTS[0].finish(result, arguments)
