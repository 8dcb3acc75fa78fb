"""What ops and decoding iterations should take on GPUs: a model of time, nothing is measured.

python -m bench gpu-expected [--dry-run] [--json FILE]

A kernel takes the boundary to the one ahead of it, and then the longest of what memory, the L2
cache and the tensor cores need for what it moves and multiplies. Which kernels there are comes
from the ops' own calls (bench/gpu/trace.py) and launchers (bench/gpu/plans.py), the constants from
data sheets and publications (bench/gpu/devices.py). Left out: weights that are under way before
a boundary is over, trips to memory that wait for each other inside a kernel, the host. Where a GPU
was measured outside of 0.7 to 1.4 times what is expected, the model or the kernel is wrong:
``bench gpu`` and ``bench gpu-decode`` say so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from bench.gpu.calls import Known
from bench.gpu.cases import cases
from bench.gpu.decode import PROMPT, STEPS, model_config
from bench.gpu.devices import GPUS, LEAST, MOST, Gpu
from bench.gpu.launches import Node, kernels, seconds
from bench.gpu.trace import META, iteration, model_without_memory, nodes_of, without_memory
from bench.harness import command
from bench.harness.results import Figures, Report
from bench.harness.rows import Row
from eecore.lab.evaluation.tables import markdown_table

BATCHES = (1, 8, 32)
SEQ_LEN = PROMPT + 32  # half way through 64 more
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


def figures() -> Figures:
    """All that the model says; the same each time."""
    return {
        "dtype": "bfloat16",
        "seq_len": SEQ_LEN,
        "gpus": [dataclasses.asdict(gpu) for gpu in GPUS],
        "ops": op_rows(),
        "iterations": iteration_rows(),
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


def about(result: Figures) -> str:
    return (
        f"Expected, not measured: {result['dtype']}, {result['seq_len']} keys a row, one graph, "
        "the host left out; checks are softmax, behind half of the layers; kernels and bytes as on "
        "the first GPU. A kernel takes the boundary to "
        "the one ahead, then the longest of what memory, L2 and tensor cores need; the constants "
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
}
REPORTS = (Report("gpu_expected", TABLES),)


def main(words: Sequence[str]) -> None:
    arguments = command.parser("gpu-expected", __doc__).parse_args(words)
    REPORTS[0].finish(figures(), arguments)
