"""short_conv of a step and of a prompt, with the width of LFM2-350M."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from bench.gpu.case import CPU, Case, Setting, Work, small_cases
from bench.harness.ceilings import report
from eecore import ops

HIDDEN_SIZE, PAGE_SIZE, TAPS = 1024, 16, 3


def convolve(num_rows: int, num_seqs: int, setting: Setting = CPU) -> Work:
    """Rows of texts that begin with the call, or that have one position before it."""
    each, device = num_rows // num_seqs, setting.device
    before = int(each == 1)
    pages = -(-(each + before) // PAGE_SIZE)
    table = torch.arange(num_seqs * pages, dtype=torch.int32, device=device).view(num_seqs, pages)
    first = table[:, 0].long() * PAGE_SIZE + before
    slots = (first[:, None] + torch.arange(each, device=device)).view(-1)
    state = setting.states(num_seqs * pages * PAGE_SIZE, HIDDEN_SIZE)
    call = partial(
        ops.short_conv,
        setting.states(num_rows, 3 * HIDDEN_SIZE),
        state.view(-1, PAGE_SIZE, HIDDEN_SIZE),
        slots,
        setting.states(TAPS, HIDDEN_SIZE),
        table,
        torch.full((num_seqs,), each + before, dtype=torch.int32, device=device),
        torch.arange(0, num_rows + 1, each, dtype=torch.int32, device=device),
        out=setting.states(num_rows, HIDDEN_SIZE),
    )
    return Work(call)


@pytest.mark.parametrize(("num_rows", "num_seqs"), [(1, 1), (8, 8), (512, 1)])
def bench_short_conv(benchmark, num_rows: int, num_seqs: int) -> None:
    benchmark(convolve(num_rows, num_seqs).call)
    report(benchmark, moved_bytes=(5 * num_rows + 2 * num_seqs) * HIDDEN_SIZE * 4)


def gpu_cases(setting: Setting) -> Iterator[Case]:
    moved, name = 7 * HIDDEN_SIZE * setting.dtype.itemsize, f"hidden {HIDDEN_SIZE}, B={{}}"
    return small_cases("short_conv", name, moved, lambda b: convolve(b, b, setting))
