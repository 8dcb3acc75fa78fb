"""Full depth in several engines, batch by batch in turns: eecore here, peers in their processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import eecore
from bench.decode.engines import CONVERTED, Worker, convert_once
from bench.harness import peers
from bench.harness.command import say
from bench.harness.processes import EngineError
from bench.harness.turns import batches_of

WORKER = "bench.calm.worker"
PEERS = ("transformers", "ctranslate2")

Prompts = Sequence[list[int]]


@dataclass
class TimedBatch:
    """The tokens that an engine generated for one batch, and the seconds that it took."""

    seconds: float
    tokens: list[list[int]]

    @property
    def per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


@dataclass
class Engine:
    """One row of the table."""

    name: str
    generate: Callable[[Prompts], TimedBatch]
    rounds: list[list[TimedBatch]] = field(default_factory=list)
    """The batches of each round."""


def own_engine(model: eecore.Model, max_tokens: int) -> Engine:
    def generate(prompts: Prompts) -> TimedBatch:
        started = time.perf_counter()
        outputs = eecore.generate(model, list(prompts), exit="full", max_tokens=max_tokens)
        return TimedBatch(time.perf_counter() - started, [output.token_ids for output in outputs])

    return Engine("eecore", generate)


def peer_engine(worker: Worker, max_tokens: int) -> Engine:
    def generate(prompts: Prompts) -> TimedBatch:
        return TimedBatch(*worker.generate(list(prompts), max_tokens))

    return Engine(worker.engine, generate)


def start_workers(
    directory: Path, model_sha256: str, threads: int, left_out: dict[str, str]
) -> tuple[list[Worker], dict[str, str]]:
    """The workers of the available peers, in float32, and their versions by name.

    ``left_out`` gets the reason for each peer that is not available.
    """
    workers: list[Worker] = []
    versions: dict[str, str] = {}
    for name, peer in peers.prepare(list(PEERS)).items():
        if name not in PEERS:
            continue
        if not peer.available:
            left_out[name] = peer.reason
            continue
        place = directory
        if name == "ctranslate2":
            place = CONVERTED / f"{directory.name}-{model_sha256[:12]}" / name
            convert_once(name, directory, place)
        worker = Worker(name, "f32", threads, place, WORKER)
        try:
            versions[name] = worker.wait_until_loaded()
            workers.append(worker)
        except EngineError as error:
            left_out[name] = str(error)
    return workers, versions


def measure(
    engines: list[Engine],
    prompts: Prompts,
    batch_size: int,
    rounds: int,
    left_out: dict[str, str],
) -> None:
    """All engines on every batch, in turns, after a warm-up; an engine that fails is left out."""
    batches = batches_of(prompts, batch_size)

    def turns(batch: Prompts) -> None:
        for engine in list(engines):
            try:
                turn = engine.generate(batch)
            except EngineError as error:
                engines.remove(engine)
                left_out[engine.name] = str(error)
                continue
            if engine.rounds:
                engine.rounds[-1].append(turn)

    for engine in engines:
        engine.rounds = []
    turns(batches[0])
    for number in range(rounds):
        for engine in engines:
            engine.rounds.append([])
        for batch in batches:
            turns(batch)
        for engine in engines:
            say(
                f"batches of {batch_size}, round {number + 1}: {engine.name}: "
                f"{tokens_per_s(engine.rounds[-1]):.1f} tokens/s"
            )


def tokens_per_s(turns: Sequence[TimedBatch]) -> float:
    """Throughput over batches that ran one after the other."""
    tokens = sum(len(row) for turn in turns for row in turn.tokens)
    return tokens / sum(turn.seconds for turn in turns)


def figures(engine: Engine, own: Engine, batch_size: int) -> dict[str, Any]:
    """tokens/s of the best round, and eecore's speed-up over the engine: median over batches."""
    pairs = [
        (theirs, ours)
        for round_, own_round in zip(engine.rounds, own.rounds, strict=True)
        for theirs, ours in zip(round_, own_round, strict=True)
    ]
    rows = [
        mine == its
        for turn, own_turn in zip(engine.rounds[0], own.rounds[0], strict=True)
        for mine, its in zip(turn.tokens, own_turn.tokens, strict=True)
    ]
    return {
        "engine": engine.name,
        "batch_size": batch_size,
        "tokens": sum(len(row) for turn in engine.rounds[0] for row in turn.tokens),
        "tokens_per_s_best": max(map(tokens_per_s, engine.rounds)),
        "tokens_per_s": [round(tokens_per_s(round_), 2) for round_ in engine.rounds],
        "eecore_is": statistics.median(ours.per_s / theirs.per_s for theirs, ours in pairs),
        "same_tokens": statistics.fmean(rows),
    }
