"""accept_mask: sticky status, thresholds of one, NaN, survivors in order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import reference
from cases import BATCH_SIZES, Tolerance
from eecore import ops
from random_calls import EXACT, Arguments, Checked, Maker, assert_close, compare


def random_rows(num_seqs: int, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_seqs)
    return {
        "confidence": torch.rand(num_seqs, generator=generator).to(device),
        "thresholds": torch.rand(num_seqs, generator=generator).to(device),
        "status": (torch.rand(num_seqs, generator=generator) < 0.3).to(device),
        "exit_layer": torch.full((num_seqs,), 12, dtype=torch.int32, device=device),
    }


def assert_accepts(
    rows: dict[str, torch.Tensor], accept: Callable[[], ops.AcceptMask], layer: int
) -> None:
    """``accept`` has to change the rows, and return, as the reference does."""
    expected = reference.accept_mask(
        rows["confidence"], rows["thresholds"], layer, rows["status"], rows["exit_layer"]
    )
    got = accept()
    status, exit_layer, survivors = expected
    assert torch.equal(rows["status"], status)
    assert torch.equal(rows["exit_layer"], exit_layer)
    count = int(got.num_survivors)
    assert count == survivors.numel()
    assert torch.equal(got.survivors[:count], survivors)
    assert (got.survivors[count:] == -1).all()
    assert bool(got.all_accepted) == (count == 0)


@pytest.mark.parametrize("num_seqs", BATCH_SIZES)
def test_matches_the_reference(num_seqs: int, device: torch.device) -> None:
    rows = random_rows(num_seqs, device)
    assert_accepts(rows, lambda: ops.accept_mask(layer=5, **rows), layer=5)


def test_a_row_once_accepted_stays_accepted_and_keeps_its_layer(device: torch.device) -> None:
    status = torch.zeros(1, dtype=torch.bool, device=device)
    exit_layer = torch.zeros(1, dtype=torch.int32, device=device)
    threshold = torch.tensor([0.5], device=device)
    for layer, confidence in ((1, 0.4), (2, 0.5), (3, 0.1), (4, 0.9)):
        ops.accept_mask(
            torch.tensor([confidence], device=device), threshold, layer, status, exit_layer
        )
    assert status.tolist() == [True]
    assert exit_layer.tolist() == [2]


def test_a_threshold_of_one_and_a_nan_never_accept(device: torch.device) -> None:
    nan, inf = float("nan"), float("inf")
    confidence = torch.tensor([1.0, inf, nan, 0.9, 1.0], device=device)
    thresholds = torch.tensor([1.0, 1.5, 0.0, nan, 0.0], device=device)
    status = torch.zeros(5, dtype=torch.bool, device=device)
    exit_layer = torch.zeros(5, dtype=torch.int32, device=device)
    ops.accept_mask(confidence, thresholds, 3, status, exit_layer)
    assert status.tolist() == [False, False, False, False, True]


def acceptance(m: Maker, rows: int) -> Arguments:
    """An acceptance of rows of any confidence."""
    return {
        "thresholds": m.placed(m.one_of(m.uniform(rows), torch.ones(rows))),
        "layer": m.random.randint(1, 40),
        "status": m.flags(rows),
        "exit_layer": m.placed(m.whole(9, rows).int()),
        "survivors": m.placed(m.whole(9, rows).int()),
        "num_survivors": m.placed(torch.full((1,), -3, dtype=torch.int32)),
        "all_accepted": m.flags(1),
    }


def accepted(before: Arguments, confidence: Tensor) -> dict[str, Tensor]:
    """The tensors that an acceptance writes."""
    status, exit_layer, survivors = reference.accept_mask(
        confidence, *(before[n] for n in ("thresholds", "layer", "status", "exit_layer"))
    )
    rows = torch.full_like(exit_layer, -1)
    rows[: len(survivors)] = survivors
    return {
        "status": status,
        "exit_layer": exit_layer,
        "survivors": rows,
        "num_survivors": torch.tensor([len(survivors)]),
        "all_accepted": torch.tensor([len(survivors) == 0]),
    }


def measured(m: Maker, given: Arguments, oracle: Callable[[Arguments], Tensor]) -> Checked:
    """A call that measures ``hidden``, and accepts rows by that or does not."""
    rows = len(given["hidden"])
    given["confidence"] = m.placed(m.uniform(rows))
    accepts = m.chance()
    if accepts:
        given |= acceptance(m, rows)

    def check(before: Arguments, after: Arguments) -> None:
        got = after["confidence"]
        assert_close(got, oracle(before), Tolerance(1e-4, 1e-5), "confidence")
        for name, want in accepted(before, got).items() if accepts else ():
            assert_close(after[name], want, EXACT, name)

    return given, check


def fuzzed_call(m: Maker) -> Checked:
    rows = m.size(70)
    given = {"confidence": m.placed(m.uniform(rows)), **acceptance(m, rows)}
    return given, compare(lambda before: accepted(before, before["confidence"]))
