"""exit_confidence_mlp: CALM's linear classifier, and one with a ReLU hidden layer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.nn import functional

from bench.gpu.case import Case, Setting, Work, small_cases
from bench.harness.ceilings import report
from eecore import ops
from tests.cases import LLAMA_8B, SMOLLM2_135M


def classifier(
    num_seqs: int, hidden_size: int, inner_size: int | None, setting: Setting
) -> list[torch.Tensor]:
    """States, and the weights of a classifier."""
    rows, device = inner_size or 2, setting.device
    weights = [torch.randn(rows, hidden_size, device=device) / 64, torch.randn(rows, device=device)]
    if inner_size is not None:
        weights += [torch.randn(2, inner_size, device=device), torch.randn(2, device=device)]
    return [setting.states(num_seqs, hidden_size), *weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inner_size", [None, 512], ids=["linear", "inner512"])
@pytest.mark.parametrize("hidden_size", [SMOLLM2_135M.hidden_size, LLAMA_8B.hidden_size])
@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def bench_exit_confidence_mlp(
    benchmark, num_seqs: int, hidden_size: int, inner_size: int | None, dtype: torch.dtype
) -> None:
    tensors = classifier(num_seqs, hidden_size, inner_size, Setting(dtype))
    benchmark(ops.exit_confidence_mlp, *tensors)
    report(
        benchmark,
        moved_bytes=sum(tensor.nbytes for tensor in tensors) + 4 * num_seqs,
        flops=2 * num_seqs * (inner_size or 2) * hidden_size,
    )


def gpu_cases(setting: Setting) -> Iterator[Case]:
    size = setting.hidden_size

    def make(num_seqs: int) -> Work:
        hidden, weight, bias = classifier(num_seqs, size, None, setting)
        call = partial(ops.exit_confidence_mlp, hidden, weight, bias)

        def in_torch() -> torch.Tensor:
            return functional.linear(hidden.float(), weight, bias).softmax(-1)[:, 1]

        return Work(call, {"torch": in_torch}, call, lambda _: in_torch())

    name, moved = f"{size} -> 2, B={{}}", size * setting.dtype.itemsize
    return small_cases("exit_confidence_mlp", name, moved, make, more_bytes=8 * size)
