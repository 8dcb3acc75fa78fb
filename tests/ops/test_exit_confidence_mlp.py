"""exit_confidence_mlp: linear and ReLU classifiers, NaN, rows accepted at once."""

from __future__ import annotations

import pytest
import torch
from test_accept_mask import assert_accepts, measured, random_rows
from torch import Tensor

from cases import BATCH_SIZES, CLASSIFIER_INNER_SIZES, DTYPES, HIDDEN_SIZES, TOLERANCES
from eecore import ops
from random_calls import Checked, Maker


def exit_confidence_mlp(
    hidden: Tensor,
    weight1: Tensor,
    bias1: Tensor | None = None,
    weight2: Tensor | None = None,
    bias2: Tensor | None = None,
) -> Tensor:
    """Probability of class 1 in float64; see eecore.ops.exit_confidence_mlp."""
    out = hidden.double() @ weight1.double().T
    if bias1 is not None:
        out = out + bias1.double()
    if weight2 is not None:
        out = out.relu() @ weight2.double().T
        if bias2 is not None:
            out = out + bias2.double()
    return out.softmax(dim=-1)[:, 1].float()


def random_classifier(
    hidden_size: int, inner_size: int | None, device: torch.device, bias: bool = True
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(hidden_size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    rows = inner_size or 2
    weights = {"weight1": normal(rows, hidden_size) / hidden_size**0.5}
    if inner_size is not None:
        weights["weight2"] = 2 * normal(2, inner_size) / inner_size**0.5
    if bias:
        weights["bias1"] = normal(rows)
        if inner_size is not None:
            weights["bias2"] = normal(2)
    return weights


def random_states(
    num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    generator = torch.Generator().manual_seed(num_seqs)
    return torch.randn(num_seqs, hidden_size, generator=generator).to(device, dtype)


def assert_matches(hidden: Tensor, weights: dict[str, Tensor]) -> None:
    tolerance = TOLERANCES[torch.float32]  # float32 arithmetic and result for every dtype
    torch.testing.assert_close(
        ops.exit_confidence_mlp(hidden, **weights),
        exit_confidence_mlp(hidden, **weights),
        rtol=tolerance.rtol,
        atol=tolerance.atol,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
@pytest.mark.parametrize("inner_size", CLASSIFIER_INNER_SIZES)
def test_matches_the_reference(
    inner_size: int | None, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    weights = random_classifier(hidden_size, inner_size, device)
    is_small = hidden_size < 1000 and (inner_size is None or inner_size < 64)
    for num_seqs in BATCH_SIZES if is_small else (0, 1, 9):
        assert_matches(random_states(num_seqs, hidden_size, dtype, device), weights)


def test_far_logits_give_zero_and_one(device: torch.device) -> None:
    hidden = torch.tensor([[1000.0], [-1000.0]], device=device)
    weight1 = torch.tensor([[-1.0], [1.0]], device=device)
    assert ops.exit_confidence_mlp(hidden, weight1).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("inner_size", [None, 12])
def test_nan_stays_nan_in_its_row_alone(inner_size: int | None, device: torch.device) -> None:
    hidden = random_states(5, 50, torch.float32, device)
    hidden[3, 49] = float("nan")
    got = ops.exit_confidence_mlp(hidden, **random_classifier(50, inner_size, device))
    assert got.isnan().tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("num_seqs", [0, 1, 3, 8, 9, 32, 33])
@pytest.mark.parametrize(("inner_size", "hidden_size"), [(None, 100), (12, 100), (24, 4096)])
def test_rows_may_be_accepted_at_once(
    inner_size: int | None, hidden_size: int, num_seqs: int, device: torch.device
) -> None:
    weights = random_classifier(hidden_size, inner_size, device)
    hidden = random_states(num_seqs, hidden_size, torch.float32, device)
    rows = random_rows(num_seqs, device)
    rows["confidence"] = ops.exit_confidence_mlp(hidden, **weights)

    def measure_and_accept() -> ops.AcceptMask:
        accept = ops.AcceptRows(rows["thresholds"], 5, rows["status"], rows["exit_layer"])
        confidence, mask = ops.exit_confidence_mlp(hidden, **weights, accept=accept)
        assert torch.equal(confidence, rows["confidence"])
        return mask

    assert_accepts(rows, measure_and_accept, layer=5)


def fuzzed_call(m: Maker) -> Checked:
    rows, size = m.size(40), m.size(100, 1)
    deep = m.chance()
    inner = m.size(90, 1) if deep else 2
    given = {
        "hidden": m.states(rows, size, m.dtype()),
        "weight1": m.placed(m.normal(inner, size) * size**-0.5),
        "bias1": m.maybe(lambda: m.placed(m.normal(inner))),
        "weight2": m.placed(m.normal(2, inner) * inner**-0.5) if deep else None,
        "bias2": m.maybe(lambda: m.placed(m.normal(2))) if deep else None,
    }
    names = tuple(given)
    return measured(m, given, lambda before: exit_confidence_mlp(*(before[n] for n in names)))
