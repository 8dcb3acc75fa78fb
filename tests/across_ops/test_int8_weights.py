"""int8 weights with a scale per row, in every op that reads a weight: as exact as float32 ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_exit_confidence_softmax
import test_kv_fill
import test_skinny_linear
import torch

import emulated
import reference
from cases import (
    DTYPES,
    KV_FILL_CASES,
    LM_HEADS,
    SKINNY_BATCH_SIZES,
    SKINNY_LINEARS,
    TOLERANCES,
    KvFillCase,
)
from coded_calls import (
    SKINNY_OPS,
    Call,
    check_fill,
    check_head,
    check_refusal,
    check_rows_of_size,
    check_stays_in_its_row,
)
from eecore import ops
from eecore.models.int8 import dequantise_rows, quantise_rows


def with_int8(call: Call, weight: str = "weight", scale: str = "weight_scale") -> Call:
    """The call with its weight quantised."""
    whole, scales = quantise_rows(call[weight])
    return {**call, weight: whole, scale: scales}


def check_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Where the norm differs in its last bit, x may be rounded to the next of its 16-bit steps."""
    atol = {torch.float32: 2e-4, torch.bfloat16: 2e-2}[got.dtype]
    rtol = TOLERANCES[got.dtype].rtol
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", test_skinny_linear.OPTIONS)
@pytest.mark.parametrize("num_tokens", SKINNY_BATCH_SIZES)
def test_skinny_linears_match_the_reference(
    num_tokens: int, options: str, dtype: torch.dtype, device: torch.device
) -> None:
    for module, op in SKINNY_OPS:
        for sizes in SKINNY_LINEARS:
            call = with_int8(module.random_call(num_tokens, *sizes, options, dtype, device))
            check_close(op(**call), getattr(reference, op.__name__)(**call))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [ops.skinny_linear, ops.skinny_gated_linear])
def test_a_row_does_not_depend_on_the_others(
    op: Callable[..., torch.Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """In tiles and chunks of any size."""
    for in_features in (100, 1100):
        call = with_int8(
            test_skinny_linear.random_call(41, in_features, 74, "plain", dtype, device)
        )
        together = op(**call)
        for row in range(41):
            assert torch.equal(op(**{**call, "x": call["x"][row : row + 1]})[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden_size", "vocab_size"), LM_HEADS)
def test_softmax_confidence_matches_the_reference(
    hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    call = test_exit_confidence_softmax.random_case(9, hidden_size, vocab_size, dtype, device)
    call = with_int8({**call, "eps": 1e-5}, "lm_head", "lm_head_scale")
    check_head(call, 5e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", KV_FILL_CASES, ids=str)
def test_kv_fill_matches_the_reference(
    case: KvFillCase, dtype: torch.dtype, device: torch.device
) -> None:
    call = with_int8(test_kv_fill.random_call(case, dtype, device), "kv_weight", "kv_scale")
    check_fill(call, check_close)


def test_large_in_one_place_does_not_blur_the_rest(device: torch.device) -> None:
    """16 bits: beside an outlier of 100, x of about 1 keeps 8 bits and more."""
    call = test_skinny_linear.random_call(1, 576, 64, "plain", device=device)
    call["x"] /= 3
    call["x"][0, 5] = 100
    call = with_int8(call)
    exact = call["x"] @ dequantise_rows(call["weight"], call["weight_scale"], torch.float32).T
    torch.testing.assert_close(ops.skinny_linear(**call), exact, rtol=0, atol=5e-3)


@pytest.mark.parametrize("columns", [4096, 4097, 8192, 8200, (1 << 20) + 33])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_the_largest_weights_fit_at_any_length(
    num_tokens: int, columns: int, device: torch.device
) -> None:
    """Sums of 32 bits would overflow, and so they do not take in that many columns."""
    x = torch.ones(num_tokens, columns, device=device)
    weight = torch.full((5, columns), -128, dtype=torch.int8, device=device)
    got = ops.skinny_linear(x, weight, weight_scale=torch.ones(5, device=device))
    torch.testing.assert_close(got, torch.full_like(got, -128 * columns), rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(value: float, device: torch.device) -> None:
    call = with_int8(test_skinny_linear.random_call(5, 70, 33, "plain", device=device))
    check_stays_in_its_row(call, value)


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1e30, 3e38])
def test_rows_of_any_size(size: float, device: torch.device) -> None:
    call = with_int8(test_skinny_linear.random_call(2, 70, 33, "plain", device=device))
    wide = dequantise_rows(call["weight"], call["weight_scale"], torch.float64)
    check_rows_of_size(call, wide, size, atol=size * 1e-3 + 1e-35)


def test_strides(device: torch.device) -> None:
    call = with_int8(test_skinny_linear.random_call(5, 72, 41, device=device))
    expected = ops.skinny_linear(**call)
    call["weight"] = torch.nn.functional.pad(call["weight"], (3, 5), value=99)[:, 3:75]
    assert torch.equal(ops.skinny_linear(**call), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(6, 8)}, r"weight: expected int8 \[out_features, in_features=8"),
        ({"weight_scale": None}, r"weight: expected float32 \[out_features, in_features=8"),
        ({"weight_scale": torch.zeros(5)}, r"weight_scale: expected float32 \[out_features=6"),
        ({"weight_scale": torch.zeros(6).bfloat16()}, r"weight_scale: expected float32 .* bf"),
        ({"weight_scale": torch.zeros(12)[::2]}, r"weight_scale: expected the last 1 .* cont"),
    ],
)  # fmt: skip
def test_bad_input_is_named_and_changes_nothing(change: Call, message: str) -> None:
    call = with_int8(test_skinny_linear.random_call(2, 8, 6))
    check_refusal(call, change, message)


def test_quantised_rows_are_within_half_a_step() -> None:
    weight = torch.randn(3, 7, 50) * torch.logspace(-6, 6, 7)[:, None]
    weight[1, 2] = 0
    whole, scale = quantise_rows(weight)
    error = (dequantise_rows(whole, scale, torch.float32) - weight).abs()
    assert (error <= scale[..., None] * 0.5001).all()
    assert whole.amin() == -127 or whole.amax() == 127
    assert not whole[1, 2].any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_shows(value: float, device: torch.device) -> None:
    call = test_skinny_linear.random_call(2, 40, 9, "plain", device=device)
    call["weight"][4, 7] = value
    got = ops.skinny_linear(**with_int8(call))
    assert got[:, 4].isnan().all()
    assert got[:, :4].isfinite().all()


@pytest.mark.parametrize("op", ["skinny_linear", "skinny_gated_linear"])
def test_cuda_kernels_say_that_they_have_none(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.route(monkeypatch)
    call = with_int8(test_skinny_linear.random_call(2, 8, 6, "plain"))
    with pytest.raises(RuntimeError, match=f"{op}: weight_scale: expected none on CUDA"):
        getattr(ops, op)(**call)


def test_cuda_has_no_int8_head(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.route(monkeypatch)
    call = test_exit_confidence_softmax.random_case(2, 8, 9)
    call = with_int8({**call, "eps": 1e-5}, "lm_head", "lm_head_scale")
    with pytest.raises(RuntimeError, match="lm_head_scale: expected none on CUDA, int8 weights"):
        ops.exit_confidence_softmax(**call)


def test_cuda_fills_from_no_int8_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.route(monkeypatch)
    call = with_int8(test_kv_fill.random_call(KvFillCase(2)), "kv_weight", "kv_scale")
    with pytest.raises(RuntimeError, match="kv_fill: kv_scale: expected none on CUDA"):
        ops.kv_fill(**test_kv_fill.packed(call))


def test_opcheck(device: torch.device) -> None:
    call = with_int8(test_skinny_linear.random_call(3, 40, 9, device=device))
    call["out"] = torch.zeros(3, 9, device=device)
    torch.library.opcheck(torch.ops.eecore.skinny_linear.default, (), call)
