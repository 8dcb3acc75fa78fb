"""Packed weights in every op that reads a weight: products of what their formats stand for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import test_decoder_layers
import test_exit_confidence_softmax
import test_kv_fill
import test_skinny_linear
import torch

import emulated
import reference
from cases import DTYPES, DecoderLayersCase, KvFillCase
from coded_calls import (
    SKINNY_OPS,
    Call,
    check_fill,
    check_head,
    check_refusal,
    check_rows_of_size,
    check_stays_in_its_row,
)
from eecore import _C, ops
from packed_blocks import SMALL_FORMATS, packed_layers, random_blocks

FORMATS = ops.BLOCK_FORMATS
BATCH_SIZES = (0, 1, 2, 3, 7, 33)


def packed_rows(format: str, rows: int, columns: int) -> ops.Matrix:
    return ops.pack_weight(random_blocks(format, rows, columns, columns**-0.5), format)


def with_packed(
    call: Call, format: str, weight: str = "weight", table: str = "weight_table"
) -> Call:
    """The call with a packed weight of that shape instead of its own."""
    matrix = packed_rows(format, *call[weight].shape)
    return {**call, weight: matrix.weight, table: matrix.table}


def check_close(got: torch.Tensor, wanted: torch.Tensor, *, normed: bool) -> None:
    """Where the norm differs in its last bit, x may be rounded to the next of its steps."""
    rtol, atol = (2e-5, 2e-5) if got.dtype == torch.float32 else (1.6e-2, 1e-2)
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol + 3e-2 * normed, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", test_skinny_linear.OPTIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_skinny_linears_match_the_reference(
    format: str, options: str, dtype: torch.dtype, device: torch.device
) -> None:
    for module, op in SKINNY_OPS:
        for num_tokens in BATCH_SIZES:
            call = module.random_call(num_tokens, 512, 70, options, dtype, device)
            call = with_packed(call, format)
            expected = getattr(reference, op.__name__)(**call)
            check_close(op(**call), expected, normed=options == "all")


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_any_width_and_view(format: str, device: torch.device) -> None:
    """Rows of a view begin and end inside panels."""
    for columns in (256, 768, 1536, 4864):
        matrix = packed_rows(format, 75, columns)
        x = torch.randn(3, columns, device=device)
        whole = ops.skinny_linear(x, matrix.weight, weight_table=matrix.table)
        check_close(
            whole,
            reference.skinny_linear(x, matrix.weight, weight_table=matrix.table).float(),
            normed=False,
        )
        for rows in (slice(8, None), slice(16, 40), slice(31, 33), slice(1, 75)):
            part = matrix.rows(rows)
            got = ops.skinny_linear(x, part.weight, weight_table=part.table)
            assert torch.equal(got, whole[:, rows])


@pytest.mark.parametrize("format", SMALL_FORMATS)
def test_widths_of_an_odd_number_of_blocks(format: str, device: torch.device) -> None:
    for columns in (32, 96, 576):
        call = test_skinny_linear.random_call(5, columns, 48, "plain", device=device)
        call = with_packed(call, format)
        expected = reference.skinny_linear(**call)
        check_close(ops.skinny_linear(**call), expected, normed=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [ops.skinny_linear, ops.skinny_gated_linear])
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_does_not_depend_on_the_others(
    format: str, op: Callable[..., torch.Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    call = test_skinny_linear.random_call(301, 512, 74, "plain", dtype, device)
    call = with_packed(call, format)
    together = op(**call)
    for row in (0, 1, 7, 8, 31, 32, 64, 299, 300):
        assert torch.equal(op(**{**call, "x": call["x"][row : row + 1]})[0], together[row])


@pytest.mark.parametrize("format", FORMATS)
def test_vectors_of_every_width_agree(format: str) -> None:
    """AVX2 and AVX-512: exact integers, and one order of the sums."""
    names = [name for name in _C.cpu_capabilities() if name != "portable"]
    if len(names) < 2:
        pytest.skip("this CPU has one width of vectors")
    call = test_skinny_linear.random_call(9, 768, 70, "plain")
    call = with_packed(call, format)
    before = _C.cpu_capability()
    try:
        results = []
        for name in names:
            _C.set_cpu_capability(name)
            results.append(ops.skinny_linear(**call))
    finally:
        _C.set_cpu_capability(before)
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("format", FORMATS)
def test_the_number_of_threads_changes_nothing(format: str, device: torch.device) -> None:
    call = with_packed(test_skinny_linear.random_call(5, 512, 1001, device=device), format)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = ops.skinny_linear(**call)
        torch.set_num_threads(2)
        two = ops.skinny_linear(**call)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, two)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(
    value: float, format: str, device: torch.device
) -> None:
    call = with_packed(test_skinny_linear.random_call(5, 256, 33, "plain", device=device), format)
    check_stays_in_its_row(call, value)


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1e30, 1e36])
def test_rows_of_any_size(size: float, device: torch.device) -> None:
    call = with_packed(test_skinny_linear.random_call(2, 64, 33, "plain", device=device), "Q4_1")
    wide = ops.unpack_weight(call["weight"], call["weight_table"]).double()
    check_rows_of_size(call, wide, size, atol=size * 1e-4 + 1e-35)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_softmax_confidence_matches_the_reference(
    format: str, dtype: torch.dtype, device: torch.device
) -> None:
    call = test_exit_confidence_softmax.random_case(9, 256, 1003, dtype, device)
    call = with_packed({**call, "eps": 1e-5}, format, "lm_head", "lm_head_table")
    check_head(call, 3e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_kv_fill_matches_the_reference(
    num_kv_heads: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Heads that end inside panels; K and V in formats of their own, others in every layer."""
    case = KvFillCase(9, hidden_size=256, num_kv_heads=num_kv_heads, head_dim=24, rotary_dim=24)
    call = test_kv_fill.random_call(case, dtype, device)
    rows = num_kv_heads * 24
    layers = [[("Q4_K", rows), ("Q6_K", rows)], [("Q4_0", rows), ("Q8_0", rows)],
              [("Q5_1", rows), ("Q5_1", rows)]]  # fmt: skip
    matrix = packed_layers(layers, 256, size=1 / 16)
    call |= {"kv_weight": matrix.weight, "kv_table": matrix.table}
    check_fill(call, partial(check_close, normed=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_embeddings_are_what_the_format_says(
    format: str, dtype: torch.dtype, device: torch.device
) -> None:
    matrix = packed_rows(format, 100, 256)
    token_ids = torch.tensor([0, 99, 5, 5, 17], device=device)
    previous, sources = torch.tensor([42]), torch.tensor([-1, -1, 0, -1, -1], dtype=torch.int32)
    out = torch.zeros(5, 260, dtype=dtype, device=device)[:, :256]
    ops.embed_tokens(
        token_ids, matrix.weight, table=matrix.table, previous=previous, sources=sources, out=out
    )
    rows = torch.tensor([0, 99, 42, 5, 17])
    assert torch.equal(out, ops.unpack_weight(matrix.weight, matrix.table)[rows].to(dtype))


SMALL = DecoderLayersCase((2, 1), (9, 20), hidden_size=256, inner_size=512, bias=True, qk_norm=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoder_layers_of_mixed_formats(dtype: torch.dtype, device: torch.device) -> None:
    one_by_one = test_decoder_layers.random_call(SMALL, dtype, device)
    weights: ops.DecoderWeights = one_by_one["weights"]
    layers, hidden = SMALL.num_layers, SMALL.hidden_size
    q, kv = SMALL.num_q_heads * SMALL.head_dim, SMALL.num_kv_heads * SMALL.head_dim
    kinds = FORMATS * layers

    def packed(name: str, columns: int, *rows: int) -> ops.Matrix:
        parts = [[(kinds[i + j], count) for j, count in enumerate(rows)] for i in range(layers)]
        matrix = packed_layers(parts, columns, size=columns**-0.5)
        return matrix._replace(bias=getattr(weights, name).bias)

    one_by_one["weights"] = weights._replace(
        qkv=packed("qkv", hidden, q, kv, kv),
        o=packed("o", q, hidden),
        gate_up=packed("gate_up", hidden, SMALL.inner_size, SMALL.inner_size),
        down=packed("down", SMALL.inner_size, hidden),
    )
    at_once = test_decoder_layers.with_own_caches(one_by_one)
    got = ops.decoder_layers(**at_once)
    assert torch.equal(got, test_decoder_layers.compose(one_by_one))
    test_decoder_layers.assert_same(at_once, one_by_one)


def test_cross_attention_and_a_plain_mlp(device: torch.device) -> None:
    case = DecoderLayersCase(
        (2, 1), (9, 20), cross_lens=(20, 3), activation="relu", hidden_size=64, inner_size=96
    )
    one_by_one = test_decoder_layers.random_call(case, torch.float32, device)
    weights, cross = one_by_one["weights"], one_by_one["cross"]
    q_size, layers = case.num_q_heads * case.head_dim, case.num_layers

    def packed(columns: int, rows: int) -> ops.Matrix:
        return packed_layers([[("Q4_1", rows)]] * layers, columns, size=columns**-0.5)

    one_by_one["weights"] = weights._replace(gate_up=packed(64, 96), down=packed(96, 64))
    one_by_one["cross"] = cross._replace(q=packed(64, q_size), o=packed(q_size, 64))
    at_once = test_decoder_layers.with_own_caches(one_by_one)
    assert torch.equal(ops.decoder_layers(**at_once), test_decoder_layers.compose(one_by_one))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(100).byte()}, r"weight_table: expected rows within 100 packed byt"),
        ({"weight": torch.zeros(640).char()}, r"weight: expected uint8 \[640\], got int8 \[640\]"),
        ({"weight": torch.zeros(8, 80).byte()}, r"weight: expected uint8 \[640\], got uint8 \[8, "),
        ({"weight_table": torch.zeros(3, 3).long()}, r"weight_table: expected int64 \[out_fea"),
        ({"weight_table": torch.zeros(6)}, r"weight_table: expected int64 .* got float32 \[6\]"),
        ({"weight_table": -torch.ones(6).long()}, r"weight_table: expected places that pack_weigh"),
        ({"weight_scale": torch.zeros(6)}, r"weight_scale: expected None with weight_table, got"),
        ({"x": torch.zeros(2, 96)}, r"weight_table: expected rows of 96 columns in .*, got 6"),
        ({"bias": torch.zeros(7)}, r"bias: expected float32 \[out_features=6\], got float32 \[7"),
    ],
)  # fmt: skip
def test_bad_input_is_named_and_changes_nothing(change: Call, message: str) -> None:
    call = with_packed(test_skinny_linear.random_call(2, 64, 6, "plain"), "Q4_1")
    check_refusal(call, change, message)


def test_cuda_has_no_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.route(monkeypatch)
    refused = "expected none on CUDA, packed weights run on the CPU"
    for module, op in SKINNY_OPS:
        call = with_packed(module.random_call(2, 64, 6, "plain"), "Q4_1")
        with pytest.raises(RuntimeError, match=f"{op.__name__}: weight_table: {refused}"):
            op(**call)
    call = test_exit_confidence_softmax.random_case(2, 64, 9)
    call = with_packed({**call, "eps": 1e-5}, "Q4_1", "lm_head", "lm_head_table")
    with pytest.raises(RuntimeError, match=f"lm_head_table: {refused}"):
        ops.exit_confidence_softmax(**call)


def test_opcheck(device: torch.device) -> None:
    call = with_packed(test_skinny_linear.random_call(3, 64, 9, device=device), "Q4_0")
    call |= {"out": torch.zeros(3, 9, device=device), "weight_scale": None}
    torch.library.opcheck(torch.ops.eecore.skinny_linear.default, (), call)


def test_compiles() -> None:
    call = with_packed(test_skinny_linear.random_call(3, 64, 9), "Q4_0")
    compiled = torch.compile(ops.skinny_linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**call), ops.skinny_linear(**call))
