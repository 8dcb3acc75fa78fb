"""Expected times of ops and decoding iterations on GPUs, by a model of time; measures nothing.

python -m bench gpu-expected [--dry-run] [--json FILE]

The time of a kernel is the boundary to the previous kernel, its latency, and the longest of the
times of memory, the L2 cache and the tensor cores for its bytes and operations. The kernels come
from the ops' own calls (bench/gpu/trace.py) and launchers (bench/gpu/plans.py), latencies from
bench/gpu/launches.py, the constants from data sheets and publications (bench/gpu/devices.py). The
model leaves out loads of weights that start before a boundary ends, and the host. If a time
measured on a GPU is outside of 0.7 to 1.4 times the expected time, the model or the kernel is
wrong: ``bench gpu`` and ``bench gpu-decode`` report it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence

import torch

from bench.gpu.attention import AttentionShape, attention_work
from bench.gpu.calls import Known
from bench.gpu.cases import cases
from bench.gpu.decode import PROMPT, STEPS, model_config
from bench.gpu.devices import GPUS, HOPPER_PEAK, MAX_RATIO, MIN_RATIO, Gpu
from bench.gpu.draft_heads import dflash, eagle3
from bench.gpu.launches import LATENCIES_AFTER_THE_WAIT, KernelLaunch, Node, kernels, seconds
from bench.gpu.trace import (
    META,
    draft_round,
    iteration,
    model_without_memory,
    nodes_of,
    without_memory,
)
from bench.gpu.variants import tuned
from bench.harness import command
from bench.harness.places import RESULTS
from bench.harness.results import Figures, Report
from bench.harness.rows import Row
from eecore.lab.evaluation.tables import markdown_table
from eecore.models import LlamaModel
from eecore.models.linear import MAX_SKINNY_ROWS, MAX_SKINNY_ROWS_BY_WARPGROUPS

BATCHES = (1, 8, 32)
SEQ_LEN = PROMPT + 32  # halfway through 64 more tokens
MEASURED = "gpu-nvidia-h100-80gb-hbm3-decode.json"
"""The last measured steps, by kernels that read page tables and slots after the wait."""
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
    ("8b", 64): 6.4,
}
"""Milliseconds of a decoding step at full depth on an H100, by model and batch."""
ROUNDS = {"EAGLE-3": 5, "DFlash": 7}
"""Drafts of a round, by head."""
ROUND_BATCHES = (1, 4)
"""Batches whose verified rows stay in eecore's own products, which the model of time knows."""
PROMPTS = (AttentionShape(1, 2048, 2048), AttentionShape(4, 512, 4096))
"""Chunks of prompts, of Llama-3-8B's shape."""
MANY_ROWS = (64, 72, 128, 160, 256)
"""Rows of a step by warpgroups."""
VERIFICATIONS = ((8, 8), (32, 4))
"""Requests and drafts of rounds of self-speculation by warpgroups."""
ACCEPTANCE = 0.75
MODELS = {"135m": "SmolLM2-135M", "1b": "Llama-3.2-1B", "8b": "Llama-3-8B"}


def expected_cases(gpu: Gpu, dtype: torch.dtype, tiny: bool) -> dict[tuple[str, str], float]:
    """Expected seconds of each case of ``bench gpu``, by op and name; no cases in float32."""
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
    """The cost on one GPU: microseconds, kernels, bytes to and from memory."""
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
            for mode, rows_exit in STEPS.items():
                on = {
                    gpu.name: cost(
                        gpu,
                        iteration(model, batch, SEQ_LEN, gpu, rows_exit=rows_exit),
                    )
                    for gpu in GPUS
                }
                rows.append({"model": name, "batch": batch, "mode": mode, "on": on})
    return rows


def goal_rows() -> list[Row]:
    """Full depth on an H100: measured, expected of the measured kernels, expected now, the goal.

    Expected also by warpgroups, which are off by default and multiply more rows.

    The measured time is the engine's wall clock, at a batch of 32 mostly the host's time.
    """
    rows = []
    measured = {
        (row["model"], row["batch"]): row["seconds_per_iteration"] * 1e3
        for row in json.loads((RESULTS / MEASURED).read_text())["rows"]
        if (row["mode"], row["way"]) == ("full", "captured")
    }
    gpu = next(gpu for gpu in GPUS if gpu.name == "H100")
    for (short, batch), goal in GOALS.items():
        model = model_without_memory(model_config(short))
        nodes = iteration(model, batch, SEQ_LEN, gpu) if batch <= MAX_SKINNY_ROWS else None
        model.linear.max_rows = MAX_SKINNY_ROWS_BY_WARPGROUPS
        with tuned("wgmma=1"):
            by_warpgroups = iteration(model, batch, SEQ_LEN, gpu)
        bound = sum(each.moved_bytes for each in kernels(nodes or by_warpgroups)) / gpu.memory_rate
        # Larger batches were measured with different kernels.
        before = seconds(gpu, nodes, LATENCIES_AFTER_THE_WAIT) if nodes and batch <= 8 else None
        rows.append(
            {
                "model": MODELS[short],
                "batch": batch,
                "measured_ms": round(measured[short, batch], 3)
                if (short, batch) in measured
                else None,
                "explained_ms": None if before is None else round(before * 1e3, 3),
                "expected_ms": None if nodes is None else round(seconds(gpu, nodes) * 1e3, 3),
                "warpgroups_ms": round(seconds(gpu, by_warpgroups) * 1e3, 3),
                "goal_ms": goal,
                "bytes_ms": round(bound * 1e3, 3),
            }
        )
    return rows


def round_rows() -> list[Row]:
    """Rounds with a public draft head, beside a step at full depth without it."""
    rows = []
    model = model_without_memory(model_config("8b"))
    for name, num_drafts in ROUNDS.items():
        model.draft_head = eagle3(model) if name == "EAGLE-3" else dflash(model, num_drafts)
        for batch in ROUND_BATCHES:
            on = {}
            for gpu in GPUS:
                whole = seconds(gpu, draft_round(model, batch, SEQ_LEN, gpu, num_drafts))
                step = seconds(gpu, iteration(model, batch, SEQ_LEN, gpu))
                on[gpu.name] = {"us": round(whole * 1e6, 2), "of_step": round(whole / step, 3)}
            rows.append({"head": name, "drafts": num_drafts, "batch": batch, "on": on})
    return rows


def prompt_rows() -> list[Row]:
    """Attention of a layer to chunks of prompts on an H100, by warps and by warpgroups."""
    gpu = next(gpu for gpu in GPUS if gpu.name == "H100")
    rows = []
    for shape in PROMPTS:
        row: Row = {"case": shape.name}
        for name, setting in (("warps_us", ""), ("warpgroups_us", "wgmma_attention=1")):
            with tuned(setting), without_memory():
                work = attention_work(shape, torch.bfloat16, META)
                row[name] = round(seconds(gpu, nodes_of(work.call, gpu, Known())) * 1e6, 1)
        rows.append(row)
    return rows


def least_seconds_by_torch(gpu: Gpu, nodes: Sequence[Node], num_rows: int) -> float:
    """Seconds of a step whose products are torch's, by bytes or the data sheet's operations alone.

    Kernels after a product, for appends, activations and residuals, cost their boundaries.
    """
    total = 0.0
    for node in nodes:
        kernel = node.kernel if isinstance(node, KernelLaunch) else ""
        if isinstance(node, KernelLaunch) and kernel.startswith("skinny_warpgroup"):
            multiplied = num_rows * node.reads["weight"] / HOPPER_PEAK  # two bytes a number
            total += max(node.moved_bytes / gpu.memory_rate, multiplied)
            total += (3 if "gated" in kernel else 2) * gpu.boundary
        else:
            total += seconds(gpu, [node])
    return total


def many_rows() -> list[Row]:
    """Steps of more than 32 rows on an H100 by warpgroups, beside torch's products."""
    rows = []
    for short, model, gpu in _by_warpgroups():
        for count in MANY_ROWS:
            nodes = iteration(model, count, SEQ_LEN, gpu)
            row = {"model": MODELS[short], "rows": count}
            row["warpgroups_ms"] = round(seconds(gpu, nodes) * 1e3, 2)
            row["torch_ms"] = round(least_seconds_by_torch(gpu, nodes, count) * 1e3, 2)
            rows.append(row)
    return rows


def verification_rows() -> list[Row]:
    """Rounds of self-speculation on an H100 by warpgroups, whose drafts are all verified."""
    rows = []
    for short, model, gpu in _by_warpgroups():
        for batch, drafts in VERIFICATIONS:
            step = seconds(gpu, iteration(model, batch, SEQ_LEN, gpu))
            layers = model.config.num_layers // 4
            nodes = draft_round(model, batch, SEQ_LEN, gpu, drafts, first_layers=layers)
            whole = seconds(gpu, nodes)
            row = {"model": MODELS[short], "batch": batch, "drafts": drafts, "layers": layers}
            row |= {"step_ms": round(step * 1e3, 2), "round_ms": round(whole * 1e3, 2)}
            row["speed_up"] = round((1 + ACCEPTANCE * drafts) * step / whole, 2)
            rows.append(row)
    return rows


def _by_warpgroups() -> Iterator[tuple[str, LlamaModel, Gpu]]:
    """Models whose products are all by warpgroups."""
    gpu = next(gpu for gpu in GPUS if gpu.name == "H100")
    for short in ("1b", "8b"):
        model = model_without_memory(model_config(short))
        model.linear.max_rows = MAX_SKINNY_ROWS_BY_WARPGROUPS
        with tuned("wgmma=1"):
            yield short, model, gpu


def figures() -> Figures:
    """All figures of the model; they are deterministic."""
    return {
        "dtype": "bfloat16",
        "seq_len": SEQ_LEN,
        "gpus": [dataclasses.asdict(gpu) for gpu in GPUS],
        "ops": op_rows(),
        "iterations": iteration_rows(),
        "goals": goal_rows(),
        "rounds": round_rows(),
        "prompts": prompt_rows(),
        "many_rows": many_rows(),
        "verifications": verification_rows(),
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

    names = (
        *("measured_ms", "explained_ms", "expected_ms", "warpgroups_ms"),
        *("goal_ms", "bytes_ms"),
    )
    lines = [
        [row["model"], str(row["batch"]), *(cell(row[name]) for name in names)]
        for row in result["goals"]
    ]
    head = [
        *("model", "batch", "measured, ms", "modelled"),
        *("expected now", "by warpgroups", "goal", "bytes"),
    ]
    text = (
        "A decoding step at full depth on an H100. Measured: the engine's wall clock, most of it "
        "the host's at a batch of 32, with kernels that looked up the places of rows and keys only "
        "after the wait for the previous kernel. Modelled: those kernels by the model of time. "
        "Expected now: today's kernels by the same model, and with `EECORE_CUDA_TUNING=wgmma=1`. "
        "Bytes: what the bytes alone allow. "
        "`python -m bench gpu-expected`"
    )
    return f"{markdown_table(head, lines, text_columns=1)}\n\n{text}"


def rounds_table(result: Figures) -> str:
    names = [gpu["name"] for gpu in result["gpus"]]
    lines = []
    for row in result["rounds"]:
        cells = (f"{row['on'][n]['us']:,.0f} ({row['on'][n]['of_step']:.2f})" for n in names)
        lines.append([row["head"], str(row["drafts"]), str(row["batch"]), *cells])
    head = ["head", "drafts", "batch", *(f"{name}, us" for name in names)]
    text = (
        f"Rounds of {MODELS['8b']}'s shape with a public head, by the same model: all layers "
        "verify the drafts, and the head makes those of the next round. In brackets: as a multiple "
        "of a step at full depth. EAGLE-3 has one layer and a vocabulary of 32,000; DFlash has "
        "five layers, as many taps, and the model's LM head. `python -m bench gpu-expected`"
    )
    return f"{markdown_table(head, lines, text_columns=1)}\n\n{text}"


def prompts_table(result: Figures) -> str:
    lines = [
        [row["case"], f"{row['warps_us']:.0f}", f"{row['warpgroups_us']:.0f}"]
        for row in result["prompts"]
    ]
    text = (
        "Attention of a layer to chunks of prompts on an H100, by the same model: by the kernel "
        "for any number of queries, of whose barriers and shared memory the model knows nothing "
        "(the second chunk was measured at 815 us), and with "
        "`EECORE_CUDA_TUNING=wgmma_attention=1`. `python -m bench gpu-expected`"
    )
    return f"{markdown_table(['chunk', 'warps, us', 'warpgroups, us'], lines)}\n\n{text}"


def many_rows_table(result: Figures) -> str:
    lines = [
        [row["model"], str(row["rows"]), f"{row['warpgroups_ms']:.2f}", f"{row['torch_ms']:.2f}"]
        for row in result["many_rows"]
    ]
    text = (
        "A decoding step of as many rows at full depth on an H100, by the same model, with "
        "`EECORE_CUDA_TUNING=wgmma=1`. Torch at least: the same kernels with products that take no "
        "longer than their bytes from memory or the data sheet's operations, and boundaries alone "
        "for the kernels that torch's products need in addition. `python -m bench gpu-expected`"
    )
    head = ["model", "rows", "by warpgroups, ms", "torch at least, ms"]
    return f"{markdown_table(head, lines, text_columns=1)}\n\n{text}"


def verifications_table(result: Figures) -> str:
    names = ("batch", "drafts", "layers", "step_ms", "round_ms", "speed_up")
    lines = [[row["model"], *(str(row[name]) for name in names)] for row in result["verifications"]]
    text = (
        "Rounds of self-speculation on an H100, by the same model, with "
        "`EECORE_CUDA_TUNING=wgmma=1`: each request has as many drafts of the first layers, and "
        "all of them are verified together. Speed: tokens a second as a multiple of those of full "
        f"depth, with {ACCEPTANCE:.0%} of the drafts accepted. `python -m bench gpu-expected`"
    )
    head = ["model", "requests", "drafts", "of layers", "step, ms", "round, ms", "speed"]
    return f"{markdown_table(head, lines, text_columns=1)}\n\n{text}"


def about(result: Figures) -> str:
    return (
        f"Expected, not measured: {result['dtype']}, {result['seq_len']} keys a row, one graph, "
        "the host left out; checks are softmax, after half of the layers; kernels and bytes as on "
        "the first GPU. The time of a kernel is the boundary to the previous kernel, its latency, "
        "and the longest of the times of memory, L2 and tensor cores; the constants of each GPU, "
        "with their sources, are in `bench/gpu/devices.py`. `bench gpu` and `bench gpu-decode` "
        f"report a measured time outside of {MIN_RATIO} to {MAX_RATIO} times the expected time as "
        "a finding. "
        "`python -m bench gpu-expected`"
    )


def ops_table(result: Figures) -> str:
    """The table of cases whose work takes at least as long as their boundaries on some GPU."""
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
        f"Expected times of the cases of `bench gpu`, by the same model. {rest} more cases are "
        "mostly boundaries between kernels."
    )
    return f"{markdown_table(head, lines, text_columns=2)}\n\n{text}"


TABLES: dict[str, Callable[[Figures], str]] = {
    "gpu_expected_iterations": iterations_table,
    "gpu_expected_ops": ops_table,
    "gpu_expected_goals": goals_table,
    "gpu_expected_rounds": rounds_table,
    "gpu_expected_prompts": prompts_table,
    "gpu_expected_many_rows": many_rows_table,
    "gpu_expected_verifications": verifications_table,
}
REPORTS = (Report("gpu_expected", TABLES),)


def main(words: Sequence[str]) -> None:
    arguments = command.parser("gpu-expected", __doc__).parse_args(words)
    REPORTS[0].finish(figures(), arguments)
