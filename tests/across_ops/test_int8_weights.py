"""int8 weights with a scale per row, in every op that reads a weight: as exact as float32 ones.

On the CPU x is rounded to 16 bits first; on CUDA nothing is.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import test_exit_confidence_softmax
import test_kv_fill
import test_skinny_linear
import torch

import emulated
import fuzz_ops
import op_calls
import reference
from cases import (
    DTYPES,
    KV_FILL_CASES,
    LARGE_BATCH_SIZES,
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

INT8_OPS = (
    "embed_tokens",
    "exit_confidence_softmax",
    "kv_fill",
    "skinny_gated_linear",
    "skinny_linear",
)


def with_int8(call: Call, weight: str = "weight", scale: str = "weight_scale") -> Call:
    """The call with its weight quantised."""
    whole, scales = quantise_rows(call[weight])
    return {**call, weight: whole, scale: scales}


def as_floats(call: Call) -> Call:
    """The call with what its int8 weight stands for: what CUDA's oracle takes."""
    names = [name for name, value in call.items() if name.endswith("scale") and value is not None]
    for scale in names:
        weight = {"weight_scale": "weight", "lm_head_scale": "lm_head", "kv_scale": "kv_weight"}
        whole, scales = call[weight[scale]], call[scale]
        wide = dequantise_rows(whole, scales, torch.float64)
        call = {**call, weight[scale]: wide, scale: None}
    return call


def check_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Where the norm differs in its last bit, x may be rounded to the next of its 16-bit steps."""
    atol = {torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[got.dtype]
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
            oracle = as_floats(call) if emulated.is_cuda_kernel(device) else call
            check_close(op(**call), getattr(reference, op.__name__)(**oracle))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", LARGE_BATCH_SIZES)
def test_more_rows_than_a_tile_holds(
    num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    for module, op in SKINNY_OPS:
        call = with_int8(module.random_call(num_tokens, 272, 75, "all", dtype, device))
        oracle = as_floats(call) if emulated.is_cuda_kernel(device) else call
        check_close(op(**call), getattr(reference, op.__name__)(**oracle))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 17])
@pytest.mark.parametrize("columns", [131, 288])
def test_on_cuda_nothing_but_the_result_is_rounded(
    columns: int, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Small whole numbers, and scales that are powers of two: every byte counts as what it says."""
    if not emulated.is_cuda_kernel(device):
        pytest.skip("about the kernels of CUDA")
    generator = torch.Generator().manual_seed(columns)
    x = torch.randint(-3, 4, (num_tokens, columns), generator=generator)
    weight = torch.arange(256 * columns).view(256, columns) * 7 % 256 - 128
    scale = 2.0 ** torch.randint(-9, -5, (256,), generator=generator)
    bias = torch.randint(-9, 10, (256,), generator=generator)
    exact = (x @ weight.T).double() * scale + bias
    arguments = {"weight_scale": scale.to(device), "bias": bias.to(device, dtype)}
    got = ops.skinny_linear(x.to(device, dtype), weight.to(device, torch.int8), **arguments)
    assert torch.equal(got.cpu(), exact.to(dtype))


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
    check_head(call, 5e-5, as_floats(call) if emulated.is_cuda_kernel(device) else call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", KV_FILL_CASES, ids=str)
def test_kv_fill_matches_the_reference(
    case: KvFillCase, dtype: torch.dtype, device: torch.device
) -> None:
    call = with_int8(test_kv_fill.random_call(case, dtype, device), "kv_weight", "kv_scale")
    check_fill(call, check_close, as_floats(call) if emulated.is_cuda_kernel(device) else call)


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
    check_stays_in_its_row(call, value, gives_nan=not emulated.is_cuda_kernel(device))


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1e30, 3e38])
def test_rows_of_any_size(size: float, device: torch.device) -> None:
    if emulated.is_cuda_kernel(device):
        size = min(size, 1e33)  # unscaled sums have to be finite
    call = with_int8(test_skinny_linear.random_call(2, 70, 33, "plain", device=device))
    wide = dequantise_rows(call["weight"], call["weight_scale"], torch.float64)
    check_rows_of_size(call, wide, size, atol=size * 1e-3 + 1e-35)


def test_strides(device: torch.device) -> None:
    call = with_int8(test_skinny_linear.random_call(5, 72, 41, device=device))
    expected = ops.skinny_linear(**call)
    for before in (3, 16):
        padded = torch.nn.functional.pad(call["weight"], (before, 24 - before), value=99)
        call["weight"] = padded[:, before : before + 72]
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
@pytest.mark.parametrize("on_cuda", [False, True])
def test_bad_input_is_named_and_changes_nothing(
    change: Call, message: str, on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_cuda:
        emulated.route(monkeypatch)
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
def test_other_numbers_than_int8_have_no_scale_on_cuda(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated.route(monkeypatch)
    call = with_int8(test_skinny_linear.random_call(2, 8, 6, "plain"))
    call["weight"] = call["weight"].view(torch.uint8)
    with pytest.raises(RuntimeError, match=f"{op}: weight: expected int8 .* got uint8"):
        getattr(ops, op)(**call)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("op", INT8_OPS)
def test_random_calls_on_cuda(op: str, seed: int) -> None:
    """Strides, gaps, places and sizes of any kind."""
    random = Random(seed)
    call = op_calls.random_call(op, random)
    while not any(tensor.dtype == torch.int8 for tensor in call.tensors.values()):
        call = op_calls.random_call(op, random)
    emulated.library()
    memory, before = fuzz_ops.Memory(call.arguments.values()), op_calls.copied(call.arguments)
    getattr(torch.ops.eecore_emulated, op).default(**call.arguments)
    written = [call.arguments.get(name) for name in op_calls.written(op)]
    memory.assert_unchanged(but=[tensor for tensor in written if tensor is not None])
    call.check(before if op == "embed_tokens" else as_floats(before), call.arguments)


def test_opcheck(device: torch.device) -> None:
    call = with_int8(test_skinny_linear.random_call(3, 40, 9, device=device))
    call["out"] = torch.zeros(3, 9, device=device)
    torch.library.opcheck(torch.ops.eecore.skinny_linear.default, (), call)
