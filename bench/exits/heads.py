"""The cost of a head's draft as a share of a token at full depth, by rows that draft together.

python -m bench heads                        SmolLM2-135M-Instruct's Q4_1 file
python -m bench heads --model FILE.gguf --weights file float32 --batches 1 4 8

Heads have random weights and the usual sizes of their kind; their tokens do not matter. Timed are a
step of the head with the choice of its token (or a block of drafts with the choice of all of its
tokens), the keys and values that the head writes for each position, and a pass of all layers with
the LM head: all in turns, the fastest of each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.exits.drafts import PUBLISHED, give_noise
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, write_json
from bench.harness.smollm2 import loaded, smollm2_file
from bench.harness.turns import rotated
from eecore.lab.evaluation.tables import markdown_table
from eecore.models import (
    AttentionBatch,
    BlockHead,
    KeyedHead,
    KVCache,
    LlamaModel,
    Positions,
    SeenKeys,
    allocate_cache,
)

KINDS = ("own", *PUBLISHED)
TEXT = 512
"""Length of each row's text in tokens."""


def calls(model: eecore.Model, rows: int) -> dict[str, Callable[[], Any]]:
    """Calls with so many rows: a pass of full depth, a step of the head, the head's keys."""
    network = model.network
    assert isinstance(network, LlamaModel)
    head = network.draft_head
    assert head is not None
    kv = allocate_cache(network, rows, TEXT, network.dtype)
    kv.k.zero_(), kv.v.zero_()
    where = torch.arange(rows)

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    batch = AttentionBatch(
        torch.full((rows,), TEXT - 1),
        where * TEXT + TEXT - 1,
        where.int()[:, None],
        numbers(*[TEXT] * rows),
        torch.arange(rows + 1, dtype=torch.int32),
    )
    tokens = torch.randint(0, model.config.vocab_size, (rows,))
    states = [torch.randn(rows, model.config.hidden_size).to(network.dtype) for _ in head.taps]
    seen = SeenKeys(kv, batch, network.no_keys(rows))

    def full() -> None:
        layers = model.config.num_layers
        network.confidence(network.layers(0, layers, network.embed(tokens), kv, batch))

    made: dict[str, Callable[[], Any]] = {"full": full}
    if isinstance(head, BlockHead):
        assert kv.of_head is not None
        made["draft"] = block_of(head, rows, kv.of_head)
    else:
        begun = head.begin(states)
        made["draft"] = lambda: head.measure(head.step(begun, head.embed(tokens), seen))
    if isinstance(head, KeyedHead):
        keys = kv.of_head
        assert keys is not None
        keys.k.zero_(), keys.v.zero_()
        positions = Positions(tokens, where.int(), batch)
        made["keys"] = lambda: head.fill(head.begin(states), positions, keys)
    return made


def block_of(head: BlockHead, rows: int, kv: KVCache) -> Callable[[], None]:
    """A block of drafts of each row, at the end of its text."""
    size = head.block_size
    head.prepare(kv)
    positions = torch.arange(TEXT - size, TEXT).repeat(rows)
    batch = AttentionBatch(
        positions,
        positions + TEXT * torch.arange(rows).repeat_interleave(size),
        torch.arange(rows, dtype=torch.int32)[:, None],
        torch.full((rows,), TEXT, dtype=torch.int32),
        torch.arange(0, (rows + 1) * size, size, dtype=torch.int32),
        causal=False,
    )
    tokens = torch.randint(0, head.config.vocab_size, (rows * size,))
    markov, memory = head.markov, torch.zeros(rows, head.settings.markov_rank, dtype=head.dtype)

    def block() -> None:
        states = head.block(tokens, kv, batch)
        if markov is None:
            head.measure(states)
            return
        logits = head.logits(states).view(rows, size, -1)
        for place in range(size):
            markov.corrected(logits[:, place], tokens[:rows], memory).argmax(1)

    return block


@torch.inference_mode()
def shares(model: eecore.Model, rows: int, rounds: int) -> dict[str, float]:
    """Seconds of each call, the fastest of its turns."""
    what = calls(model, rows)
    best = dict.fromkeys(what, float("inf"))
    for turn in range(rounds):
        for name in rotated(list(what), turn):
            began = time.perf_counter()
            what[name]()
            best[name] = min(best[name], time.perf_counter() - began)
    return best


def markdown(result: Figures) -> str:
    lines = []
    for row in result["rows"]:
        full = row["seconds"]["full"]
        parts = [row["seconds"].get(name) for name in ("draft", "keys")]
        lines.append(
            [
                row["weights"],
                row["kind"],
                str(row["batch"]),
                f"{full * 1e3:.2f}",
                *("" if part is None else f"{part / full:.3f}" for part in parts),
            ]
        )
    columns = ["weights", "head", "rows", "full depth, ms", "a draft", "keys of a position"]
    about = (
        f"Shares of a pass of full depth with the same rows; {result['model']}, texts of {TEXT} "
        f"tokens, {result['threads']} thread(s), {in_words(result)}. `python -m bench heads`"
    )
    return f"{markdown_table(columns, lines, text_columns=2)}\n\n{about}"


def main(words: Sequence[str]) -> None:
    made = parser("heads", __doc__, batches=(1, 4, 8), rounds=100, threads=1)
    made.add_argument("--model", type=Path, help="a GGUF file; default: SmolLM2's")
    made.add_argument("--weights", nargs="+", default=["file", "float32"])
    arguments: argparse.Namespace = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    with smollm2_file(arguments.model) as file:
        for weights in arguments.weights:
            model = loaded(file, weights, exits=False)
            for kind in KINDS:
                give_noise(model, kind)
                for batch in arguments.batches:
                    seconds = shares(model, batch, arguments.rounds)
                    rows.append(
                        {"weights": weights, "kind": kind, "batch": batch, "seconds": seconds}
                    )
                    say(rows[-1])
        result: Figures = {"model": file.stem, **machine("cpu"), "threads": arguments.threads}
    result["rows"] = rows
    print(markdown(result))
    if arguments.json is not None:
        write_json(arguments.json, result)
