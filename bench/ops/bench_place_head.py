"""place_head of every row, at the batch sizes of serving."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.cases import head_rows
from eecore import ops


@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def bench_place_head(benchmark, num_seqs: int) -> None:
    head = head_rows(num_seqs, torch.device("cpu"))
    out = ops.HeadRows(*(tensor.clone() for tensor in (head.token, *head[2:])))
    index = torch.arange(num_seqs, dtype=torch.int32)
    benchmark(lambda: ops.place_head(head, out, index=index, as_probability=True))
