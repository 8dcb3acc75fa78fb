"""gather_states: kept states and last ones, as the ragged rows of a verification."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import emulated
import reference
from cases import BATCH_SIZES, DTYPES, HIDDEN_SIZES
from draft_rounds import Rounds, random_verification
from eecore import ops
from random_calls import Arguments, Checked, Maker, compare


def drafted_states(
    rounds: Rounds, hidden_size: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, ops.Verification]:
    """States with others in between, last states, and the verification."""
    rows, width = rounds.num_rows, rounds.num_steps + 1
    states = rounds.uniform(rows, 2 * width, hidden_size).to(dtype)[:, ::2]
    last = rounds.uniform(rows, hidden_size + 1).to(dtype)[:, 1:]
    verification = reference.begin_verification(rounds.drafted(), rows * width + 2)
    return states, last, verification


def assert_gathered(
    states: Tensor, last: Tensor, verification: ops.Verification, device: torch.device
) -> None:
    expected = reference.gather_states(states, last, verification)
    out = expected.new_full((len(expected), expected.shape[1] + 3), 7.0)[:, 3:]
    assert ops.gather_states(states, last, verification, out) is out
    if not emulated.is_cuda_kernel(device):  # the CPU does not write the rows after them
        expected[int(verification.num_tokens) :] = 7.0
    assert torch.equal(out, expected)


@pytest.mark.parametrize("num_steps", [1, 6])
@pytest.mark.parametrize("num_seqs", BATCH_SIZES)
def test_it_matches_the_reference(num_seqs: int, num_steps: int, device: torch.device) -> None:
    assert_gathered(*drafted_states(Rounds(num_seqs, num_steps, device), 33), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_states(hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    if not emulated.supports(device, dtype):
        pytest.skip("float16 is for CUDA")
    assert_gathered(*drafted_states(Rounds(5, 3, device), hidden_size, dtype), device)


def fuzzed_call(m: Maker) -> Checked:
    rows, steps, size, dtype = m.size(9), m.size(6), m.size(40), m.dtype()
    _, verification = random_verification(m, rows, steps)
    tokens = len(verification.token_ids)
    given = {
        "states": m.placed(m.normal(rows, steps + 1, size).to(dtype), 1),
        "last": m.states(rows, size, dtype),
        "sequence": m.placed(verification.sequence),
        "query_start_loc": m.placed(verification.query_start_loc),
        "num_tokens": m.placed(verification.num_tokens),
        "out": m.states(tokens, size, dtype),
    }

    def oracle(before: Arguments) -> dict[str, Tensor]:
        out = reference.gather_states(before["states"], before["last"], verification)
        count = int(verification.num_tokens)
        return {"out": torch.cat((out[:count], before["out"][count:]))}

    return given, compare(oracle)
