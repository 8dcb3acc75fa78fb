"""Products of weights with the kernels of each capability of the CPU, and with torch's.

python -m bench capabilities [--rounds 15]

Capabilities and torch's own product in bfloat16 take turns, also the model of AVX-VNNI, whose
instructions take as long as AVX-VNNI's would on this CPU; the fastest round counts, in CPU time of
one thread. Portable kernels and the software model of tiles are left out. Writes
bench/results/capabilities.json and its table in bench/results/ops.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from bench.harness.ceilings import multiply_ceiling
from bench.harness.command import parser, say
from bench.harness.machine import machine
from bench.harness.results import Figures, Report
from bench.harness.rows import Row, table_of
from bench.harness.turns import TimedCall, seconds_of, take_turns
from eecore import _C, ops
from eecore.models.int8 import quantise_rows
from tests.cases import cpu_capabilities
from tests.packed_blocks import random_blocks

FORMATS = ("bfloat16", "int8", "Q4_0", "Q4_K", "Q8_0", "Q6_K")
ROWS = (1, 8, 32, 512)
"""Rows of x."""
SIZE = 2048
"""Rows and columns of the weight."""
MIN_ROWS = 64
"""Rows of x of the products that are timed together."""


def product(form: str, x: Tensor) -> Callable[[], Tensor]:
    """The product of x with a weight of a form; of bfloat16 with x in bfloat16."""
    if form == "bfloat16":
        return partial(ops.skinny_linear, x.bfloat16(), torch.randn(SIZE, SIZE).bfloat16())
    if form == "int8":
        weight, scale = quantise_rows(torch.randn(SIZE, SIZE))
        return partial(ops.skinny_linear, x, weight, weight_scale=scale)
    packed = ops.pack_weight(random_blocks(form, SIZE, SIZE), form)
    return partial(ops.skinny_linear, x, packed.weight, weight_table=packed.table)


def on(capability: str | None, run: Callable[[], object], times: int) -> TimedCall:
    """Runs on the kernels of a capability, or of none in particular, and their CPU time."""
    if capability is not None:
        _C.set_cpu_capability(capability)
    began = time.process_time()
    for _ in range(times):
        run()
    return TimedCall(time.process_time() - began, None)


def compared() -> list[str]:
    """The capabilities that are compared."""
    return [name for name in cpu_capabilities() if name not in ("portable", "amx_model")]


def peaks(kind: str, dtype: torch.dtype) -> Row:
    """What each capability reaches with products of one kind alone."""
    row: Row = {"weight": f"products of {kind} alone", "rows": ""}
    for name in compared():
        _C.set_cpu_capability(name)
        row[name] = multiply_ceiling(dtype) / 1e9
    return row


def measured(form: str, num_rows: int, rounds: int) -> Row:
    """Multiplications and additions a second, in thousand millions, by capability."""
    run = product(form, torch.randn(num_rows, SIZE))
    times = max(1, MIN_ROWS // num_rows)
    runs = {name: partial(on, name, run, times) for name in compared()}
    if form == "bfloat16":
        weight = torch.randn(SIZE, SIZE).bfloat16()
        plain = partial(torch.nn.functional.linear, torch.randn(num_rows, SIZE).bfloat16(), weight)
        runs["torch"] = partial(on, None, plain, times)
    turns = take_turns(runs, rounds)
    work = 2e-9 * SIZE * SIZE * num_rows * times
    return {
        "weight": form,
        "rows": num_rows,
        **{name: work / min(seconds_of(calls)) for name, calls in turns.items()},
    }


def table(result: Figures) -> str:
    names = [name for name in result["rows"][0] if name not in CASE]
    columns = [("weight", "{weight}"), ("rows of x", "{rows}")]
    columns += [(name, f"{{{name}:.0f}}") for name in names]
    about = (
        f"Thousand millions of multiplications and additions a second, weights of {SIZE} x {SIZE}, "
        "states in float32, with bfloat16 weights in bfloat16; CPU time, the fastest of "
        f"{result['rounds']} rounds in turns. 1 thread, {result['cpu']}, torch {result['torch']}. "
        "`python -m bench capabilities`"
    )
    return f"{table_of(columns, result['rows'])}\n\n{about}"


CASE = ("weight", "rows")
REPORTS = (Report("capabilities", {"capabilities": table}, {"rows": CASE}),)


def main(words: Sequence[str]) -> None:
    made = parser("capabilities", __doc__, rounds=15)
    made.add_argument("--rows", type=int, nargs="+", default=list(ROWS), metavar="N")
    arguments = made.parse_args(words)
    torch.set_num_threads(1)
    facts, rows = machine(), []
    for form in FORMATS:
        for num_rows in arguments.rows:
            rows.append(measured(form, num_rows, arguments.rounds))
            say(rows[-1])
    rows += [peaks("bytes", torch.int8), peaks("bfloat16", torch.bfloat16)]
    result = {**facts, "rounds": arguments.rounds, "rows": rows}
    REPORTS[0].finish(result, arguments)
