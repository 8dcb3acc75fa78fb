"""The one table of README.md: every row and ratio of one run, on one thread.

python -m bench overview           SmolLM2's file, a random Llama of 1B parameters, the own model
python -m bench overview --rounds 3

Full depth beside llama.cpp (both after a prompt of one token, which leaves the time of decoding)
and, for the model that ships, beside transformers (prompts included); drafts and exits beside full
depth, on real text. All that a ratio compares takes turns. Writes bench/results/overview.json and
the table of README.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from bench.decode import gguf
from bench.decode.random_files import make_random_gguf
from bench.exits import drafts
from bench.harness import peers
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.rows import Row, table_of
from bench.harness.smollm2 import LONGEST_PROMPT, loaded, smollm2_file
from bench.integrations import transformers as beside
from eecore.exits import Auto, Full

CHAT, RANDOM = "SmolLM2-135M-Instruct, Q4_1 file", "Llama-3.2-1B's shape, random, Q4_K_M file"
TRAINED = "intent, trained to exit, float32"
PROMPTS = 8  # of each kind
ANSWER_TOKENS = 96


def beside_llama_cpp(
    model: str, file: Path, batches: Sequence[int], tokens: int, rounds: int
) -> list[Row]:
    """Full depth, and the ratio to llama.cpp on the same file."""
    return [
        {"model": model, "batch": row["batch"], "full": row["tokens_per_s"], "peer": row["ratio"]}
        for row in gguf.rows_of(file, 1, batches, tokens, rounds)
    ]


def drafts_gain(file: Path, batch: int, rounds: int) -> float:
    """The speed-up of ``Auto`` on chat, summaries, code and rewriting, in equal parts."""
    model = loaded(file, kv_cache_tokens=32 * (LONGEST_PROMPT + ANSWER_TOKENS))
    by_kind = drafts.asked(model, 2 * PROMPTS).values()
    prompts = [ids for e in zip(*(its[:PROMPTS] for its in by_kind), strict=False) for ids in e]
    some = prompts if batch > 1 else prompts[:PROMPTS]
    modes = {"full": Full(), "auto": Auto()}
    turns = rounds if batch == 1 else -(-rounds // drafts.TURN_FACTOR)
    full, auto = drafts.measure(model, some, batch, ANSWER_TOKENS, turns, modes)
    return auto.speedup(full)


def trained(batches: Sequence[int], rounds: int) -> list[Row]:
    """The model that ships: full depth beside transformers, drafts and exits beside full depth."""
    model, prompts, pad = beside.prepared(max(64, max(batches)))
    rows = []
    for batch in batches:
        groups = beside.groups_of(prompts, batch, pad)
        found = {row["mode"]: row for row in beside.measure(model, groups, batch, rounds, pad)}
        full, auto, exits = (
            found[f"eecore, {mode}"] for mode in ("full", "auto", "calibrated softmax")
        )
        rows.append(
            {
                "model": TRAINED,
                "batch": batch,
                "full": full["tokens_per_s"],
                "peer": full["speedup"],
                "drafts": auto["speedup"] / full["speedup"],
                "exits": exits["speedup"] / full["speedup"],
            }
        )
    return rows


def markdown(result: Figures) -> str:
    columns = [
        ("model", "{model}"),
        ("batch", "{batch}"),
        ("full depth, tokens/s", "{full:.0f}"),
        ("drafts", "{drafts:.2f}x"),
        ("exits", "{exits:.2f}x"),
        ("full depth / peer", "{peer:.2f}x"),
    ]
    about = (
        "One run, one thread; what a ratio compares takes turns: drafts (`auto`, which keeps the "
        "text) and exits (a calibrated threshold, which may change it) with full depth, full depth "
        f"with the peer: llama.cpp ({result['llama_cpp']}) on the same file, transformers "
        f"{result['transformers']} for intent, prompts included. SmolLM2 was not trained to exit; "
        "its drafts are for chat, summaries, code and rewriting in equal parts; random weights "
        f"have nothing to draft. {in_words(result)}. `python -m bench overview`"
    )
    return f"{table_of(columns, result['rows'])}\n\n{about}"


REPORTS = (Report("overview", {"results": markdown}),)


def main(words: Sequence[str]) -> None:
    arguments = parser("overview", __doc__, batches=(1, 8, 32), rounds=5).parse_args(words)
    batches, rounds = arguments.batches, arguments.rounds
    torch.set_num_threads(1)
    with smollm2_file() as file:
        rows = beside_llama_cpp(CHAT, file, batches, 64, rounds)
        for row in rows:
            row["drafts"] = drafts_gain(file, row["batch"], rounds)
            say(row)
    with tempfile.TemporaryDirectory() as scratch:
        file = make_random_gguf(Path(scratch) / "llama-1b.Q4_K_M.gguf")
        rows += beside_llama_cpp(RANDOM, file, batches, 32, rounds)
    rows += trained(batches, rounds)
    result = {
        **machine(),
        "llama_cpp": peers.LLAMA_CPP,
        "transformers": version("transformers"),
        "rounds": rounds,
        "rows": rows,
    }
    REPORTS[0].finish(result, arguments)
