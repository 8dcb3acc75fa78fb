"""The intent model in every exit mode, transformers and economize, on held-out utterances.

python -m bench intents                     the model that ships with eecore
python -m bench intents --model DIRECTORY   another, made by scripts/intents/train_intents.py

One utterance at a time, greedy, up to the model's end token. All modes take turns: each parses one
chunk of utterances, then each the next chunk, and ratios are taken within a chunk, so that a busy
machine slows all modes alike. All engines get token ids. Writes bench/results/intents.json and the
tables in bench/results.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.harness.ceilings import weights_lie
from bench.harness.command import parser, say
from bench.harness.exits import calibrated_policies
from bench.harness.machine import machine
from bench.harness.processes import EngineError
from bench.harness.results import Figures, Report
from bench.harness.turns import batches_of
from bench.harness.utterances import DATA, utterances
from bench.intents.figures import Mode, figures, full_depth, reuse
from bench.intents.modes import (
    DTYPES,
    default_exits,
    default_speculations,
    eecore_modes,
    speculation,
    start_peers,
)
from bench.intents.tables import full, short
from eecore.models import model_digest

WARM_UP = 3  # utterances
REPORTS = (
    Report(
        "intents",
        {"intents in short": short, "intents": full},
        {"modes": ("name",), "reuse": ("name",)},
        ("weights", "peers.ms_per_token_tried", "left_out"),
    ),
)


# Measuring


def measure(
    modes: list[Mode], prompts: list[list[int]], rounds: int, chunk_size: int
) -> dict[str, str]:
    """Every mode on every chunk, in turns; returns the reason for each mode that was left out."""
    left_out: dict[str, str] = {}
    chunks = batches_of(prompts, chunk_size)
    for mode in list(modes):
        take_turn(mode, modes, prompts[:WARM_UP], left_out)
        mode.chunks.clear()
    for number in range(rounds):
        for position, chunk in enumerate(chunks):
            began = time.perf_counter()
            for mode in list(modes):
                take_turn(mode, modes, chunk, left_out)
            say(
                f"round {number + 1} of {rounds}, chunk {position + 1} of {len(chunks)}: "
                f"{time.perf_counter() - began:.0f} s"
            )
    return left_out


def take_turn(
    mode: Mode, modes: list[Mode], prompts: list[list[int]], left_out: dict[str, str]
) -> None:
    """Run one mode on one chunk; a mode that fails is left out from then on."""
    try:
        mode.chunks.append(mode.decode(prompts))
    except EngineError as error:
        modes.remove(mode)
        left_out[mode.name] = str(error)
        say(f"{mode.name} is left out: {error}")


def broken_promises(modes: Sequence[Mode]) -> list[str]:
    """A message for each self-speculation that did not give the tokens of full depth."""
    found = []
    for mode in modes:
        if not mode.group.endswith(("speculative", "without reuse")):
            continue
        reference = full_depth(mode, modes)
        assert reference is not None
        full = [parse.tokens for chunk in reference.chunks for parse in chunk]
        own = [parse.tokens for chunk in mode.chunks for parse in chunk]
        differing = [i for i, pair in enumerate(zip(own, full, strict=True)) if pair[0] != pair[1]]
        if differing:
            i = differing[0]
            found.append(
                f"{mode.name}: expected the tokens of Full(), got different ones for "
                f"{len(differing)} of {len(full)} parses, the first {own[i]} instead of {full[i]}"
            )
    return found


# The command


def run(arguments: argparse.Namespace) -> tuple[Figures, list[str]]:
    """All figures, and the messages of :func:`broken_promises`."""
    directory = arguments.model or eecore.default_model()
    calibrated = {} if arguments.skip_calibrated else calibrated_policies(directory)
    model = eecore.load(
        directory, device="cpu", prefix_cache=False, dtype=arguments.dtype, kv_cache_tokens=1024
    )
    records = utterances(arguments.count, arguments.data)
    tokenizer, num_layers = model.tokenizer, model.config.num_layers
    assert tokenizer is not None
    prompts = [tokenizer.encode(record["input"]) for record in records]
    speculations = list(dict.fromkeys(arguments.speculate or default_speculations(num_layers)))
    exit_layers = sorted(set(arguments.fixed or default_exits(num_layers)))
    modes = eecore_modes(model, exit_layers, speculations, calibrated)
    int8 = eecore.load(
        directory, device="cpu", prefix_cache=False, weights="int8", kv_cache_tokens=1024
    )
    modes += eecore_modes(int8, (), speculations, {})
    left_out: dict[str, str] = {}
    beside = None
    if not arguments.skip_peers:
        beside = start_peers(directory, prompts, speculations, arguments.threads, left_out)
    if beside is not None:
        threshold = calibrated["softmax"].threshold if calibrated else 0.9
        modes += beside.modes(speculations, threshold)
    try:
        left_out |= measure(modes, prompts, arguments.rounds, arguments.chunk)
    finally:
        if beside is not None:
            beside.process.close()
    result = {
        **machine(),
        "threads": arguments.threads,
        "peers": None
        if beside is None
        else {
            "versions": beside.versions,
            "dtype": beside.dtype,
            "ms_per_token_tried": beside.ms_per_token_tried,
        },
        "left_out": left_out,
        "model_sha256": model_digest(directory),
        "num_layers": num_layers,
        "weights": weights_lie(model.config.num_parameters * model.network.dtype.itemsize),
        "dtype": str(model.network.dtype).removeprefix("torch."),
        "utterances": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "rounds": arguments.rounds,
        "chunk": arguments.chunk,
        "contracts": {measure: policy.contract for measure, policy in calibrated.items()},
    }
    decoded = {
        mode.name: [tokenizer.decode(parse.tokens) for chunk in mode.chunks for parse in chunk]
        for mode in modes
    }
    targets = [record["target"] for record in records] * arguments.rounds
    result["modes"] = [
        {
            "name": mode.name,
            "group": mode.group,
            "exact_match": share_of_equals(decoded[mode.name], targets),
            **figures(mode, modes),
        }
        for mode in modes
    ]
    result["reuse"] = reuse(modes)
    return result, broken_promises(modes)


def share_of_equals(these: Sequence[Any], those: Sequence[Any]) -> float:
    return sum(a == b for a, b in zip(these, those, strict=True)) / len(those)


def main(words: Sequence[str]) -> None:
    made = parser("intents", __doc__, rounds=1, threads=1)
    made.add_argument("--model", type=Path, help="a directory; default: the model of eecore")
    made.add_argument("--data", type=Path, default=DATA, help="created if it is missing")
    made.add_argument("--count", type=int, default=1000, help="utterances")
    made.add_argument("--chunk", type=int, default=50, help="utterances a turn")
    made.add_argument("--dtype", choices=DTYPES, default="float32", help="of eecore's modes")
    made.add_argument("--fixed", type=int, nargs="+", metavar="E", help="depths of FixedExit")
    made.add_argument(
        "--speculate", type=speculation, nargs="+", metavar="E,D[,THRESHOLD]", help="pairs to try"
    )
    made.add_argument("--skip-calibrated", action="store_true", help="no calibrated exits")
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
