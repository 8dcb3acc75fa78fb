"""The ops on a GPU: their time, their share of the copy bandwidth, and their best peer.

python -m bench gpu [--json FILE] [--only OP] [--dtype bfloat16]

bench/gpu.sh runs it. Every result is compared with the peers' results before it is timed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch

from bench.gpu.cases import Case, cases
from bench.gpu.int8_cases import int8_cases
from bench.gpu.kept import Kept, Row, about, parser
from bench.gpu.timing import copy_rate, matmul_rate, read_rate, sets_needed, time_calls
from bench.harness.results import Report
from bench.harness.rows import Columns, table_of
from eecore import ops

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the 2-norm; NaN counts as infinite."""
    got, expected = got.double(), expected.double()
    error = float((got - expected).norm() / expected.norm().clamp(min=1e-30))
    return error if error == error else float("inf")


def measure(case: Case, dtype: torch.dtype, device: torch.device, rounds: int) -> Row:
    """The figures of one case. A peer that fails or disagrees is listed, and not timed."""
    sets = [case.make() for _ in range(sets_needed(device, case.moved_bytes))]
    first, peers, row = sets[0], dict[str, Any](), Row()
    for name in first.peers:
        try:
            if first.result is not None and first.peer_result is not None:
                error = difference(first.result(), first.peer_result(name))
                if not error < TOLERANCE[dtype]:
                    raise AssertionError(f"results differ by {error:.1e} of their norm")
            seconds = time_calls(device, [work.peers[name] for work in sets], rounds)
            peers[name] = {"microseconds": seconds * 1e6}
        except AssertionError as disagreement:
            row["wrong"] = f"{name}: {disagreement}"
            peers[name] = {"error": str(disagreement)}
        except Exception as error:
            peers[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    seconds = time_calls(device, [work.call for work in sets], rounds)
    rate = case.moved_bytes / seconds
    row |= {
        "microseconds": seconds * 1e6,
        "GB/s": rate / 1e9,
        "of copy": rate / copy_rate(device),
        "of read": rate / read_rate(device),
        "peers": peers,
    }
    if case.flops is not None:
        row["of matmul"] = case.flops / seconds / matmul_rate(device)
    timed = {name: peer["microseconds"] for name, peer in peers.items() if "microseconds" in peer}
    if timed:
        row["best peer"] = min(timed, key=timed.__getitem__)
        row["over best peer"] = timed[row["best peer"]] / row["microseconds"]
    row["targets"] = {}
    for name, target, sign in (
        ("of copy", case.of_copy, 1),
        ("microseconds", case.microseconds, -1),
        ("over best peer", case.over_peer, 1),
    ):
        if target is not None and device.type == "cuda":
            is_met = sign * row.get(name, 0) >= sign * target
            row["targets"][name] = {"target": target, "met": is_met}
    return row


def targets(row: Row) -> str:
    texts = []
    for name, target in row.get("targets", {}).items():
        sign = "<=" if name == "microseconds" else ">="
        word = {"of copy": "copy", "microseconds": "us", "over best peer": "x peer"}[name]
        texts.append(f"{sign} {target['target']:g} {word}: {'met' if target['met'] else 'MISSED'}")
    return ", ".join(texts)


def table(result: dict[str, Any]) -> str:
    """The table as Markdown, with a sentence on the measurement and the machine."""
    about = (
        f"{result['device']}, driver {result['driver']}, torch {result['torch']}, commit "
        f"{result['commit']}. Copy {result['copy'] / 1e9:.0f} GB/s (read and written), sum "
        f"{result['read'] / 1e9:.0f} GB/s (read), bfloat16 product {result['matmul'] / 1e12:.0f} "
        "TFLOP/s, in this run. Median times of replayed graphs on inputs that take turns past the "
        "L2 cache. `bench/gpu.sh`"
    )
    columns: Columns = (
        ("op", "{op}"),
        ("case", "{case}"),
        ("dtype", "{dtype}"),
        ("us", lambda row: row.get("error") or f"{row['microseconds']:.1f}"),
        ("GB/s", "{GB/s:.0f}"),
        *((name, f"{{{name}:.2f}}") for name in ("of copy", "of read", "of matmul")),
        ("best peer", "{best peer}"),
        ("times as fast", "{over best peer:.2f}"),
        ("target", targets),
    )
    parts = [about, table_of(columns, result["rows"], text_columns=3)]
    wrong = [f"- {r['op']} {r['case']}: {r['wrong']}" for r in result["rows"] if "wrong" in r]
    if wrong:
        parts.append("\n".join(["Results that differ from a peer's:", *wrong]))
    return "\n\n".join(parts)


REPORTS = (Report("gpu-nvidia-h100-80gb-hbm3", {"gpu_ops": table}),)


def main(words: Sequence[str]) -> int:
    made = parser("gpu", __doc__, rounds=30)
    made.add_argument("--only", action="append", help="an op; may be repeated")
    made.add_argument("--dtype", action="append", choices=["bfloat16", "float16", "float32"])
    made.add_argument("--tiny", action="store_true", help="shrink every shape: tests the script")
    arguments = made.parse_args(words)
    if arguments.device == "cuda" and not (torch.cuda.is_available() and ops.build_info()["cuda"]):
        print("gpu: expected a GPU and a build with EECORE_CUDA=ON", file=sys.stderr)
        return 2
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    kept = Kept(arguments.json, about(device), ("op", "case", "dtype"), arguments.seconds)
    rates = {"copy": copy_rate, "read": read_rate, "matmul": matmul_rate}
    kept.figures |= {name: rate(device) for name, rate in rates.items()}
    for name in arguments.dtype or ["bfloat16"]:
        dtype = getattr(torch, name)
        given = (dtype, device, arguments.tiny)
        for case in itertools.chain(cases(*given), int8_cases(*given)):
            if not arguments.only or case.op in arguments.only:
                said = {"op": case.op, "case": case.name, "dtype": name}
                own = (case, dtype, device, arguments.rounds)
                kept.measure(said, lambda own=own: measure(*own))
    status = kept.close(table)
    return 1 if any("error" in row or "wrong" in row for row in kept.rows) else status
