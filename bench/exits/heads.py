"""What drafts of heads cost: heads of random numbers, in shares of a token of full depth.

python -m bench heads                                a random model of SmolLM2-135M's sizes
python -m bench heads --weights int8 float32 --batches 1 4 8
python -m bench heads --model DIRECTORY              another one, Llama's or Qwen's

A head of noise is never right: each round gives one token, as a step of full depth does. Its time
beyond that step's is what the drafts take, and with "verified" what their verification takes too.
All take turns; a share is the median of those of the turns. Nothing is kept: figures go to where
--json says, and to the terminal.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.harness.command import parser, say
from bench.harness.machine import machine
from bench.harness.outputs import decoding_seconds
from bench.harness.turns import Turn, median_ratio, take_turns
from eecore.exits import Exit, Full, HeadDrafts
from eecore.lab.evaluation.tables import markdown_table
from eecore.models import LlamaModel, load_draft_head
from tests.block_heads import write_block_head
from tests.head_packs import write_pack
from tests.tiny_models import random_prompts, write_model

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
LAYERS, BLOCK = 5, 8
"""Layers of a head that drafts a block, and its tokens."""
HEADS = ("recurrent", "DFlash", "DSpark")
"""eecore's own kind, one draft a step, and those that draft a block."""


def write_head(directory: Path, kind: str, model: eecore.Model) -> Path:
    """A head of random numbers with the usual sizes for a model."""
    config = model.config
    if kind == "recurrent":
        sizes: dict[str, Any] = {"inner": config.intermediate_size, "vocabulary_size": 8192}
        taps = config.num_layers // 3, 2 * config.num_layers // 3
        return write_pack(directory, model, taps=taps, **sizes)
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_layers,
        "block_size": BLOCK - (kind == "DSpark"),
    }
    if kind == "DFlash":
        return write_block_head(directory, "z-lab", **sizes)
    return write_block_head(directory, "DeepSpec", **sizes, markov_rank=256)


def measure(
    model: eecore.Model, prompts: list[list[int]], tokens: int, rounds: int
) -> dict[str, float]:
    """Shares of a token of full depth beyond it, by what is done in a round."""
    modes: dict[str, Exit] = {
        "full": Full(),
        "drafted": HeadDrafts(BLOCK, 1.0),
        "verified": HeadDrafts(BLOCK, 0.0),
    }

    def run(exit: Exit) -> Turn:
        outputs = eecore.generate(model, prompts, exit=exit, max_tokens=tokens, ignore_eos=True)
        made = max(len(output.token_ids) - 1 - output.stats.accepted for output in outputs)
        return Turn(decoding_seconds(outputs) / made, None)

    turns = take_turns({name: lambda exit=exit: run(exit) for name, exit in modes.items()}, rounds)
    seconds = {name: [turn.seconds for turn in its] for name, its in turns.items()}
    full = seconds.pop("full")
    return {name: median_ratio(full, its) - 1.0 for name, its in seconds.items()}


def rows_of(
    directory: Path, weights: str, batches: Sequence[int], tokens: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """All kinds of heads in all batches, with one kind of weights."""
    settings: dict[str, Any] = {} if weights == "float32" else {"weights": weights}
    for kind in HEADS:
        model = eecore.load(
            directory, device="cpu", dtype="float32", exits=False, kv_cache_tokens=8192, **settings
        )
        assert isinstance(model.network, LlamaModel)
        with tempfile.TemporaryDirectory() as scratch:
            head = write_head(Path(scratch), kind, model)
            model.network.draft_head = load_draft_head(head, model.network)
            for batch in batches:
                prompts = random_prompts(*(32,) * batch, vocab_size=model.config.vocab_size)
                shares = measure(model, prompts, tokens, rounds)
                yield {"weights": weights, "head": kind, "batch": batch, **shares}


def main(words: Sequence[str]) -> None:
    made = parser("heads", __doc__, batches=(1, 4, 8), rounds=5, threads=1)
    made.add_argument("--model", type=Path, help="a directory; random numbers where none is given")
    made.add_argument("--weights", nargs="+", default=["int4", "float32"])
    made.add_argument("--tokens", type=int, default=32, help="of an answer")
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.model or write_model(Path(scratch), tokenizer=False, **SMOLLM2)
        for weights in arguments.weights:
            given = arguments.batches, arguments.tokens, arguments.rounds
            for row in rows_of(directory, weights, *given):
                rows.append(row)
                say(row)
    columns = ["weights", "head", "batch", "drafts made", "drafts made and verified"]
    lines = [
        [r["weights"], r["head"], str(r["batch"]), f"{r['drafted']:.2f}", f"{r['verified']:.2f}"]
        for r in rows
    ]
    print(markdown_table(columns, lines, text_columns=2))
    if arguments.json is not None:
        content = {**machine("cpu"), "threads": arguments.threads, "rows": rows}
        arguments.json.write_text(json.dumps(content, indent=1))
