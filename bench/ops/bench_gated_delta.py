"""gated_delta of a step and of a prompt, with the sizes of Qwen3.5-0.8B."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from bench.gpu.case import CPU, Case, Setting, Work, small_cases
from bench.harness.ceilings import report
from eecore import ops

HEADS, DIM, TAPS, NUM_KEPT = 16, 128, 4, 96
CONV_SIZE, VALUE_SIZE = 3 * HEADS * DIM, HEADS * DIM
STATE_BYTES = HEADS * DIM * DIM * 4


def recur(num_rows: int, num_seqs: int, setting: Setting = CPU) -> Work:
    """Rows of texts, prompts from the first position, steps after one position that was kept."""
    each, device = num_rows // num_seqs, setting.device
    before = int(each == 1)
    tiles = (num_seqs, HEADS, DIM // ops.DELTA_TILE, DIM, ops.DELTA_TILE)
    kept = ops.DeltaState(
        torch.zeros(tiles, device=device),
        setting.states(num_seqs * NUM_KEPT, CONV_SIZE + 2 * HEADS).view(num_seqs, NUM_KEPT, -1),
        torch.zeros(num_seqs, HEADS, dtype=torch.int32, device=device),
    )
    certain = before + (each if each > 1 else 0)
    states = [[number + 1, certain] for number in range(num_seqs)]
    weights = ops.DeltaWeights(
        setting.states(TAPS, CONV_SIZE),
        torch.zeros(HEADS, device=device),
        torch.zeros(HEADS, device=device),
        setting.states(1, DIM)[0],
    )
    call = partial(
        ops.gated_delta,
        setting.states(num_rows, CONV_SIZE + VALUE_SIZE),
        setting.states(num_rows, 2 * HEADS),
        kept,
        torch.tensor(states, dtype=torch.int32, device=device),
        weights,
        torch.full((num_seqs,), each + before, dtype=torch.int32, device=device),
        torch.arange(0, num_rows + 1, each, dtype=torch.int32, device=device),
        out=setting.states(num_rows, VALUE_SIZE),
    )
    return Work(call)


@pytest.mark.parametrize(("num_rows", "num_seqs"), [(1, 1), (8, 8), (8, 1), (512, 1)])
def bench_gated_delta(benchmark, num_rows: int, num_seqs: int) -> None:
    benchmark(recur(num_rows, num_seqs).call)
    rows = num_rows * (CONV_SIZE + 2 * VALUE_SIZE + 2 * HEADS) * 4
    report(benchmark, moved_bytes=rows + 2 * num_seqs * STATE_BYTES)


def gpu_cases(setting: Setting) -> Iterator[Case]:
    moved, name = 2 * STATE_BYTES, f"{HEADS} heads of {DIM}, B={{}}"
    return small_cases("gated_delta", name, moved, lambda b: recur(b, b, setting))
