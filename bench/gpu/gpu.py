"""The ops on a GPU: their time, their share of the copy bandwidth, and their best peer.

python -m bench gpu [--json FILE] [--only OP] [--dtype bfloat16]

bench/gpu.sh runs it. Every result is compared with the peers' results before it is timed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu.cases import Case, cases
from bench.gpu.int8_cases import int8_cases
from bench.gpu.kept import Kept, about
from bench.gpu.timing import copy_rate, matmul_rate, read_rate, sets_needed, time_calls
from bench.harness.results import Report
from eecore import ops

COLUMNS = ("op", "case", "dtype", "us", "GB/s", "of copy", "of read", "of matmul")
COLUMNS += ("best peer", "times as fast", "target")
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the 2-norm; NaN counts as infinite."""
    got, expected = got.double(), expected.double()
    error = float((got - expected).norm() / expected.norm().clamp(min=1e-30))
    return error if error == error else float("inf")


def measure(case: Case, dtype: torch.dtype, device: torch.device, rounds: int) -> dict[str, Any]:
    """One row. A peer that fails or disagrees is listed with the reason and not timed."""
    sets = [case.make() for _ in range(sets_needed(device, case.moved_bytes))]
    row: dict[str, Any] = {"op": case.op, "case": case.name, "dtype": str(dtype)[6:]}
    peers: dict[str, Any] = {}
    for name in sets[0].peers:
        try:
            first = sets[0]
            if first.result is not None and first.peer_result is not None:
                error = difference(first.result(), first.peer_result(name))
                if not error < TOLERANCE[dtype]:
                    raise AssertionError(f"results differ by {error:.1e} of their norm")
            times = time_calls(device, [work.peers[name] for work in sets], rounds)
            peers[name] = {"microseconds": times.median * 1e6}
        except AssertionError as disagreement:
            row["wrong"] = f"{name}: {disagreement}"
            peers[name] = {"error": str(disagreement)}
        except Exception as error:
            peers[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    times = time_calls(device, [work.call for work in sets], rounds)
    rate = case.moved_bytes / times.median
    row |= {
        "microseconds": times.median * 1e6,
        "minimum": times.minimum * 1e6,
        "bytes": case.moved_bytes,
        "GB/s": rate / 1e9,
        "of copy": rate / copy_rate(device),
        "of read": rate / read_rate(device),
        "peers": peers,
    }
    if case.flops is not None:
        row["of matmul"] = case.flops / times.median / matmul_rate(device)
    timed = {name: peer["microseconds"] for name, peer in peers.items() if "microseconds" in peer}
    if timed:
        row["best peer"] = min(timed, key=timed.__getitem__)
        row["over best peer"] = timed[row["best peer"]] / row["microseconds"]
    targets = {
        "of copy": (case.of_copy, lambda: row["of copy"] >= case.of_copy),
        "microseconds": (case.microseconds, lambda: row["microseconds"] <= case.microseconds),
        "over best peer": (case.over_peer, lambda: row.get("over best peer", 0) >= case.over_peer),
    }
    row["targets"] = {
        name: {"target": target, "met": bool(is_met())}
        for name, (target, is_met) in targets.items()
        if target is not None and device.type == "cuda"
    }
    return row


def target_text(row: dict[str, Any]) -> str:
    texts = []
    for name, target in row["targets"].items():
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
    lines = [
        about,
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|---|---|---:|---:|---:|---:|---:|---|---:|---|",
    ]
    for row in result["rows"]:
        if "error" in row:
            lines.append(
                f"| {row['op']} | {row['case']} | {row['dtype']} | {row['error']} |||||||| |"
            )
            continue
        faster = f"{row['over best peer']:.2f}" if "over best peer" in row else ""
        multiply = f"{row['of matmul']:.2f}" if "of matmul" in row else ""
        lines.append(
            f"| {row['op']} | {row['case']} | {row['dtype']} | {row['microseconds']:.1f} "
            f"| {row['GB/s']:.0f} | {row['of copy']:.2f} "
            f"| {row['of read']:.2f} | {multiply} "
            f"| {row.get('best peer', '')} | {faster} | {target_text(row)} |"
        )
    wrong = [
        f"- {row['op']} {row['case']}: {row['wrong']}" for row in result["rows"] if "wrong" in row
    ]
    if wrong:
        lines += ["", "Results that differ from a peer's:", *wrong]
    return "\n".join(lines)


REPORTS = (
    Report(
        "gpu-nvidia-h100-80gb-hbm3",
        {"gpu_ops": table},
        {"rows": ("op", "case", "dtype"), "steps": ("step",)},
        ("copy", "read", "matmul", "not_run"),
        ("driver", "torch", "commit"),
    ),
)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="the file for the rows")
    parser.add_argument("--only", action="append", help="an op; may be repeated")
    parser.add_argument("--dtype", action="append", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shrink every shape: tests the script")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=150, help="no case starts after this time")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    if arguments.device == "cuda" and not (torch.cuda.is_available() and ops.build_info()["cuda"]):
        print("gpu: expected a GPU and a build with EECORE_CUDA=ON", file=sys.stderr)
        return 2
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    begin = time.monotonic()
    kept = Kept(arguments.json, about(device), ("op", "case", "dtype"), table)
    kept.note(copy=copy_rate(device), read=read_rate(device), matmul=matmul_rate(device))
    for name in arguments.dtype or ["bfloat16"]:
        dtype = getattr(torch, name)
        given = (dtype, device, arguments.tiny)
        for case in itertools.chain(cases(*given), int8_cases(*given)):
            said: dict[str, Any] = {"op": case.op, "case": case.name, "dtype": name}
            if (arguments.only and case.op not in arguments.only) or kept.find(**said):
                continue
            if time.monotonic() - begin > arguments.seconds:
                kept.skip(f"{case.op} {case.name}")
                continue
            try:
                row = measure(case, dtype, device, arguments.rounds)
            except Exception as error:
                text = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
                row = said | {"error": text}
            kept.add(row)
            print(f"{time.monotonic() - begin:6.1f} s  {case.op} {case.name}", file=sys.stderr)
    status = kept.close()
    return 1 if any("error" in row or "wrong" in row for row in kept.rows) else status
