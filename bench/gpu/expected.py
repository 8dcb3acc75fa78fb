"""What ops and decoding iterations should take on GPUs: a model of time, nothing is measured.

python -m bench gpu-expected [--dry-run] [--json FILE]

A kernel takes the boundary to the one ahead of it, its latency, and then the longest of what
memory, the L2 cache and the tensor cores need for what it moves and multiplies. Which kernels there
are comes from the ops' own calls (bench/gpu/trace.py) and launchers (bench/gpu/plans.py), latencies
from bench/gpu/launches.py, the constants from data sheets and publications (bench/gpu/devices.py).
Left out: weights that are under way before a boundary is over, and the host. Where a GPU
was measured outside of 0.7 to 1.4 times what is expected, the model or the kernel is wrong:
``bench gpu`` and ``bench gpu-decode`` say so.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

import torch

from bench.gpu.calls import Known
from bench.gpu.cases import cases
from bench.gpu.decode import PROMPT, STEPS, model_config
from bench.gpu.devices import GPUS, LEAST, MOST, Gpu
from bench.gpu.launches import LATENCIES_AFTER_THE_WAIT, Node, kernels, seconds
from bench.gpu.trace import META, iteration, model_without_memory, nodes_of, without_memory
from bench.harness import command
from bench.harness.places import RESULTS
from bench.harness.results import Figures, Report
from bench.harness.rows import Row
from eecore.lab.evaluation.tables import markdown_table

BATCHES = (1, 8, 32)
SEQ_LEN = PROMPT + 32  # half way through 64 more
MEASURED = "gpu-nvidia-h100-80gb-hbm3-decode.json"
"""The last measured steps, whose kernels read page tables and slots after the wait."""
GOALS: dict[tuple[str, int], float] = {
    ("135m", 1): 0.43,
    ("135m", 8): 0.47,
    ("135m", 32): 0.55,
    ("1b", 1): 0.98,
    ("1b", 8): 1.05,
    ("1b", 32): 1.45,
    ("8b", 1): 5.6,
    ("8b", 8): 5.8,
    ("8b", 32): 7.0,
}
"""Milliseconds of a decoding step at full depth on an H100, by model and batch."""
MODELS = {"135m": "SmolLM2-135M", "1b": "Llama-3.2-1B", "8b": "Llama-3-8B"}


def expected_cases(gpu: Gpu, dtype: torch.dtype, tiny: bool) -> dict[tuple[str, str], float]:
    """Seconds of each case of ``bench gpu``, by op and name; none in float32."""
    if dtype == torch.float32:
        return {}
    return {key: seconds(gpu, nodes) for key, nodes in case_nodes(gpu, dtype, tiny).items()}


def case_nodes(gpu: Gpu, dtype: torch.dtype, tiny: bool) -> dict[tuple[str, str], list[Node]]:
    """The kernels of each case."""
    found = {}
    with without_memory():
        for case in cases(dtype, META, tiny):
            work = case.make()
            nodes = nodes_of(work.call, gpu, Known())
            found[case.op, case.name] = nodes
    return found


def cost(gpu: Gpu, nodes: Sequence[Node]) -> Row:
    """Of one GPU: microseconds, kernels, bytes to and from memory."""
    launches = kernels(nodes)
    return {
        "us": round(seconds(gpu, nodes) * 1e6, 2),
        "kernels": len(launches),
        "bytes": round(sum(launch.moved_bytes for launch in launches)),
    }


def op_rows() -> list[Row]:
    by_gpu = {gpu: case_nodes(gpu, torch.bfloat16, tiny=False) for gpu in GPUS}
    return [
        {"op": op, "case": name, "on": {g.name: cost(g, by_gpu[g][op, name]) for g in GPUS}}
        for op, name in by_gpu[GPUS[0]]
    ]


def iteration_rows() -> list[Row]:
    rows = []
    for short, name in MODELS.items():
        model = model_without_memory(model_config(short))
        for batch in BATCHES:
            for mode, leaves in STEPS.items():
                on = {
                    gpu.name: cost(
                        gpu,
                        iteration(model, batch, SEQ_LEN, gpu, leaves=leaves),
                    )
                    for gpu in GPUS
                }
                rows.append({"model": name, "batch": batch, "mode": mode, "on": on})
    return rows


def goal_rows() -> list[Row]:
    """Full depth on an H100: measured, what the model says of those kernels, of today's, the goal.

    What was measured is the engine's wall clock: at a batch of 32 the host's time above all.
    """
    rows = []
    measured = {
        (row["model"], row["batch"]): row["seconds_per_iteration"] * 1e3
        for row in json.loads((RESULTS / MEASURED).read_text())["rows"]
        if (row["mode"], row["way"]) == ("full", "captured")
    }
    gpu = next(gpu for gpu in GPUS if gpu.name == "H100")
    for (short, batch), goal in GOALS.items():
        nodes = iteration(model_without_memory(model_config(short)), batch, SEQ_LEN, gpu)
        bound = sum(launch.moved_bytes for launch in kernels(nodes)) / gpu.memory_rate
        # With more rows there were other kernels.
        before = seconds(gpu, nodes, LATENCIES_AFTER_THE_WAIT) if batch <= 8 else None
        rows.append(
            {
                "model": MODELS[short],
                "batch": batch,
                "measured_ms": round(measured[short, batch], 3)
                if (short, batch) in measured
                else None,
                "explained_ms": None if before is None else round(before * 1e3, 3),
                "expected_ms": round(seconds(gpu, nodes) * 1e3, 3),
                "goal_ms": goal,
                "bytes_ms": round(bound * 1e3, 3),
            }
        )
    return rows


def figures() -> Figures:
    """All that the model says; the same each time."""
    return {
        "dtype": "bfloat16",
        "seq_len": SEQ_LEN,
        "gpus": [dataclasses.asdict(gpu) for gpu in GPUS],
        "ops": op_rows(),
        "iterations": iteration_rows(),
        "goals": goal_rows(),
    }


def iterations_table(result: Figures) -> str:
    names = [gpu["name"] for gpu in result["gpus"]]
    lines = []
    for row in result["iterations"]:
        first = row["on"][names[0]]
        line = [row["model"], row["mode"], str(row["batch"]), str(first["kernels"])]
        line += [f"{first['bytes'] / 1e6:,.0f}"]
        line += [f"{row['on'][name]['us']:,.0f}" for name in names]
        lines.append(line)
    head = ["model", "decoding step", "batch", "kernels", "MB", *(f"{name}, us" for name in names)]
    return f"{markdown_table(head, lines, text_columns=2)}\n\n{about(result)}"


def goals_table(result: Figures) -> str:
    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    names = ("measured_ms", "explained_ms", "expected_ms", "goal_ms", "bytes_ms")
    lines = [
        [row["model"], str(row["batch"]), *(cell(row[name]) for name in names)]
        for row in result["goals"]
    ]
    head = ["model", "batch", "measured, ms", "modelled", "expected now", "goal", "bytes"]
    text = (
        "A decoding step at full depth on an H100. Measured: the engine's wall clock, most of it "
        "the host's at a batch of 32; these kernels looked up the places of rows and keys only "
        "after the wait for the previous kernel. Modelled: the same kernels by the model of time. "
        "Expected now: today's kernels by the same model. Bytes: what the bytes alone allow. "
        "`python -m bench gpu-expected`"
    )
    return f"{markdown_table(head, lines, text_columns=1)}\n\n{text}"


def about(result: Figures) -> str:
    return (
        f"Expected, not measured: {result['dtype']}, {result['seq_len']} keys a row, one graph, "
        "the host left out; checks are softmax, after half of the layers; kernels and bytes as on "
        "the first GPU. A kernel takes the boundary to "
        "the one ahead and its latency, then the longest of what memory, L2 and tensor cores need; "
        "the constants "
        "of each GPU, and where they are from, are in `bench/gpu/devices.py`. What is measured "
        f"outside of {LEAST} to {MOST} times it will be called a finding by `bench gpu` and "
        "`bench gpu-decode`. "
        "`python -m bench gpu-expected`"
    )


def ops_table(result: Figures) -> str:
    """Cases that are more than launches: on some GPU their work takes as long as its boundaries."""
    names = [gpu["name"] for gpu in result["gpus"]]
    boundary = {gpu["name"]: gpu["boundary"] * 1e6 for gpu in result["gpus"]}

    def is_more(row: Row) -> bool:
        return any(cost["us"] > 2 * boundary[n] * cost["kernels"] for n, cost in row["on"].items())

    shown = [row for row in result["ops"] if is_more(row)]
    lines = []
    for row in shown:
        first = row["on"][names[0]]
        line = [row["op"], row["case"], str(first["kernels"]), f"{first['bytes'] / 1e6:,.1f}"]
        lines.append(line + [f"{row['on'][name]['us']:.1f}" for name in names])
    head = ["op", "case", "kernels", "MB", *(f"{name}, us" for name in names)]
    rest = len(result["ops"]) - len(shown)
    text = (
        f"Expected of the cases of `bench gpu`, by the same model. {rest} others are boundaries "
        "between kernels above all."
    )
    return f"{markdown_table(head, lines, text_columns=2)}\n\n{text}"


TABLES: dict[str, Callable[[Figures], str]] = {
    "gpu_expected_iterations": iterations_table,
    "gpu_expected_ops": ops_table,
    "gpu_expected_goals": goals_table,
}
REPORTS = (Report("gpu_expected", TABLES),)


def main(words: Sequence[str]) -> None:
    arguments = command.parser("gpu-expected", __doc__).parse_args(words)
    REPORTS[0].finish(figures(), arguments)
