"""gather_states of eight drafts a row, at the batch sizes of serving."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.cases import drafting_rows
from bench.harness.ceilings import report
from eecore import ops
from tests.cases import LLAMA_1B


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def bench_gather_states(benchmark, num_rows: int) -> None:
    made = drafting_rows(num_rows, LLAMA_1B.hidden_size, torch.float32, torch.device("cpu"))
    states = made.draft_round.states
    assert states is not None
    out = torch.empty(states.shape[0] * states.shape[1], states.shape[2])
    benchmark(ops.gather_states, states, made.hidden, made.verification, out)
    report(benchmark, moved_bytes=2 * out.nbytes)
