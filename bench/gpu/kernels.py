"""The time of each kernel of a decoding step in its graph, by torch's profiler.

python -m bench gpu-kernels [--model 135m 1b] [--batch 1 32] [--json FILE]

A program is launched a few times on one state (:meth:`bench.gpu.decode.Bench.program`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import eecore
from bench.gpu.decode import Bench, Case, measure_programs
from eecore.models import LlamaModel

LAUNCHES = 5


def policies(num_layers: int) -> dict[str, Any]:
    """The policies: full depth, and a check that no row passes."""
    half = num_layers // 2
    never = eecore.ConfidentExit(1.0 - 2.0**-24, exit_points=(half,))
    return {"full": eecore.Full(), "a check that no row passes": never}


def kernels_of(bench: Bench, policy: Any) -> list[dict[str, Any]]:
    """The kernels of one run by name, with their number and the microseconds of each."""
    engine = bench.engine("captured")
    bench.run(engine, policy)
    on_gpu = bench.model.device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with bench.program(engine, policy) as launch:
        launch()
        with profile(activities=[activity]) as profiler:
            for _ in range(LAUNCHES):
                launch()
            if on_gpu:
                torch.cuda.synchronize()
    found = []
    for event in profiler.key_averages():
        total = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if total > 0:
            count = event.count / LAUNCHES
            found.append({"kernel": event.key[:160], "count": count, "us": total / event.count})
    return sorted(found, key=lambda each: -each["count"] * each["us"])


def table(result: dict[str, Any]) -> str:
    """The kernels that take most time, as Markdown."""
    lines = [
        f"{result['device']}, torch {result['torch']}, commit {result['commit']}: kernels of a "
        "decoding step, those that take most. `python -m bench gpu-kernels`",
        "",
        "| model | batch | mode | kernel | a step | us each | us in all |",
        "|---|---:|---|---|---:|---:|---:|",
    ]
    for row in result["rows"]:
        case = f"| {row['model']} | {row['batch']} | {row['mode']} |"
        if "error" in row:
            lines.append(f"{case} {row['error']} ||||")
        for each in row.get("kernels", ())[:10]:
            total = each["count"] * each["us"]
            name = each["kernel"].replace("|", "/")[:80]
            lines.append(f"{case} {name} | {each['count']:g} | {each['us']:.2f} | {total:.1f} |")
    return "\n".join(lines)


def cases(model: LlamaModel) -> Iterator[Case]:
    """A case for each policy."""
    for mode, policy in policies(model.config.num_layers).items():
        yield {"mode": mode}, lambda bench, policy=policy: {"kernels": kernels_of(bench, policy)}


def main(words: Sequence[str]) -> int:
    return measure_programs(
        "gpu-kernels", __doc__, words, cases, table, batches=(1, 32), seconds=20
    )
