"""The same GGUF files in eecore and llama.cpp, unconverted: tokens/s of batches, in turns.

python -m bench gguf [FILE.gguf ...] [--threads 1 2] [--batches 1 8 32] [--coder]

Default: SmolLM2-135M-Instruct's file (Q4_1), as scripts/get_smollm2.py finds or downloads it.
--coder adds Qwen2.5-Coder-0.5B-Instruct's files (Q4_0, Q4_K_M, Q8_0), which python -m bench
coder-files makes from a download of 478 MB. Writes bench/results/gguf.json and the table in
bench/results.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.decode.engines import Engine, LlamaCpp, Worker, seconds_in_turns
from bench.harness import coder_files, peers
from bench.harness.command import parser
from bench.harness.machine import in_words, machine
from bench.harness.processes import EngineError
from bench.harness.results import Figures, Report
from bench.harness.rows import Row, table_of
from bench.harness.smollm2 import smollm2_file
from bench.harness.turns import median_ratio


def rows_of(
    file: Path, threads: int, batches: Sequence[int], tokens: int, rounds: int
) -> list[Row]:
    """tokens/s of the best rounds, and the median over rounds of eecore's speed-up."""
    engines: list[Engine] = [Worker("eecore", "file", threads, file.resolve())]
    if peers.prepare(["llama.cpp"])["llama.cpp"].available:
        engines.append(LlamaCpp("file", threads, file))
    # Fewer tokens suffice if a batch has several sequences.
    lengths = {batch: tokens if batch == 1 else max(tokens // 2, 1) for batch in batches}
    try:
        for engine in engines:
            engine.wait_until_loaded()
            for batch in batches:
                engine.seconds(batch, 8)
        times = seconds_in_turns(engines, lengths, rounds, lambda: None)
    except EngineError as error:
        raise SystemExit(f"{file.name}: {error}") from None
    finally:
        for engine in engines:
            engine.close()
    rows = []
    for batch, length in lengths.items():
        ours, theirs = times["eecore", "file", batch], times.get(("llama.cpp", "file", batch))
        row: Row = {"file": file.stem, "threads": threads, "batch": batch}
        row["tokens_per_s"] = round(batch * length / min(ours), 1)
        row["llama_cpp_tokens_per_s"] = theirs and round(batch * length / min(theirs), 1)
        row["ratio"] = theirs and round(median_ratio(ours, theirs), 2)
        rows.append(row)
    return rows


def markdown(result: Figures) -> str:
    columns = [
        ("file", "{file}"),
        ("threads", "{threads}"),
        ("batch", "{batch}"),
        ("eecore", "{tokens_per_s:.1f}"),
        ("llama.cpp", "{llama_cpp_tokens_per_s:.1f}"),
        ("eecore is", "{ratio:.2f}x"),
    ]
    made_from = f"{result['made_from']}. " if result["made_from"] else ""
    about = (
        "tokens/s of all sequences together after a prompt of one token, the best of "
        f"{result['rounds']} rounds in turns; ratios are medians over rounds. {in_words(result)}, "
        f"llama.cpp of {result['llama_cpp']}. {made_from}"
        f"`python -m bench gguf{' --coder' if made_from else ''}`"
    )
    return f"{table_of(columns, result['rows'])}\n\n{about}"


REPORTS = (Report("gguf", {"gguf": markdown}, {"rows": ("file", "threads", "batch")}),)


def main(words: Sequence[str]) -> None:
    made = parser("gguf", __doc__, batches=(1, 8, 32), rounds=5)
    made.add_argument("files", nargs="*", type=Path)
    made.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    made.add_argument("--tokens", type=int, default=64)
    made.add_argument("--coder", action="store_true", help="also the files of the 0.5B coder")
    arguments = made.parse_args(words)
    given = (arguments.batches, arguments.tokens, arguments.rounds)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        files = list(arguments.files) or [stack.enter_context(smollm2_file())]
        try:
            files += coder_files.coder_files() if arguments.coder else []
        except (peers.Unavailable, RuntimeError) as error:
            raise SystemExit(f"gguf: {error}") from None
        for file in files:
            for threads in arguments.threads:
                rows += rows_of(file, threads, *given)
    result = {
        **machine(),
        "llama_cpp": peers.LLAMA_CPP,
        "rounds": arguments.rounds,
        "tokens": arguments.tokens,
        "made_from": coder_files.MADE_FROM if arguments.coder else None,
        "rows": rows,
    }
    REPORTS[0].finish(result, arguments)
