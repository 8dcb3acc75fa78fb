"""Choices that need no new build: decoding steps under each setting of EECORE_CUDA_TUNING.

python -m bench gpu-variants [--model 135m 1b] [--batch 1 8 32] [--json FILE]

Of each model and batch the program of a step at full depth is captured under each setting, and all
of them are launched by turns on states of their own (:meth:`bench.gpu.decode.Bench.program`): the
GPU's own time, the median over turns. Results are the same under all settings, but for the order of
sums under wgmma=1, which also has eecore's products take 256 rows, and under wgmma_attention=1.
Attention of drafts and of prompts, of which such a step has none, is timed alone.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import eecore
from bench.gpu.attention import AttentionShape, attention_work
from bench.gpu.decode import Bench, Case, measure_programs
from bench.gpu.devices import TUNING
from bench.gpu.timing import elapsed, time_calls
from eecore.models import LlamaModel
from eecore.models.linear import max_skinny_rows

SETTINGS = (
    "",
    "early_start=0",
    "early_places=0",
    "early_trigger=1",
    "ring_kib=64",
    "ring_kib=48",
    "early_trigger=1,ring_kib=48",
)
OF_MANY_ROWS = ("shared_rows=8", "wgmma=1")
OF_DRAFTS = ("", "wide_attention=0")
OF_PROMPTS = ("", "wgmma_attention=1")
DRAFTS, CHUNK = 8, 512  # queries of a request
KEYS, FEW_KEYS = 4096, 40  # few keys on a CPU, where the times mean nothing
FEW_ROWS = 8
TURNS, LAUNCHES = 5, 20


@contextmanager
def tuned(setting: str) -> Iterator[None]:
    """A context in which programs are captured with the setting, and keep it."""
    before = os.environ.get(TUNING)
    os.environ[TUNING] = setting
    try:
        yield
    finally:
        os.environ.pop(TUNING)
        if before is not None:
            os.environ[TUNING] = before


def settings_of(batch: int) -> tuple[str, ...]:
    """The settings to try at a batch size."""
    return SETTINGS if batch <= FEW_ROWS else (*SETTINGS, *OF_MANY_ROWS)


def measure(bench: Bench) -> dict[str, float]:
    """Seconds of a run of the program by setting."""
    device = bench.model.device
    with ExitStack() as stack:
        launches = {}
        for setting in settings_of(bench.batch):
            with tuned(setting):
                bench.model.linear.max_rows = max_skinny_rows(device)
                engine = bench.engine("captured")
                bench.run(engine, eecore.Full())
                launches[setting] = stack.enter_context(bench.program(engine, eecore.Full()))
        bench.model.linear.max_rows = max_skinny_rows(device)
        found: dict[str, list[float]] = {setting: [] for setting in launches}
        for _ in range(TURNS):
            for setting, launch in launches.items():
                launch()
                run = elapsed(device, lambda go=launch: [go() for _ in range(LAUNCHES)])
                found[setting].append(run / LAUNCHES)
    return {setting: statistics.median(times) for setting, times in found.items()}


def measure_attention(bench: Bench, queries: int, settings: Sequence[str]) -> dict[str, float]:
    """Seconds of attention by setting: the last queries of each request over many keys."""
    config, device = bench.model.config, bench.model.device
    keys = KEYS if device.type == "cuda" else FEW_KEYS
    heads = (config.num_q_heads, config.num_kv_heads, config.head_dim)
    shape = AttentionShape(bench.batch, min(queries, keys), keys, *heads)
    attend = attention_work(shape, torch.bfloat16, device).call
    found = {}
    for setting in settings:
        with tuned(setting):
            found[setting] = time_calls(device, [attend], TURNS).median
    return found


def table(result: dict[str, Any]) -> str:
    """The table of each setting, compared with no setting, as Markdown."""
    lines = [
        f"{result['device']}, torch {result['torch']}, commit {result['commit']}: a step at full "
        f"depth, and attention of {DRAFTS} drafts and of {CHUNK} tokens of a prompt a request over "
        f"{KEYS:,} keys, under `{TUNING}`, the GPU's own time. `python -m bench gpu-variants`",
        "",
        "| model | batch | setting | us | of none |",
        "|---|---:|---|---:|---:|",
    ]
    for row in result["rows"]:
        mode = f", {row['mode']}" if "mode" in row else ""
        case = f"| {row['model']}{mode} | {row['batch']} |"
        if "error" in row:
            lines.append(f"{case} {row['error']} |||")
        for setting, seconds in row.get("seconds", {}).items():
            share = seconds / row["seconds"][""]
            lines.append(f"{case} {setting or 'none'} | {seconds * 1e6:.1f} | {share:.3f} |")
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    def cases(_: LlamaModel) -> Iterator[Case]:
        for mode, queries, settings in (
            ("drafts", DRAFTS, OF_DRAFTS),
            ("prompts", CHUNK, OF_PROMPTS),
        ):
            yield (
                {"mode": mode},
                lambda bench, of=(queries, settings): {"seconds": measure_attention(bench, *of)},
            )
        yield {}, lambda bench: {"seconds": measure(bench)}

    return measure_programs(
        "gpu-variants", __doc__, words, cases, table, batches=(1, 8, 32), seconds=30
    )
