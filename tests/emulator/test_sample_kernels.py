"""The number of kernels of sample_tokens."""

from __future__ import annotations

import pytest
import torch

import emulated
from eecore import ops

BASE = ["sample_measure_kernel", "sample_weigh_kernel", "sample_sift_kernel", "sample_draw_kernel"]


@pytest.mark.parametrize("vocab_size", [300, 5000])
@pytest.mark.parametrize("probs", [False, True])
@pytest.mark.parametrize("num_top", [None, 0, 2])
def test_a_few_kernels_whatever_rows_ask_for(
    num_top: int | None, probs: bool, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ops.SamplingRows(
        temperature=torch.tensor([0.0, 1.0]),
        top_k=torch.tensor([0, 40], dtype=torch.int32),
        top_p=torch.tensor([1.0, 0.9]),
        min_p=torch.zeros(2),
        repetition_penalty=torch.ones(2),
        seed=torch.arange(2),
        seen=torch.zeros(2, 0, dtype=torch.int64),
    )
    out = ops.SampledRows(
        torch.zeros(2, dtype=torch.int64),
        *(torch.zeros(2) for _ in range(3)),
        torch.zeros(2, vocab_size) if probs else None,
        None,
        None if num_top is None else torch.zeros(2, num_top, dtype=torch.int64),
        None if num_top is None else torch.zeros(2, num_top),
    )
    logits, positions = torch.randn(2, vocab_size), torch.arange(2)
    emulated.route(monkeypatch)
    launched = emulated.kernels_of(
        lambda: ops.sample_tokens(logits, rows, out, purpose=0, positions=positions)
    )
    expected = [*BASE]
    if probs:
        expected.append("sample_probs_kernel")
    if num_top:
        expected += ["sample_top_slices_kernel", "sample_top_kernel"]
    assert launched == expected
