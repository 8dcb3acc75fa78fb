"""Attention over keys that come from memory: the caches of many layers, one after the other.

python -m bench attention [--threads 1] [--rounds 7]

paged_attention for decoding and for verifying drafts, as a model of many layers calls it: no cache
of the machine still holds a layer's keys when it is that layer's turn again. Beside it the same
call over one layer's keys again and again, and what memory gives to the plainest loop, measured
behind each case. Writes bench/results/attention.json and its table in bench/RESULTS.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from bench.gpu.attention import contiguous_call
from bench.harness.ceilings import read_ceiling
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.turns import in_turn_and_again
from eecore import ops
from eecore.lab.evaluation.tables import markdown_table
from tests.cases import LLAMA_8B, SMOLLM2_135M

MODELS = {"SmolLM2-135M": SMOLLM2_135M.heads, "Llama-8B": LLAMA_8B.heads}
LENGTHS = ((8, 800), (1, 4096))
"""Sequences, and keys of each."""
QUERIES = (1, 2, 4, 8)
"""Of a sequence: the last token, and drafts behind it."""
IN_ALL = 256 << 20
"""Bytes of all layers' keys and values."""

CASE = ("model", "dtype", "num_seqs", "seq_len", "num_queries")


class Layers:
    """Caches of random keys and values, and queries."""

    def __init__(
        self,
        heads: tuple[int, int, int],
        dtype: torch.dtype,
        num_seqs: int,
        seq_len: int,
        num_queries: int,
        in_all: int,
    ) -> None:
        self._call = contiguous_call(num_queries, seq_len, num_seqs, heads, dtype)
        first = [self._call.pop(cache) for cache in ("k_cache", "v_cache")]
        self.bytes = sum(cache.nbytes for cache in first)
        count = max(in_all // self.bytes, 1)
        others = [[torch.randn(c.shape).to(dtype) for c in first] for _ in range(count - 1)]
        self.caches = [first, *others]

    def seconds(self, layer: int) -> float:
        """One call."""
        k, v = self.caches[layer]
        began = time.perf_counter()
        ops.paged_attention(k_cache=k, v_cache=v, **self._call)
        return time.perf_counter() - began


def markdown(result: Figures) -> str:
    columns = ["heads of", "keys and values", "sequences", "keys", "queries", "µs a layer"]
    columns += ["GB/s", "of what memory gives", "µs, one layer again"]
    lines = [
        [
            row["model"],
            row["dtype"],
            str(row["num_seqs"]),
            str(row["seq_len"]),
            str(row["num_queries"]),
            f"{1e6 * row['seconds']:.0f}",
            f"{row['bytes'] / row['seconds'] / 1e9:.1f}",
            f"{row['bytes'] / row['seconds'] / row['memory']:.0%}",
            f"{1e6 * row['again']:.0f}",
        ]
        for row in result["rows"]
    ]
    about = (
        "Each sequence's queries against all its keys; layers of "
        f"{result['in_all'] >> 20} MB in all, one after the other, the fastest of "
        f"{result['rounds']} rounds, and one layer's again and again, which a cache holds where it "
        f"can. Memory: the plainest loop, behind each case. {result['threads']} thread(s), "
        f"{in_words(result)}. `python -m bench attention`"
    )
    return f"{markdown_table(columns, lines, text_columns=2)}\n\n{about}"


REPORTS = (Report("attention", {"attention": markdown}, {"rows": CASE}),)


def main(words: Sequence[str]) -> None:
    made = parser("attention", __doc__, rounds=7, threads=1)
    made.add_argument("--queries", type=int, nargs="+", default=list(QUERIES), metavar="N")
    made.add_argument("--bytes", type=int, default=IN_ALL, help="of all layers of a case")
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    for model, heads in MODELS.items():
        for dtype in (torch.bfloat16, torch.float32):
            for num_seqs, seq_len in LENGTHS:
                for num_queries in arguments.queries:
                    sizes = (heads, dtype, num_seqs, seq_len, num_queries)
                    layers = Layers(*sizes, arguments.bytes)
                    count = len(layers.caches)
                    seconds, again = in_turn_and_again(layers.seconds, count, arguments.rounds)
                    rows.append(
                        {
                            "model": model,
                            "dtype": str(dtype).removeprefix("torch."),
                            "num_seqs": num_seqs,
                            "seq_len": seq_len,
                            "num_queries": num_queries,
                            "seconds": seconds,
                            "again": again,
                            "bytes": layers.bytes,
                            "memory": read_ceiling(arguments.bytes),
                        }
                    )
                    say(rows[-1])
    result = {
        **machine(),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "in_all": arguments.bytes,
        "rows": rows,
    }
    REPORTS[0].finish(result, arguments)
