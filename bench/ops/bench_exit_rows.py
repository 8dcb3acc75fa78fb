"""exit_rows when every row passes its check and exits, at the batch sizes of serving."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.gpu.case import CPU, Case, Setting, Work, small_cases
from bench.ops.rows import active_rows, head_rows
from eecore import ops


def exiting_rows(
    num_seqs: int, hidden_size: int, setting: Setting
) -> tuple[torch.Tensor, ops.ExitingRows]:
    """States, and rows that exit at any confidence."""
    hidden, device = setting.states(num_seqs, hidden_size), setting.device
    whole = torch.zeros(num_seqs, dtype=torch.int32, device=device)
    no = torch.zeros(num_seqs, dtype=torch.bool, device=device)
    rows = ops.ExitingRows(
        exit_after=whole + 99,
        together=no,
        fills=~no,
        kind=whole + 1,
        accepted=no.clone(),
        exited=no.clone(),
        exit_layer=whole.clone(),
        fill_from=whole.clone(),
        measured_at=whole.clone(),
        confidence=torch.zeros(num_seqs, device=device),
        token=whole.long(),
        logprob=torch.zeros(num_seqs, device=device),
        token_at=whole.clone(),
        pending=whole.clone(),
        hidden=torch.empty_like(hidden),
        all_exited=torch.zeros(1, dtype=torch.bool, device=device),
    )
    return hidden, rows


def exit_all(num_seqs: int, hidden_size: int, setting: Setting = CPU) -> Work:
    """Every row exits in every call; the time includes the reset of the rows before it."""
    hidden, rows = exiting_rows(num_seqs, hidden_size, setting)
    head, active = head_rows(num_seqs, setting.device), active_rows(num_seqs, setting.device)
    thresholds = torch.zeros(num_seqs, device=setting.device)

    def call() -> None:
        rows.exited.zero_()
        ops.exit_rows(hidden, 4, rows, active, thresholds=thresholds, head=head)

    return Work(call)


@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def bench_exit_rows(benchmark, num_seqs: int) -> None:
    benchmark(exit_all(num_seqs, 2048).call)


def gpu_cases(setting: Setting) -> Iterator[Case]:
    size = setting.hidden_size
    moved, name = 2 * size * setting.dtype.itemsize, f"hidden {size}, B={{}}, and a fill"
    return small_cases("exit_rows", name, moved, lambda b: exit_all(b, size, setting))
