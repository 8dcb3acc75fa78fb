"""Where a decoding step goes: inside kernels, and between them.

Decodes greedily at full depth. The clock stands in for the callables that the wrappers in
eecore.ops call, and sums their time; what checks and the dispatcher take of it is measured apart,
by the same calls with no layers or no rows to do, and counts as time between kernels. Writes
bench/results/step.json and the table in bench/RESULTS.md, in about a minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import eecore
from eecore import ops

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from get_smollm2 import get_smollm2  # noqa: E402
from harness import insert  # noqa: E402
from tiny_models import write_model  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "step.json"
SMALL = {
    "num_hidden_layers": 12,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 49152,
}
PROMPT = list(range(1, 33))


class Clock:
    """Seconds inside ops since the last reading, and the last call of each."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def timed(self, name: str, op: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            start = time.perf_counter()
            op(*args)
            self.seconds += time.perf_counter() - start
            self.calls[name] = op, args

        return call

    @contextmanager
    def running(self) -> Iterator[None]:
        """Stands in for every op in the meantime."""
        before = {name: getattr(ops, f"_{name}") for name in ops.OP_NAMES}
        for name, op in before.items():
            setattr(ops, f"_{name}", self.timed(name, op))
        try:
            yield
        finally:
            for name, op in before.items():
                setattr(ops, f"_{name}", op)

    def idle_seconds(self) -> float:
        """What one call of each op takes that was called, with nothing to do."""
        total = 0.0
        for name, (op, args) in self.calls.items():
            if name == "decoder_layers":  # begin_layer, end_layer
                args = (*args[:-5], 0, 0, *args[-3:])
            else:  # no rows; hidden comes first, then what is per layer or vocabulary, outputs last
                assert name == "exit_confidence_softmax", name
                args = (args[0][:0], *args[1:5], *(out[:0] for out in args[5:]))
            times = []
            for _ in range(300):
                start = time.perf_counter()
                op(*args)
                times.append(time.perf_counter() - start)
            total += statistics.median(times)
        return total


def measure(model: eecore.Model, batch: int, steps: int) -> dict[str, Any]:
    """Milliseconds of a step and of its kernels: medians, and those of the fastest step."""
    engine = model.engine()
    sampling = eecore.SamplingParams(max_tokens=steps + 20, ignore_eos=True)
    for _ in range(batch):
        engine.add_request(PROMPT, sampling=sampling)
    clock = Clock()
    rows: list[tuple[float, float]] = []
    with torch.inference_mode(), clock.running():
        for _ in range(10):
            engine.step()
        clock.calls.clear()
        for _ in range(steps):
            clock.seconds = 0.0
            start = time.perf_counter()
            engine.step()
            rows.append((time.perf_counter() - start, clock.seconds))
        idle = clock.idle_seconds()
    between = statistics.median(step - inside + idle for step, inside in rows)
    step = statistics.median(step for step, _ in rows)
    fastest = min(step for step, _ in rows)
    return {
        "batch": batch,
        "step_ms": step * 1e3,
        "fastest_step_ms": fastest * 1e3,
        "between_kernels_us": between * 1e6,
        "of_it_calls_us": idle * 1e6,
        "share_between": between / step,
        "ops_called": sorted(clock.calls),
    }


def markdown(result: dict[str, Any]) -> str:
    """The table, with what it was measured on."""
    lines = [
        "| model | threads | batch | step (ms) | fastest step | between kernels (us) "
        "| of it calls of ops | share between |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        cells = (
            row["model"],
            str(row["num_threads"]),
            str(row["batch"]),
            f"{row['step_ms']:.2f}",
            f"{row['fastest_step_ms']:.2f}",
            f"{row['between_kernels_us']:.0f}",
            f"{row['of_it_calls_us']:.0f}",
            f"{row['share_between']:.1%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    about = (
        f"Greedy decoding at full depth, float32, {result['cpu_capability']} kernels, "
        f"torch {result['torch']}; medians of {result['steps']} steps. Between kernels: the step "
        "without the time inside ops, plus what calls of the same ops take with nothing to do. "
        "`python bench/bench_step.py`"
    )
    return "\n".join([*lines, "", about])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--small-only", action="store_true", help="leave SmolLM2 out")
    parser.add_argument("--dry-run", action="store_true", help="print the table, write nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small = write_model(Path(folder), "llama", **SMALL)
        models = {
            "12 layers of 256, vocabulary 49152": eecore.load(
                small, device="cpu", kv_cache_tokens=8192
            )
        }
    if not arguments.small_only:
        models["SmolLM2-135M"] = eecore.load(
            get_smollm2(), device="cpu", dtype="float32", kv_cache_tokens=8192
        )
    rows = []
    for name, model in models.items():
        for num_threads, batch in itertools.product(arguments.threads, (1, 8)):
            torch.set_num_threads(num_threads)
            figures = measure(model, batch, arguments.steps)
            rows.append({"model": name, "num_threads": num_threads, **figures})
    result = {
        "cpu_capability": eecore.build_info()["cpu_capability"],
        "torch": torch.__version__,
        "steps": arguments.steps,
        "rows": rows,
    }
    table = markdown(result)
    print(table)
    if not arguments.dry_run:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        insert(ROOT / "bench" / "RESULTS.md", "step", table)


if __name__ == "__main__":
    main()
