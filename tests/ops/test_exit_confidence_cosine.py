"""exit_confidence_cosine: zero vectors, extreme magnitudes, NaN, rows accepted at once."""

from __future__ import annotations

import pytest
import torch
from test_accept_mask import assert_accepts, measured, random_rows
from torch import Tensor

from cases import BATCH_SIZES, DTYPES, HIDDEN_SIZES, TOLERANCES
from eecore import ops
from random_calls import Checked, Maker


def exit_confidence_cosine(previous: Tensor, hidden: Tensor) -> Tensor:
    """Cosine per row in float64, 0 for a zero vector; see eecore.ops.exit_confidence_cosine."""
    previous, hidden = previous.double(), hidden.double()
    norms = previous.norm(dim=-1) * hidden.norm(dim=-1)
    cosine = (previous * hidden).sum(dim=-1) / norms
    return torch.where(norms == 0, 0.0, cosine).float()


def random_states(
    num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """States of two layers: the second is the first plus an update."""
    generator = torch.Generator().manual_seed(num_seqs * 10007 + hidden_size)
    previous = torch.randn(num_seqs, hidden_size, generator=generator)
    update = torch.randn(num_seqs, hidden_size, generator=generator)
    size = torch.rand(num_seqs, 1, generator=generator) * 3
    return previous.to(device, dtype), (previous + size * update).to(device, dtype)


def assert_matches(previous: torch.Tensor, hidden: torch.Tensor) -> None:
    expected = exit_confidence_cosine(previous, hidden)
    tolerance = TOLERANCES[torch.float32]  # the result is float32 whatever the states are
    torch.testing.assert_close(
        ops.exit_confidence_cosine(previous, hidden),
        expected,
        rtol=tolerance.rtol,
        atol=tolerance.atol,
        equal_nan=True,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_matches_the_reference(hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    for num_seqs in BATCH_SIZES:
        assert_matches(*random_states(num_seqs, hidden_size, dtype, device))


def test_a_zero_vector_has_confidence_zero(device: torch.device) -> None:
    states = torch.randn(4, 70, device=device)
    states[1] = 0
    other = torch.randn(4, 70, device=device)
    other[2] = 0
    got = ops.exit_confidence_cosine(states, other)
    assert got[1] == 0
    assert got[2] == 0
    assert (got[[0, 3]] != 0).all()
    assert ops.exit_confidence_cosine(torch.zeros(2, 70), torch.zeros(2, 70)).tolist() == [0, 0]


def test_equal_and_opposite_vectors_give_exactly_one_and_minus_one(device: torch.device) -> None:
    states = random_states(64, 577, torch.float32, device)[0]
    assert (ops.exit_confidence_cosine(states, states) == 1).all()
    assert (ops.exit_confidence_cosine(states, -states) == -1).all()
    assert (ops.exit_confidence_cosine(states, 3 * states).abs() <= 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("previous_scale", [1e-38, 1e-20, 1.0, 1e18, 1e37])
@pytest.mark.parametrize("hidden_scale", [1e-30, 1e-10, 1e30])
def test_magnitude_does_not_matter(
    previous_scale: float, hidden_scale: float, dtype: torch.dtype, device: torch.device
) -> None:
    previous, hidden = random_states(5, 97, torch.float32, device)
    assert_matches((previous * previous_scale).to(dtype), (hidden * hidden_scale).to(dtype))


def test_denormal_vectors_are_not_zero_vectors(device: torch.device) -> None:
    tiny = torch.full((1, 40), 1e-45, device=device)
    assert ops.exit_confidence_cosine(tiny, tiny).tolist() == [1.0]


def test_nan_and_infinity_give_nan_in_their_row_alone(device: torch.device) -> None:
    previous, hidden = random_states(5, 40, torch.float32, device)
    hidden[1, 39] = float("nan")
    previous[3, 0] = float("inf")
    got = ops.exit_confidence_cosine(previous, hidden)
    assert got.isnan().tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("num_seqs", [0, 1, 3, 8, 9, 64])
def test_rows_may_be_accepted_at_once(num_seqs: int, device: torch.device) -> None:
    previous, hidden = random_states(num_seqs, 100, torch.float32, device)
    rows = random_rows(num_seqs, device)
    rows["confidence"] = ops.exit_confidence_cosine(previous, hidden)

    def measure_and_accept() -> ops.AcceptMask:
        accept = ops.AcceptRows(rows["thresholds"], 5, rows["status"], rows["exit_layer"])
        confidence, mask = ops.exit_confidence_cosine(previous, hidden, accept=accept)
        assert torch.equal(confidence, rows["confidence"])
        return mask

    assert_accepts(rows, measure_and_accept, layer=5)


def fuzzed_call(m: Maker) -> Checked:
    rows, size, dtype = m.size(9), m.size(300), m.dtype()
    given = {"previous": m.states(rows, size, dtype), "hidden": m.states(rows, size, dtype)}
    return measured(
        m,
        given,
        lambda before: exit_confidence_cosine(before["previous"], before["hidden"]),
    )
