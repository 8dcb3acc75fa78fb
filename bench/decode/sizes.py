"""Random models of real sizes beside llama.cpp: loading, memory, decoding, prompts, verification.

python -m bench sizes                              every model, in 40 minutes
python -m bench sizes --models Llama-3.2-1B        one of them

Each file is made once, in a temporary folder, and read by both engines: up to 5 GB of disk and 14
GB of memory. Both generate the same number of tokens, after a prompt of one token, or read the same
number. A round of verification gives eecore seven drafts, so that its pass has eight rows. Writes
bench/results/sizes.json and the tables in bench/results/sizes.md.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import torch

import eecore
from bench.decode.engines import PAUSE_S, LlamaCpp, Worker
from bench.decode.random_files import (
    LFM2_350M,
    LLAMA_1B,
    LLAMA_8B,
    QWEN35_08B,
    make_random_gguf,
)
from bench.harness import peers
from bench.harness.ceilings import ceilings
from bench.harness.command import parser, say
from bench.harness.decoding import Decoding
from bench.harness.machine import in_words, machine
from bench.harness.processes import peak_bytes
from bench.harness.results import Figures, Report
from bench.harness.rows import Row, table_of
from bench.harness.turns import TimedCall, median_ratio, seconds_of, timed
from eecore.planning.ngrams import NgramIndex

FORMATS = {"Q4_K_M": "Q4_K", "int8": "Q8_0"}
DRAFTS = 7
STEPS = 6  # timed steps of a verification
PROMPT = 512  # tokens


@dataclass(frozen=True)
class Size:
    """The sizes of a model, and how much of it is run."""

    config: dict[str, Any]
    weights: tuple[str, ...] = tuple(FORMATS)
    tokens: int = 32  # by each sequence


MODELS = {
    "LFM2-350M": Size(LFM2_350M),
    "Qwen3.5-0.8B": Size(QWEN35_08B),
    "Llama-3.2-1B": Size(LLAMA_1B, tokens=16),
    "Llama-3.1-8B": Size(LLAMA_8B, ("Q4_K_M",), tokens=4),
}


@dataclass(frozen=True)
class Work:
    """The bytes that a step reads, and the weights that it and a prompt multiply for a token."""

    num_bytes: int
    of_step: int
    of_prompt: int

    @classmethod
    def of(cls, file: Path) -> Work:
        """The work of a file's model; a prompt multiplies the head for its last token alone."""
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
        embeddings = tensors.pop("token_embd.weight")
        head = tensors.pop("output.weight", embeddings)
        layers = sum(int(tensor.n_elements) for tensor in tensors.values())
        num_bytes = sum(int(tensor.n_bytes) for tensor in tensors.values())
        return cls(num_bytes + int(head.n_bytes), layers + int(head.n_elements), layers)


def verification(model: eecore.Model, rounds: int) -> float:
    """The time of a pass that verifies seven drafts, in steps of one row."""
    prompt = [[[3, 4, 5]]]
    full = Decoding(model, prompt, eecore.Full(), STEPS)
    drafting = Decoding(model, prompt, eecore.PromptLookup(DRAFTS), STEPS)

    def drafts(_: NgramIndex, most: int, *__: Any, **___: Any) -> tuple[list[int], int]:
        return [3] * most, 1

    for _ in range(rounds + 1):
        full.round()
        with mock.patch.object(NgramIndex, "propose", drafts):
            drafting.round()
    return drafting.step_ms / full.step_ms


def loading(file: Path, threads: int, rounds: int) -> Row:
    """Seconds of loading, and the time of a verification in steps."""
    torch.set_num_threads(threads)
    load = partial(eecore.load, file, device="cpu", prefix_cache=False, kv_cache_tokens=256)
    loaded = timed(load)
    return {"load_s": loaded.seconds, "verification": verification(loaded.made, rounds)}


def runs_of(
    worker: Worker, peer: LlamaCpp | None, batches: Sequence[int], tokens: int
) -> dict[tuple[str, str], Callable[[], TimedCall]]:
    """The runs of each engine, by engine and name, and a measurement of the machine's ceilings."""

    def rested(seconds: Callable[[], float]) -> TimedCall:
        time.sleep(PAUSE_S)
        return TimedCall(seconds(), None)

    prompt = torch.randint(5, 30000, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    runs: dict[tuple[str, str], Callable[[], float]] = {}
    for batch in batches:
        for engine in [worker, peer] if peer else [worker]:
            runs[engine.engine, f"batch {batch}"] = partial(engine.seconds, batch, tokens)
    runs["eecore", "prompt"] = lambda: worker.generate([prompt], 1)[0]
    if peer:
        runs["llama.cpp", "prompt"] = partial(peer.prompt_seconds, PROMPT, True)
    turns = {name: partial(rested, run) for name, run in runs.items()}
    return turns | {("machine", "ceilings"): lambda: TimedCall(0.0, ceilings())}


def speeds(
    file: Path, threads: int, has_peer: bool, batches: Sequence[int], tokens: int, rounds: int
) -> tuple[list[Row], Row]:
    """A row for each batch size and one for prompts; and what the processes took up to their first
    token: seconds from their start, and the peak of their memory."""
    work, peer, start = Work.of(file), None, Row()
    if has_peer:
        peer = LlamaCpp("file", threads, file)
        start["peer_first_s"], start["peer_bytes"] = peer.first_token()
    began = time.perf_counter()
    worker = Worker("eecore", "file", threads, file)
    try:
        worker.wait_until_loaded()
        worker.seconds(1, 1)
        start["first_s"] = time.perf_counter() - began
        start["bytes"] = peak_bytes(worker.process.process.pid)
        for batch in batches:  # warm-up; llama.cpp's runs are processes of their own
            worker.seconds(batch, 2)
        runs = runs_of(worker, peer, batches, tokens)
        turns: dict[tuple[str, str], list[TimedCall]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                turns[name].append(run())
    finally:
        worker.close()
    found = [turn.made for turn in turns["machine", "ceilings"]]
    peaks = {name: max(own[name] for own in found) for name in found[0]}
    rows = []
    for what in [*(f"batch {batch}" for batch in batches), "prompt"]:
        ours = seconds_of(turns["eecore", what])
        count = PROMPT if what == "prompt" else tokens * int(what.split()[1])
        row: Row = {"what": what, "tokens_per_s": count / min(ours)}
        multiplied = 2 * count * (work.of_prompt if what == "prompt" else work.of_step)
        row["of_int8"] = multiplied / min(ours) / peaks["int8_multiply"]
        if what != "prompt":
            row["of_memory"] = work.num_bytes * tokens / min(ours) / peaks["dram_read"]
        if peer:
            theirs = seconds_of(turns["llama.cpp", what])
            row |= {"peer": count / min(theirs), "ratio": median_ratio(ours, theirs)}
        rows.append(row)
    return rows, start


def measured(name: str, weights: str, arguments: Any, has_peer: bool) -> dict[str, list[Row]]:
    """The rows of one file on every number of threads."""
    size, found = MODELS[name], {"rows": list[Row](), "loading": list[Row]()}
    with tempfile.TemporaryDirectory() as scratch:
        file = make_random_gguf(Path(scratch) / "random.gguf", size.config, FORMATS[weights])
        for threads in arguments.threads:
            case = {"model": name, "weights": weights, "threads": threads}
            loaded = loading(file, threads, arguments.rounds)
            gc.collect()  # an engine refers to itself; its model makes room for the other processes
            rest = (arguments.batches, arguments.tokens or size.tokens, arguments.rounds)
            rows, start = speeds(file, threads, has_peer, *rest)
            own = {**case, "file_bytes": file.stat().st_size, **start, **loaded}
            found["loading"].append(own)
            found["rows"] += [{**case, **row} for row in rows]
            say([found["loading"][-1], *rows])
    return found


def speed_table(result: Figures) -> str:
    columns = [
        ("random weights of the sizes of", "{model}"),
        ("weights", "{weights}"),
        ("threads", "{threads}"),
        ("what", "{what}"),
        ("eecore, tokens/s", "{tokens_per_s:.1f}"),
        ("llama.cpp", "{peer:.1f}"),
        ("eecore is", "{ratio:.2f}x"),
        ("of what memory gives", "{of_memory:.0%}"),
        ("of the int8 peak", "{of_int8:.0%}"),
    ]
    about = (
        f"All sequences together, the best of {result['rounds']} rounds in turns; ratios are "
        f"medians over rounds. A prompt has {PROMPT} tokens, llama.cpp reads it with flash "
        "attention. Memory and the peak of int8 products are measured in the same run, on as many "
        f"threads. {in_words(result)}, llama.cpp of {result['llama_cpp']}. `python -m bench sizes`"
    )
    return f"{table_of(columns, result['rows'], text_columns=2)}\n\n{about}"


def loading_table(result: Figures) -> str:
    def gigabytes(name: str) -> Callable[[Row], str]:
        return lambda row: f"{row[name] / 1e9:.2f}" if name in row else ""

    columns = [
        ("random weights of the sizes of", "{model}"),
        ("weights", "{weights}"),
        ("threads", "{threads}"),
        ("file, GB", gigabytes("file_bytes")),
        ("memory, GB", gigabytes("bytes")),
        ("llama.cpp", gigabytes("peer_bytes")),
        ("loaded in, s", "{load_s:.1f}"),
        ("first token, s", "{first_s:.1f}"),
        ("llama.cpp", "{peer_first_s:.1f}"),
        ("8 rows of a verification take", "{verification:.2f} steps"),
    ]
    about = (
        "Memory is the peak of resident memory, first token the time from the start of a process "
        "that loads the file and makes one token; eecore's includes Python and torch."
    )
    return f"{table_of(columns, result['loading'], text_columns=2)}\n\n{about}"


CASE = ("model", "weights", "threads")
REPORTS = (
    Report(
        "sizes",
        {"sizes": speed_table, "sizes loaded": loading_table},
        {"rows": (*CASE, "what"), "loading": CASE},
    ),
)


def main(words: Sequence[str]) -> None:
    made = parser("sizes", __doc__, batches=(1, 8, 32), rounds=2)
    made.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N")
    made.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    made.add_argument("--weights", nargs="+", choices=FORMATS, default=list(FORMATS))
    made.add_argument("--tokens", type=int, help="of each sequence, in place of the model's own")
    arguments = made.parse_args(words)
    has_peer = peers.prepare(["llama.cpp"])["llama.cpp"].available
    result = {**machine(), "llama_cpp": peers.LLAMA_CPP, "rounds": arguments.rounds}
    result |= {"rows": [], "loading": []}
    for name in arguments.models:
        for weights in MODELS[name].weights:
            if weights in arguments.weights:
                for kind, rows in measured(name, weights, arguments, has_peer).items():
                    result[kind] += rows
    REPORTS[0].finish(result, arguments)
