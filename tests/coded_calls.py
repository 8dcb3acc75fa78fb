"""What holds of ops whose weight is stored in fewer bits, whichever way: int8 rows or blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_kv_fill
import test_skinny_gated_linear
import test_skinny_linear
import torch

import reference
from eecore import ops

Call = dict[str, Any]
CheckClose = Callable[[torch.Tensor, torch.Tensor], None]

SKINNY_OPS = (
    (test_skinny_linear, ops.skinny_linear),
    (test_skinny_gated_linear, ops.skinny_gated_linear),
)
"""The ops with one weight, and the module that makes calls of each."""


def check_head(call: Call, tolerance: float, oracle: Call | None = None) -> None:
    """Its measures are those of the logits that the stored weight gives, or the oracle's call."""
    got = ops.exit_confidence_softmax(**call)
    confidence, logsumexp, logits = reference.exit_confidence_softmax(**(oracle or call))
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    torch.testing.assert_close(got.confidence, confidence, **close)
    torch.testing.assert_close(got.logsumexp, logsumexp, **close)
    torch.testing.assert_close(got.top_logit, logits.amax(-1), **close)


def check_fill(call: Call, check_close: CheckClose, oracle: Call | None = None) -> None:
    """Caches are filled with what the stored weight gives, or the oracle's call."""
    expected = test_kv_fill.filled(reference.kv_fill, oracle or call)
    for got, wanted in zip(test_kv_fill.filled(ops.kv_fill, call), expected, strict=True):
        check_close(got, wanted)


def check_stays_in_its_row(call: Call, value: float, *, gives_nan: bool = True) -> None:
    """A number that is not finite in one of five rows of x says nothing of the others.

    Its own row is NaN throughout, or at least nowhere finite.
    """
    expected = ops.skinny_linear(**call)
    call["x"][2, 69] = value
    got = ops.skinny_linear(**call)
    assert got[2].isnan().all() if gives_nan else not got[2].isfinite().any()
    rest = [0, 1, 3, 4]
    assert torch.equal(got[rest], expected[rest])


def check_rows_of_size(call: Call, weight: torch.Tensor, size: float, atol: float) -> None:
    """Products of rows whose numbers are all of one size with a weight [out, in] in float64."""
    call["x"] = call["x"].sign() * size
    exact = (call["x"].double() @ weight.T).float()
    torch.testing.assert_close(ops.skinny_linear(**call), exact, rtol=1e-4, atol=atol)


def check_refusal(call: Call, change: Call, message: str) -> None:
    """A changed call of ``skinny_linear`` is an error that writes nothing."""
    call = {**call, "out": torch.zeros(2, 6), **change}
    with pytest.raises(RuntimeError, match=f"skinny_linear: {message}"):
        ops.skinny_linear(**call)
    assert not call["out"].any()
