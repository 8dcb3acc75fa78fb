"""int8 and packed weights in ops that read a weight; tests/ops/test_skinny_products.py has more."""

from __future__ import annotations

import pytest
import test_exit_confidence_softmax
import test_kv_fill
import torch

import reference
from cases import DTYPES, KvFillCase
from coded_calls import (
    FORMATS,
    Call,
    check_close,
    coded,
    on_device,
    oracle_of,
)
from eecore import ops
from eecore.models.int8 import dequantise_rows, quantise_rows
from packed_blocks import packed_layers

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_format = pytest.mark.parametrize("format", FORMATS)


@each_dtype
@pytest.mark.parametrize(
    ("form", "hidden_size", "vocab_size"),
    [(form, 256, 1003) for form in ("int8", *FORMATS)],
)
def test_softmax_confidence_matches_the_reference(
    form: str, hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The measures are those of the logits that the stored weight gives."""
    call = test_exit_confidence_softmax.random_case(9, hidden_size, vocab_size, dtype, device)
    call = coded({**call, "eps": 1e-5}, form, "lm_head")
    got = ops.exit_confidence_softmax(**call)
    oracle = oracle_of(call, device)
    confidence, logsumexp, logits = reference.exit_confidence_softmax(**oracle)
    tolerance = 5e-5 if form == "int8" else 3e-3
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    torch.testing.assert_close(got.confidence, confidence, **close)
    torch.testing.assert_close(got.logsumexp, logsumexp, **close)
    torch.testing.assert_close(got.top_logit, logits.amax(-1), **close)


def check_fill(call: Call, form: str, device: torch.device) -> None:
    expected = test_kv_fill.filled(reference.kv_fill, oracle_of(call, device))
    for got, wanted in zip(test_kv_fill.filled(ops.kv_fill, call), expected, strict=True):
        check_close(got, wanted, form, device)


@each_dtype
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_packed_fill_matches_the_reference(
    num_kv_heads: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Heads end inside panels; K and V have formats of their own, which differ by layer."""
    case = KvFillCase(9, hidden_size=256, num_kv_heads=num_kv_heads, head_dim=24, rotary_dim=24)
    call = test_kv_fill.random_call(case, dtype, device)
    rows = num_kv_heads * 24
    layers = [[("Q4_K", rows), ("Q6_K", rows)], [("Q4_0", rows), ("Q8_0", rows)],
              [("Q5_1", rows), ("Q5_1", rows)]]  # fmt: skip
    matrix = on_device(packed_layers(layers, 256, size=1 / 16), device)
    check_fill({**call, "kv_weight": matrix.weight, "kv_table": matrix.table}, "packed", device)


def test_quantised_rows_are_within_half_a_step() -> None:
    weight = torch.randn(3, 7, 50) * torch.logspace(-6, 6, 7)[:, None]
    weight[1, 2] = 0
    whole, scale = quantise_rows(weight)
    error = (dequantise_rows(whole, scale, torch.float32) - weight).abs()
    assert (error <= scale[..., None] * 0.5001).all()
    assert whole.amin() == -127 or whole.amax() == 127
    assert not whole[1, 2].any()
