"""Perplexity of GGUF files in eecore and llama.cpp, and of weights that eecore quantises itself.

python -m bench quality [--low-bits] [--windows 20] [--threads 1]

Qwen2.5-Coder-0.5B-Instruct's files, for which ``python -m bench coder-files`` downloads 478 MB; on
modules of Python's standard library, which anyone has. Writes bench/results/quality.json and the
table in bench/results, in about half an hour on one core. With ``--low-bits`` instead
SmolLM2-135M-Instruct's Q4_1 file and what llama-quantize makes of it, in formats of 2 to 4 bits:
low_bits.json and its table, in 10 minutes.
"""

from __future__ import annotations

import importlib
import inspect
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.decode.engines import run_llama_cpp
from bench.harness import coder_files, peers
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.processes import EngineError
from bench.harness.results import Figures, Report
from bench.harness.rows import Cell, Row, table_of
from bench.harness.smollm2 import WEIGHTS, smollm2_file
from bench.quality.perplexity import losses_of_output, perplexity, window_losses
from eecore.models import LlamaModel, convert_gguf

REQUANTISED = (
    ("Q4_K_M",),
    ("IQ4_NL",),
    ("IQ4_XS",),
    ("IQ4_NL", "ffn_down=q3_k"),
    ("IQ4_NL", "ffn_down=q2_k"),
    ("IQ4_NL", "attn=mxfp4", "ffn=mxfp4"),
)
"""Formats that SmolLM2's file is requantised to: the file's, then those of some tensors. Q3_K and
Q2_K need rows of a length that 256 divides, of which SmolLM2 has only those of ffn_down."""
MODULES = ("textwrap", "shlex", "heapq", "csv", "configparser")
WINDOW = 512
LLAMA_CPP_TIMEOUT_S = 3600


def text() -> str:
    """The text that is scored: the source of :data:`MODULES`."""
    return "".join(inspect.getsource(importlib.import_module(name)) for name in MODULES)


def our_losses(path: Path, windows: int, **options: Any) -> list[float]:
    """The loss of each window in eecore."""
    model = eecore.load(path, device="cpu", kv_cache_tokens=WINDOW, **options)
    assert model.tokenizer is not None
    assert isinstance(model.network, LlamaModel)
    ids = model.tokenizer.encode(text())[: windows * WINDOW]
    if len(ids) < windows * WINDOW:
        raise ValueError(f"windows: expected up to {len(ids) // WINDOW}, got {windows}")
    places = range(0, len(ids), WINDOW)
    return window_losses(model.network, [ids[at : at + WINDOW] for at in places])


def llama_cpp_losses(file: Path, windows: int, threads: int, scratch: Path) -> list[float]:
    """The loss of each window in llama.cpp, which tokenizes the text itself."""
    read = scratch / "text"
    read.write_text(text())
    command = ["llama-perplexity", "-m", str(file), "-f", str(read), "-c", str(WINDOW)]
    command += ["-b", str(WINDOW), "--chunks", str(windows), "-t", str(threads)]
    losses: list[float] = []
    for _ in range(3):  # its output, written by a thread, is sometimes cut off
        losses = losses_of_output(run_llama_cpp(command, threads, LLAMA_CPP_TIMEOUT_S))
        if len(losses) == windows:
            return losses
    raise EngineError(f"llama-perplexity: expected {windows} windows, got {len(losses)}")


def file_row(file: Path, windows: int, threads: int, scratch: Path) -> Row:
    ours = our_losses(file, windows)
    theirs = llama_cpp_losses(file, windows, threads, scratch)
    row: Row = {"file": file.stem, "bytes": file.stat().st_size, "eecore": perplexity(ours)}
    row["llama.cpp"] = perplexity(theirs)
    row["furthest_window_nats"] = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    say(row)
    return row


def weights_row(name: str, path: Path, windows: int, **options: Any) -> Row:
    row = {"weights": name, "perplexity": perplexity(our_losses(path, windows, **options))}
    say(row)
    return row


def change(value: float, reference: float) -> str:
    return f"{value / reference - 1:+.2%}"


def files_table(result: Figures) -> str:
    """The table of each file's perplexity in eecore and in llama.cpp."""
    columns = [
        ("file", "{file}"),
        ("MB", lambda row: f"{row['bytes'] / 1e6:.0f}"),
        ("eecore", "{eecore:.4f}"),
        ("llama.cpp", lambda row: f"{row['llama.cpp']:.4f}"),
        ("eecore is", lambda row: change(row["eecore"], row["llama.cpp"])),
        ("a window, at most", "{furthest_window_nats:.4f} nats"),
    ]
    return table_of(columns, result["files"])


def weights_table(result: Figures) -> str:
    """The table of one model in several formats, made from its floats."""
    stored = {row["file"].removeprefix(f"{coder_files.NAME}-"): row for row in result["files"]}
    rows = list(result["weights"])
    for kind in ("Q4_1", "Q4_K_M"):
        rows.append({"weights": kind, "perplexity": stored[kind.lower()]["eecore"]})
    found = {row["weights"]: row["perplexity"] for row in rows}

    def to(name: str) -> Cell:
        return lambda row: change(row["perplexity"], found[name])

    columns = [("weights", "{weights}"), ("perplexity", "{perplexity:.4f}")]
    return table_of([*columns, *((f"to {n}", to(n)) for n in ("float32", "Q4_K_M"))], rows)


def text_in_words(result: Figures) -> str:
    return (
        f"Perplexity on the first {result['windows'] * result['window']:,} tokens of Python "
        f"{result['python']}'s {', '.join(result['modules'])}: windows of {result['window']}, the "
        "second half of each scored, as llama-perplexity computes it (with its own tokenizer and "
        "its cache of 16 bits)."
    )


def low_bits_markdown(result: Figures) -> str:
    about = (
        f"{text_in_words(result)} SmolLM2's Q4_1 file and what llama-quantize makes of it, with "
        "other formats in the tensors that a name ends with. Rows of 576 numbers, which are no "
        "blocks of 256, are IQ4_NL where IQ4_XS was asked for, and Q5_0 or Q8_0 in Q4_K_M. "
        f"{in_words(result)}, llama.cpp of {result['llama_cpp']}. "
        "`python -m bench quality --low-bits`"
    )
    return "\n\n".join([files_table(result), about])


def markdown(result: Figures) -> str:
    about = (
        f"{text_in_words(result)} {result['made_from']}. Second table: the same model, in eecore, "
        "in formats made from floats: that file's numbers dequantised to float32, which lie on the "
        "grid of the file's blocks, so that Q4_K_M stores them without loss. Q4_1 takes 5 bits a "
        "number and 8.5 in the head; int4 also takes 6 in the projections of keys and 8.5 in those "
        "of values; Q4_K_M of this model, where 256 divides the length of few rows, takes 5.5 in "
        "most matrices and 4.5 to 8.5 in the rest. States are in float32, or in bfloat16 with "
        f"bfloat16 weights. {in_words(result)}, llama.cpp of {result['llama_cpp']}. "
        "`python -m bench quality`"
    )
    return "\n\n".join([files_table(result), weights_table(result), about])


REPORTS = (
    Report("quality", {"quality": markdown}, {"files": ("file",), "weights": ("weights",)}),
    Report("low_bits", {"low-bits": low_bits_markdown}, {"files": ("file",)}),
)


def measure(windows: int, threads: int, scratch: Path, *, low_bits: bool) -> Figures:
    with smollm2_file() as smollm2:
        if low_bits:
            made = (
                coder_files.quantise(smollm2, *kinds, directory=scratch) for kinds in REQUANTISED
            )
            files = [smollm2, *made]
        else:
            files = coder_files.coder_files("Q4_1")
        file_rows = [file_row(file, windows, threads, scratch) for file in files]
    figures = {
        "python": platform.python_version(),
        **machine(),
        "llama_cpp": peers.LLAMA_CPP,
        "modules": list(MODULES),
        "window": WINDOW,
        "windows": windows,
        "files": file_rows,
    }
    if low_bits:
        return figures
    directory = convert_gguf(coder_files.get_source(), scratch / "float32")
    rows = [weights_row(name, directory, windows, **o) for name, o in WEIGHTS.items()]
    return {**figures, "made_from": coder_files.MADE_FROM, "weights": rows}


def main(words: Sequence[str]) -> None:
    made = parser("quality", __doc__, threads=1)
    made.add_argument("--windows", type=int, default=20, help=f"of {WINDOW} tokens")
    made.add_argument("--low-bits", action="store_true", help="SmolLM2 in 2 to 4 bits")
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        low_bits, threads = arguments.low_bits, arguments.threads
        result = measure(arguments.windows, threads, Path(scratch), low_bits=low_bits)
    REPORTS[low_bits].finish(result, arguments)
