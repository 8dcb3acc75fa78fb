"""append_drafts when every row drafts on, at the batch sizes of serving."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.cases import drafting_rows
from eecore import ops
from tests.cases import LLAMA_1B


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def bench_append_drafts(benchmark, num_rows: int) -> None:
    made = drafting_rows(num_rows, LLAMA_1B.hidden_size, torch.float32, torch.device("cpu"))
    given = (made.hidden, made.token, made.confidence)
    benchmark(ops.append_drafts, *given, 0, made.draft_round, made.active)
