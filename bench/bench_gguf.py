"""The same GGUF files in eecore and llama.cpp, as they are: tokens/s of batches, in turns.

python bench/bench_gguf.py [FILE.gguf ...] [--threads 1 2] [--batches 1 8 32] [--coder]

Without files SmolLM2-135M-Instruct's (Q4_1), as scripts/get_smollm2.py finds or downloads it;
--coder adds Qwen2.5-Coder-0.5B-Instruct's (Q4_0, Q4_K_M, Q8_0), as coder_files.py makes them of a
download of 478 MB. Writes the table in bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import eecore

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import coder_files  # noqa: E402
import harness  # noqa: E402
import peers  # noqa: E402
from decode_engines import Engine, EngineError, LlamaCpp, Worker  # noqa: E402
from get_smollm2 import download, find_installed  # noqa: E402

PAUSE_S = 0.3


def tokens_of(tokens: int, batch: int) -> int:
    """Of each sequence: fewer are enough where there are several."""
    return tokens if batch == 1 else max(tokens // 2, 1)


def measure(
    file: Path, threads: int, batches: list[int], tokens: int, rounds: int
) -> dict[tuple[str, int], list[float]]:
    """Seconds of every round by engine and batch."""
    times: dict[tuple[str, int], list[float]] = {}
    engines: list[Engine] = [Worker("eecore", "file", threads, file)]
    if peers.prepare(["llama.cpp"])["llama.cpp"].available:
        engines.append(LlamaCpp("file", threads, file))
    try:
        for engine in engines:
            engine.wait_until_loaded()
            for batch in batches:
                engine.seconds(batch, 8)
        for _ in range(rounds):
            for batch in batches:
                for engine in engines:
                    time.sleep(PAUSE_S)
                    seconds = engine.seconds(batch, tokens_of(tokens, batch))
                    times.setdefault((engine.engine, batch), []).append(seconds)
    except EngineError as error:
        print(f"{file.name}: {error}", file=sys.stderr)
    finally:
        for engine in engines:
            engine.close()
    return times


def rows_of(
    file: Path, threads: int, tokens: int, times: dict[tuple[str, int], list[float]]
) -> list[str]:
    """Lines of the table: best rounds, and the median of eecore's rounds over those beside them."""
    rows = []
    for batch in sorted({batch for _, batch in times}):
        ours = times[("eecore", batch)]
        theirs = times.get(("llama.cpp", batch))
        count = batch * tokens_of(tokens, batch)
        row = f"| {file.stem} | {threads} | {batch} | {count / min(ours):.1f} |"
        if theirs is None:
            rows.append(f"{row} | |")
            continue
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=False))
        rows.append(f"{row} {count / min(theirs):.1f} | {ratio:.2f}x |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--coder", action="store_true", help="the 0.5B coder's files too")
    parser.add_argument("--dry-run", action="store_true", help="print the table, write nothing")
    arguments = parser.parse_args()
    lines = ["| file | threads | batch | eecore | llama.cpp | eecore is |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as scratch:
        files = arguments.files or [find_installed() or download(Path(scratch))]
        try:
            files += coder_files.coder_files() if arguments.coder else []
        except (peers.Unavailable, RuntimeError) as error:
            parser.exit(1, f"bench_gguf: {error}\n")
        for file in files:
            for threads in arguments.threads:
                times = measure(
                    file, threads, arguments.batches, arguments.tokens, arguments.rounds
                )
                lines += rows_of(file, threads, arguments.tokens, times)
    about = (
        "tokens/s of all sequences together after a prompt of one token, the best of "
        f"{arguments.rounds} rounds in turns; ratios are medians over rounds. "
        f"{harness.cpu_name()}, {eecore.build_info()['cpu_capability']} kernels, "
        f"llama.cpp of {peers.LLAMA_CPP}. "
        f"{f'{coder_files.MADE_FROM}. ' if arguments.coder else ''}"
        f"`python bench/bench_gguf.py{' --coder' if arguments.coder else ''}`"
    )
    text = "\n".join(["", *lines, "", about, ""])
    print(text)
    if not arguments.dry_run:
        harness.insert(ROOT / "bench" / "RESULTS.md", "gguf", text)


if __name__ == "__main__":
    main()
