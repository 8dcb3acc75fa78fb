"""Products of few rows with weights from memory: the cost of an additional row, by format.

python -m bench products [--threads 1] [--rounds 15] [--weights Q4_1 Q8_0 float32] [--rows 1 2 8]

skinny_linear with the weights of many layers, one after the other, as in decoding: no cache of the
machine still holds a layer's weights when it is called again. For comparison each round measures
the same call with one layer's weights again and again, which a cache holds, and a plain read loop;
all cases take turns. Writes bench/results/products.json and its table in bench/results.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import gguf
import torch

from bench.harness.ceilings import read_ceiling
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.turns import in_turn_and_again
from eecore import ops
from eecore.lab.evaluation.tables import markdown_table
from eecore.ops import Matrix

FEATURES = 1536
"""Input and output features."""
WEIGHTS = ("Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "bfloat16", "float32")
ROWS = (1, 2, 4, 8, 16, 32)
IN_ALL = 128 << 20
"""Bytes of all layers' weights."""
SCALE = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
PLACES_OF_SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (-2,)}
"""Offsets of the float16 scales in a block; only 0 in other formats."""


def random_weight(weights: str) -> Matrix:
    """A weight of random bits; in a file's format, with finite scales."""
    if weights in ("float32", "bfloat16"):
        return Matrix(torch.randn(FEATURES, FEATURES).to(getattr(torch, weights)))
    columns, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[weights]]
    shape = (FEATURES, FEATURES // columns, num_bytes)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8)
    for place in PLACES_OF_SCALES.get(weights, (0,)):
        blocks[..., place % num_bytes : place % num_bytes + 2] = SCALE
    return ops.pack_weight(blocks.flatten(1), weights)


class Layers:
    """Weights of one format, and the rows to multiply with them."""

    def __init__(self, weights: str, in_all: int) -> None:
        self.weights = weights
        first = random_weight(weights)
        self.bytes = first.weight.nbytes
        count = max(in_all // self.bytes, 1)
        self.matrices = [first, *(random_weight(weights) for _ in range(count - 1))]
        self._dtype = torch.bfloat16 if weights == "bfloat16" else torch.float32
        self.take_rows(1)

    def take_rows(self, num_rows: int) -> None:
        """Set the number of rows to multiply."""
        self._x = torch.randn(num_rows, FEATURES).to(self._dtype)
        self._out = torch.empty_like(self._x)

    def seconds(self, layer: int) -> float:
        """Seconds of one call with a layer's weights."""
        matrix = self.matrices[layer]
        began = time.perf_counter()
        ops.skinny_linear(self._x, matrix.weight, weight_table=matrix.table, out=self._out)
        return time.perf_counter() - began


def markdown(result: Figures) -> str:
    columns = ["weights", "rows", "µs a layer", "times one row", "GB/s", "of what memory gives"]
    columns += ["µs, one layer again", "times one row"]
    lines = []
    for row in result["rows"]:
        one = next(r for r in result["rows"] if r["weights"] == row["weights"])
        rate = row["bytes"] / row["seconds"]
        lines.append(
            [
                row["weights"],
                str(row["num_rows"]),
                f"{1e6 * row['seconds']:.0f}",
                f"{row['seconds'] / one['seconds']:.2f}",
                f"{rate / 1e9:.1f}",
                f"{rate / result['memory']:.0%}",
                f"{1e6 * row['again']:.0f}",
                f"{row['again'] / one['again']:.2f}",
            ]
        )
    about = (
        f"Rows times weights of {FEATURES} x {FEATURES}: layers of {result['in_all'] >> 20} MB "
        f"together, one after the other, the fastest of {result['rounds']} rounds; and one layer "
        "again and again, whose weights stay in a cache if they fit. All cases take turns. Memory: "
        f"{result['memory'] / 1e9:.1f} GB/s by a plain read loop. {result['threads']} thread(s), "
        f"{in_words(result)}. `python -m bench products`"
    )
    return f"{markdown_table(columns, lines, text_columns=1)}\n\n{about}"


REPORTS = (
    Report("products", {"products": markdown}, {"rows": ("weights", "num_rows")}, ("memory",)),
)


def main(words: Sequence[str]) -> None:
    made = parser("products", __doc__, rounds=15, threads=1)
    made.add_argument(
        "--weights",
        nargs="+",
        default=list(WEIGHTS),
        choices=(*ops.BLOCK_FORMATS, "bfloat16", "float32"),
        metavar="WEIGHTS",
    )
    made.add_argument("--rows", type=int, nargs="+", default=list(ROWS), metavar="N")
    made.add_argument("--bytes", type=int, default=IN_ALL, help="bytes of all layers of a format")
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    every = [Layers(weights, arguments.bytes) for weights in arguments.weights]
    cases = [(layers, num_rows) for layers in every for num_rows in arguments.rows]
    taken: list[list[tuple[float, float]]] = [[] for _ in cases]
    memory = 0.0
    for number in range(arguments.rounds):
        say(f"round {number + 1} of {arguments.rounds}")
        for (layers, num_rows), seconds in zip(cases, taken, strict=True):
            layers.take_rows(num_rows)
            seconds.append(in_turn_and_again(layers.seconds, len(layers.matrices), 1))
        memory = max(memory, read_ceiling(arguments.bytes))
    rows: list[dict[str, Any]] = []
    for (layers, num_rows), seconds in zip(cases, taken, strict=True):
        in_turn, again = map(min, zip(*seconds, strict=True))
        rows.append(
            {
                "weights": layers.weights,
                "num_rows": num_rows,
                "seconds": in_turn,
                "again": again,
                "bytes": layers.bytes,
            }
        )
    result = {
        **machine(),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "in_all": arguments.bytes,
        "memory": memory,
        "rows": rows,
    }
    REPORTS[0].finish(result, arguments)
