"""The intent model in every exit mode, transformers and economize, on held-out utterances.

python -m bench intents                     the model that ships with eecore
python -m bench intents --model DIRECTORY   another, made by scripts/intents/train_intents.py

One utterance at a time, greedy, up to the model's end token. All modes take turns: each parses one
chunk of utterances, then each the next chunk, and ratios are taken within a chunk, so that a busy
machine slows all modes alike. All engines get token ids. Speed is milliseconds per new token: of
the whole request, prompt included, and of decoding alone, which begins after the step that gave the
first new tokens. Writes bench/results/intents.json and the tables in bench/results.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.harness.ceilings import weights_lie
from bench.harness.command import parser, say
from bench.harness.exits import calibrated_policies
from bench.harness.machine import in_words, machine
from bench.harness.processes import EngineError
from bench.harness.results import Figures, Report
from bench.harness.rows import Columns, table_of, unique
from bench.harness.turns import batches_of
from bench.harness.utterances import DATA, utterances
from bench.intents.modes import Mode, Peers, eecore_modes
from bench.intents.peer_worker import Parse
from eecore.models import model_digest

WARM_UP = 3  # utterances
Measure = Callable[[Iterable[Parse]], float]


# Measuring


def measure(
    modes: list[Mode], prompts: list[list[int]], rounds: int, chunk_size: int
) -> dict[str, str]:
    """Every mode on every chunk, in turns; returns the reason for each mode that was left out."""
    left_out: dict[str, str] = {}

    def all_take_turns(chunk: list[list[int]]) -> None:
        for mode in list(modes):
            try:
                mode.chunks.append(mode.decode(chunk))
            except EngineError as error:
                modes.remove(mode)
                left_out[mode.name] = str(error)
                say(f"{mode.name} is left out: {error}")

    all_take_turns(prompts[:WARM_UP])
    for mode in modes:
        mode.chunks.clear()
    chunks = batches_of(prompts, chunk_size)
    for number in range(rounds):
        for position, chunk in enumerate(chunks):
            began = time.perf_counter()
            all_take_turns(chunk)
            took = time.perf_counter() - began
            say(f"round {number + 1}, chunk {position + 1} of {len(chunks)}: {took:.0f} s")
    return left_out


def broken_promises(modes: Sequence[Mode]) -> list[str]:
    """A message for each self-speculation that did not give the tokens of full depth."""
    found = []
    for mode in modes:
        reference = full_depth(mode, modes)
        if mode.group.endswith("speculative") and same_tokens(mode, reference) != 1:
            found.append(f"{mode.name}: expected the tokens of Full(), got different ones")
    return found


# Figures


def ms_per_token(parses: Iterable[Parse]) -> float:
    """Milliseconds over new tokens, summed over all parses; NaN without tokens."""
    made = list(parses)
    tokens = sum(len(p.tokens) for p in made)
    return 1e3 * sum(p.seconds for p in made) / tokens if tokens else math.nan


def decode_ms_per_token(parses: Iterable[Parse]) -> float:
    """Milliseconds after the first step over the tokens after it; NaN if there are none."""
    made = list(parses)
    tokens = sum(len(p.tokens) - p.first_tokens for p in made)
    seconds = sum(p.seconds - p.first_seconds for p in made)
    return 1e3 * seconds / tokens if tokens else math.nan


def speed_up(mode: Mode, other: Mode | None, measure: Measure) -> float | None:
    """Speed-up over another mode, the median over chunks."""
    if other is None:
        return None
    pairs = zip(mode.chunks, other.chunks, strict=True)
    ratios = [measure(theirs) / measure(own) for own, theirs in pairs]
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    return statistics.median(known) if known else None


def full_depth(mode: Mode, modes: Sequence[Mode]) -> Mode | None:
    """The reference of a mode: eecore's Full() with equal weights, or transformers' generate."""
    group = "int8 full" if mode.group.startswith("int8") else "full"
    if mode.group in ("transformers", "assisted", "economize", "calm"):
        group = "transformers"
    return next((other for other in modes if other.group == group), None)


def same_tokens(mode: Mode, other: Mode | None) -> float | None:
    """The share of utterances for which two modes gave the same tokens."""
    if other is None:
        return None
    pairs = list(zip(mode.parses, other.parses, strict=True))
    return sum(one.tokens == two.tokens for one, two in pairs) / len(pairs)


def figures(mode: Mode, modes: Sequence[Mode]) -> dict[str, Any]:
    """Speeds and shares of one mode, compared with full depth and each peer's fastest mode."""

    def fastest(*groups: str) -> Mode | None:
        found = (other for other in modes if other.group in groups)
        return min(found, key=lambda mode: ms_per_token(mode.parses), default=None)

    compared = {
        "full": full_depth(mode, modes),
        "transformers": fastest("transformers", "assisted"),
        "economize": fastest("economize"),
    }
    parses = mode.parses
    tokens = sum(len(parse.tokens) for parse in parses)
    drafted = sum(parse.drafted for parse in parses)
    depths = [parse.depth for parse in parses if parse.depth is not None]
    alone = next((other for other in modes if other.group == "transformers"), None)
    found: dict[str, Any] = {
        "acceptance": sum(parse.accepted for parse in parses) / drafted if drafted else None,
        "mean_exit_layer": sum(depths) / tokens if depths and tokens else None,
        "tokens": tokens,
        "same_as_full": same_tokens(mode, modes[0]),
        "same_as_transformers": same_tokens(mode, alone),
    }
    measures: dict[str, Measure] = {"": ms_per_token, "decode_": decode_ms_per_token}
    for prefix, measure in measures.items():
        ms = measure(parses)
        found[f"{prefix}ms_per_token"] = None if math.isnan(ms) else ms
        for name, other in compared.items():
            found[f"{prefix}speed_to_{name}"] = speed_up(mode, other, measure)
    return found


# The tables

SPEEDS: Columns = (
    ("ms/token", "{ms_per_token:.2f}"),
    ("to own full depth", "{speed_to_full:.2f}x"),
    ("to transformers' best", "{speed_to_transformers:.2f}x"),
)
ABOUT = (
    "- decoding: after the step that gave the first new tokens; the other columns include the "
    "prompt\n"
    "- own full depth: `Full()` for eecore's modes, transformers' `generate` for the peers"
)
SHORT_GROUPS = (
    *("full", "speculative", "confident", "int8 full", "int8 speculative"),
    *("transformers", "assisted", "economize"),
)
SHORT_LEAD = (
    "On a model trained for early exit, which parses utterances to a smart home "
    "(`scripts/intents/`); the fastest mode of each kind:"
)


def full(result: Figures) -> str:
    """The table of every mode, with the conditions of the measurement."""
    columns: Columns = (
        ("mode", "{name}"),
        ("exact match", "{exact_match:.1%}"),
        ("drafts accepted", "{acceptance:.1%}"),
        ("mean exit layer", "{mean_exit_layer:.1f}"),
        SPEEDS[0],
        ("decoding", "{decode_ms_per_token:.2f}"),
        SPEEDS[1],
        ("decoding", "{decode_speed_to_full:.2f}x"),
        SPEEDS[2],
        ("decoding", "{decode_speed_to_transformers:.2f}x"),
        ("tokens of `Full()`", "{same_as_full:.1%}"),
    )
    rows = result["modes"]
    notes = [ABOUT]
    notes += [
        f"- {row['name']}: tokens of transformers' `generate` on {row['same_as_transformers']:.1%} "
        "of the utterances"
        for row in rows
        if row["group"] in ("assisted", "economize") and row["same_as_transformers"] < 1
    ]
    notes += [
        f"- {row['name']} is {row['speed_to_economize']:.2f}x as fast as economize's "
        f"fastest drafts, {row['decode_speed_to_economize']:.2f}x in decoding"
        for row in rows
        if row["group"] == "speculative" and row["speed_to_economize"] is not None
    ]
    notes += [f"- {kind}: {contract}" for kind, contract in result["contracts"].items()]
    notes += [f"- left out: {name}: {reason}" for name, reason in result["left_out"].items()]
    return "\n\n".join([table_of(columns, rows), "\n".join(notes), about(result)])


def short(result: Figures) -> str:
    """Full depth and the fastest mode of each kind, of eecore and of the peers."""
    rows = [row for row in result["modes"] if row["group"] in SHORT_GROUPS]
    chosen = [
        min((row for row in rows if row["group"] == group), key=lambda row: row["ms_per_token"])
        for group in unique(rows, "group")
    ]
    columns: Columns = (("mode", "{name}"), ("exact match", "{exact_match:.1%}"), *SPEEDS)
    command = f"`python -m bench intents --count {result['utterances']}`"
    return f"{SHORT_LEAD}\n\n{table_of(columns, chosen)}\n\n{command}"


def about(result: Figures) -> str:
    """A sentence on the measurement and the machine."""
    versions = {} if result["peers"] is None else result["peers"]["versions"]
    named = "".join(f", {name} {version}" for name, version in versions.items() if version)
    count = result["utterances"]
    return (
        f"{count} held-out utterances of {result['prompt_tokens'] / count:.1f} tokens one after "
        f"the other, {result['modes'][0]['tokens'] / count / result['rounds']:.1f} greedy tokens "
        f"each, float32 but where int8 is said, {result['threads']} thread(s). Speed-ups: medians "
        f"of {result['rounds']} round(s) of chunks of {result['chunk']}, in turns. Model "
        f"{result['model_sha256'][:12]}, {result['num_layers']} layers. {result['weights']} "
        f"{in_words(result)}{named}. `python -m bench intents --count {count}`"
    )


REPORTS = (
    Report(
        "intents",
        {"intents in short": short, "intents": full},
        {"modes": ("name",)},
        ("weights", "peers", "left_out"),
    ),
)


# The command


def run(arguments: argparse.Namespace) -> tuple[Figures, list[str]]:
    """All figures, and the messages of :func:`broken_promises`."""
    directory = arguments.model or eecore.default_model()
    options: dict[str, Any] = {"device": "cpu", "prefix_cache": False, "kv_cache_tokens": 1024}
    model = eecore.load(directory, dtype="float32", **options)
    tokenizer, num_layers = model.tokenizer, model.config.num_layers
    assert tokenizer is not None
    records = utterances(arguments.count, arguments.data)
    prompts = [tokenizer.encode(record["input"]) for record in records]
    calibrated = calibrated_policies(directory)
    modes = eecore_modes(model, calibrated)
    modes += eecore_modes(eecore.load(directory, weights="int8", **options), {}, int8=True)
    left_out: dict[str, str] = {}
    beside = None
    if not arguments.skip_peers:
        beside = Peers.start(directory, arguments.threads, left_out)
    if beside is not None:
        modes += beside.modes(num_layers, calibrated["softmax"].threshold)
    try:
        left_out |= measure(modes, prompts, arguments.rounds, arguments.chunk)
    finally:
        if beside is not None:
            beside.process.close()
    targets = [record["target"] for record in records] * arguments.rounds
    rows = []
    for mode in modes:
        texts = [tokenizer.decode(parse.tokens) for parse in mode.parses]
        exact = sum(a == b for a, b in zip(texts, targets, strict=True)) / len(targets)
        row = {"name": mode.name, "group": mode.group, "exact_match": exact}
        rows.append({**row, **figures(mode, modes)})
    result = {
        **machine(),
        "threads": arguments.threads,
        "peers": None if beside is None else {"versions": beside.versions},
        "left_out": left_out,
        "model_sha256": model_digest(directory),
        "num_layers": num_layers,
        "weights": weights_lie(model.config.num_parameters * model.network.dtype.itemsize),
        "utterances": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "rounds": arguments.rounds,
        "chunk": arguments.chunk,
        "contracts": {measure: policy.contract for measure, policy in calibrated.items()},
        "modes": rows,
    }
    return result, broken_promises(modes)


def main(words: Sequence[str]) -> None:
    made = parser("intents", __doc__, rounds=1, threads=1)
    made.add_argument("--model", type=Path, help="a directory; default: the model of eecore")
    made.add_argument("--data", type=Path, default=DATA, help="created if it is missing")
    made.add_argument("--count", type=int, default=1000, help="utterances")
    made.add_argument("--chunk", type=int, default=50, help="utterances a turn")
    made.add_argument("--skip-peers", action="store_true", help="eecore alone")
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    try:
        result, broken = run(arguments)
    except eecore.EecoreError as error:
        raise SystemExit(str(error)) from None
    if broken:
        print(REPORTS[0].text(result))
        raise SystemExit("\n".join(broken))
    REPORTS[0].finish(result, arguments)
