"""Drafts of eecore, and those of others, on one model and the same prompts: tokens/s, in one run.

python bench/bench_draft_peers.py [--prompts 8] [--tokens 96] [--threads 1]

SmolLM2-135M-Instruct in float32, one prompt at a time, beside transformers and economize; and its
Q4_1 file beside llama.cpp at full depth. Decoding alone, in turns, prompt by prompt. Writes
bench/results/draft-peers.json and the table in bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import eecore
from eecore.exits import Auto, Exit, Full, HeadDrafts, PromptLookup

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts")]

import peers  # noqa: E402
from bench_drafts import LONGEST_PROMPT, chat  # noqa: E402
from decode_engines import EngineError, LlamaCpp, Process  # noqa: E402
from draft_prompts import KINDS, prompts_of  # noqa: E402
from get_smollm2 import check, download, find_installed, get_smollm2  # noqa: E402
from harness import cpu_name, insert  # noqa: E402
from intent_modes import SCRIPT, START_TIMEOUT_S, eecore_decode, peer_decode  # noqa: E402
from intent_peers import Parse, PeerMode  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "draft-peers.json"
NAME = "draft-peers"
EARLY_EXIT = 6  # of 30 layers
DRAFTS, THRESHOLD = 5, 0.6  # where early exits draft, no further than they are sure
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
    """What one way to decode took, by kind of prompts."""

    def __init__(self, weights: str, engine: str, decode: OneDecode) -> None:
        self.weights, self.engine, self.decode = weights, engine, decode
        self.tokens = dict.fromkeys(KINDS, 0)
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.same = self.answers = 0
        self.failed = ""

    def take(self, kind: str, prompt: list[int], expected: list[int] | None) -> list[int]:
        """One turn; returns the tokens."""
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
    """Nobody's first run counts."""
    for row in rows:
        with contextlib.suppress(EngineError):  # which says so when it counts
            row.decode(prompts[KINDS[0]][0])


def take_turns(rows: Sequence[Row], prompts: dict[str, list[list[int]]]) -> list[Row]:
    """Every prompt by every row, in turns; those that could not are left out, and say why."""
    first = rows[0]
    for kind in KINDS:
        for turn, prompt in enumerate(prompts[kind]):
            expected = first.take(kind, prompt, None)
            others = list(rows[1:])
            for row in others[turn % len(others) :] + others[: turn % len(others)]:
                if row.failed:
                    continue
                try:
                    row.take(kind, prompt, expected)
                except EngineError as error:
                    row.failed = str(error)
                    print(f"{row.engine}: {error}", file=sys.stderr)
    return [row for row in rows if not row.failed]


def our_rows(weights: str, model: eecore.Model, max_tokens: int) -> list[Row]:
    def decode_of(policy: Exit) -> OneDecode:
        decode = eecore_decode(model, policy, max_tokens)
        return lambda prompt: decode([prompt])[0]

    return [Row(weights, f"eecore `{name}`", decode_of(exit)) for name, exit in OURS.items()]


def their_rows(process: Process, max_tokens: int) -> list[Row]:
    def decode_of(mode: PeerMode) -> OneDecode:
        decode = peer_decode(process, mode, max_tokens)
        return lambda prompt: decode([prompt])[0]

    return [Row("float32", mode.name, decode_of(mode)) for mode in THEIRS]


def encoded(model: eecore.Model, count: int) -> dict[str, list[list[int]]]:
    prompts = {kind: [chat(model, text) for text in prompts_of(kind, count)] for kind in KINDS}
    return {kind: [p for p in its if len(p) <= LONGEST_PROMPT] for kind, its in prompts.items()}


def measure_floats(file: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Ours, and those of transformers and economize."""
    there = peers.prepare(["transformers", "economize"])
    with tempfile.TemporaryDirectory() as scratch:
        directory = get_smollm2(Path(scratch) / "model", file)
        model = eecore.load(directory, device="cpu", dtype="float32", kv_cache_tokens=4096)
        rows, process = our_rows("float32", model, arguments.tokens), None
        try:
            if all(there[name].available for name in ("transformers", "economize")):
                command = [peers.python_of("python"), SCRIPT, directory, "float32"]
                process = Process([*command, str(arguments.threads)], arguments.threads)
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
    """Ours, and llama.cpp at full depth, which takes as long for any text."""
    model = eecore.load(file, device="cpu", kv_cache_tokens=4096)
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
        speed = sorted(speeds)[len(speeds) // 2]
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


def markdown(result: dict[str, Any]) -> str:
    lines = [
        f"| weights | tokens/s of | {' | '.join(KINDS)} | overall | answers of `Full()` |",
        f"|---|---|{'---:|' * len(KINDS)}---:|---:|",
    ]
    for row in result["rows"]:
        by_kind = " | ".join(f"{row['tokens_per_s'][kind]:.0f}" for kind in KINDS)
        same = "" if row["same_as_full"] is None else f"{row['same_as_full']:.0%}"
        lines.append(
            f"| {row['weights']} | {row['engine']} | {by_kind} | {row['overall']:.0f} | {same} |"
        )
    lines += [
        "",
        f"{result['model']}, batch 1, {result['prompts']} prompts of each kind, greedy, at most "
        f"{result['tokens']} tokens an answer. Decoding alone, prompt by prompt in turns. Of "
        "economize's drafts in brackets the exit layer, most of them a round, and the confidence "
        f"below which there are no more. {result['threads']} thread(s), "
        f"{result['cpu']}, {result['cpu_capability']} kernels, torch {result['torch']}, "
        f"{peers.TRANSFORMERS.replace('==', ' ')}, {peers.ECONOMIZE.replace('==', ' ')}, llama.cpp "
        f"of {peers.LLAMA_CPP}. `python bench/bench_draft_peers.py`",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8, help="of each kind")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true", help="print the table, write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        file = find_installed() or download(Path(scratch))
        check(file)
        rows = measure_file(file, arguments) + measure_floats(file, arguments)
        model = file.stem
    result = {
        "model": model,
        "cpu": cpu_name(),
        "cpu_capability": eecore.build_info()["cpu_capability"],
        "torch": torch.__version__,
        "prompts": arguments.prompts,
        "tokens": arguments.tokens,
        "threads": arguments.threads,
        "rows": rows,
    }
    table = markdown(result)
    print(table)
    if not arguments.dry_run:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        insert(ROOT / "bench" / "RESULTS.md", NAME, table)


if __name__ == "__main__":
    main()
