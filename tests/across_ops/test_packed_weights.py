"""Packed weights in every op that reads a weight: products of what their formats stand for.

On the CPU x is rounded to 8 bits first; on CUDA nothing is.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import test_exit_confidence_softmax
import test_kv_fill
import test_skinny_linear
import torch

import cases
import emulated
import fuzz_ops
import op_calls
import reference
from cases import DTYPES, TOLERANCES, KvFillCase
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
# First row and number of rows: alone, few, and around the rows of a tile and of two.
ROWS_TOGETHER = (
    *((row, 1) for row in (0, 1, 3, 7, 8, 17, 18, 31, 32, 64, 299, 300)),
    *((1, count) for count in range(2, 18)),
    *((2, count) for count in (20, 21, 23, 24, 25, 31, 32, 33, 41, 42, 44, 45, 47, 48, 52, 53, 70)),
)
CUDA_OPS = (
    "embed_tokens",
    "exit_confidence_softmax",
    "kv_fill",
    "skinny_gated_linear",
    "skinny_linear",
)
TABLES = {"weight_table": "weight", "lm_head_table": "lm_head", "kv_table": "kv_weight"}


def packed_rows(format: str, rows: int, columns: int, device: torch.device) -> ops.Matrix:
    blocks = random_blocks(format, rows, columns, columns**-0.5)
    return on_device(ops.pack_weight(blocks, format), device)


def on_device(matrix: ops.Matrix, device: torch.device) -> ops.Matrix:
    """Weights are packed on the CPU."""
    assert matrix.table is not None
    return matrix._replace(weight=matrix.weight.to(device), table=matrix.table.to(device))


def with_packed(
    call: Call, format: str, weight: str = "weight", table: str = "weight_table"
) -> Call:
    """The call with a packed weight of that shape instead of its own."""
    matrix = packed_rows(format, *call[weight].shape, call[weight].device)
    return {**call, weight: matrix.weight, table: matrix.table}


def floats_of(weight: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[..., in_features], in float64."""
    rows = ops.unpack_weight(weight.cpu(), table.cpu().flatten())
    return rows.double().view(*table.shape, -1).to(weight.device)


def oracle_of(call: Call, device: torch.device) -> Call:
    """What an oracle takes for a call; for CUDA what its packed weight stands for."""
    return as_floats(call) if emulated.is_cuda_kernel(device) else call


def as_floats(call: Call) -> Call:
    for table, weight in TABLES.items():
        if call.get(table) is not None:
            call = {**call, weight: floats_of(call[weight], call[table]), table: None}
    return call


def check_close(
    got: torch.Tensor, wanted: torch.Tensor, device: torch.device, *, normed: bool
) -> None:
    """On the CPU x may be rounded to the next of its steps where the norm's last bit differs."""
    tolerance = TOLERANCES[got.dtype]
    atol = tolerance.atol + 3e-2 * (normed and not emulated.is_cuda_kernel(device))
    torch.testing.assert_close(got, wanted, rtol=tolerance.rtol, atol=atol, equal_nan=True)


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
            expected = getattr(reference, op.__name__)(**oracle_of(call, device))
            check_close(op(**call), expected, device, normed=options == "all")


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_any_width_and_view(format: str, device: torch.device) -> None:
    """Rows of a view begin and end inside panels."""
    for columns in (256, 768, 1536, 4864):
        matrix = packed_rows(format, 75, columns, device)
        x = torch.randn(3, columns, device=device)
        call = {"x": x, "weight": matrix.weight, "weight_table": matrix.table}
        whole = ops.skinny_linear(**call)
        expected = reference.skinny_linear(**oracle_of(call, device))
        check_close(whole, expected.float(), device, normed=False)
        for rows in (slice(8, None), slice(16, 40), slice(31, 33), slice(1, 75)):
            part = matrix.rows(rows)
            got = ops.skinny_linear(x, part.weight, weight_table=part.table)
            assert torch.equal(got, whole[:, rows])


@pytest.mark.parametrize("format", SMALL_FORMATS)
def test_widths_of_an_odd_number_of_blocks(format: str, device: torch.device) -> None:
    for columns in (32, 96, 576):
        call = test_skinny_linear.random_call(5, columns, 48, "plain", device=device)
        call = with_packed(call, format)
        expected = reference.skinny_linear(**oracle_of(call, device))
        check_close(ops.skinny_linear(**call), expected, device, normed=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_place_and_format(dtype: torch.dtype, device: torch.device) -> None:
    """16 rows of a table need not be a panel: formats in turn, and rows in any order."""
    parts = [(format, 5) for format in FORMATS]
    matrix = on_device(packed_layers([parts], 256, size=1 / 16).unbind()[0], device)
    call = {"x": torch.randn(9, 256, device=device).to(dtype), "weight": matrix.weight}
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(device)
    for rows in (torch.arange(40, device=device), order, order.repeat(3)):
        call["weight_table"] = matrix.table[rows]
        expected = reference.skinny_linear(**oracle_of(call, device))
        check_close(ops.skinny_linear(**call), expected.to(dtype), device, normed=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [ops.skinny_linear, ops.skinny_gated_linear])
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_does_not_depend_on_the_others(
    format: str, op: Callable[..., torch.Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """Nor on how many they are, or on what is not finite among them."""
    call = test_skinny_linear.random_call(301, 1280, 74, "plain", dtype, device)
    call = with_packed(call, format)
    call["x"][[3, 21]] = torch.nan
    call["x"][17, 1000] = torch.inf
    call["x"][18] = 0
    together = op(**call)
    for first, count in ((0, 301), *ROWS_TOGETHER):
        rows = slice(first, first + count)
        some = op(**{**call, "x": call["x"][rows]})
        torch.testing.assert_close(some, together[rows], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", FORMATS)
def test_vectors_of_every_width_agree(format: str) -> None:
    """AVX2, AVX-512 and matrix tiles: exact integers, and one order of the sums."""
    names = [name for name in cases.cpu_capabilities() if name != "portable"]
    if len(names) < 2:
        pytest.skip("this CPU has one width of vectors")
    call = test_skinny_linear.random_call(41, 768, 70, "plain")
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
    check_stays_in_its_row(call, value, gives_nan=not emulated.is_cuda_kernel(device))


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1e30, 1e36])
def test_rows_of_any_size(size: float, device: torch.device) -> None:
    call = with_packed(test_skinny_linear.random_call(2, 64, 33, "plain", device=device), "Q4_1")
    wide = floats_of(call["weight"], call["weight_table"])
    check_rows_of_size(call, wide, size, atol=size * 1e-4 + 1e-35)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_softmax_confidence_matches_the_reference(
    format: str, dtype: torch.dtype, device: torch.device
) -> None:
    call = test_exit_confidence_softmax.random_case(9, 256, 1003, dtype, device)
    call = with_packed({**call, "eps": 1e-5}, format, "lm_head", "lm_head_table")
    check_head(call, 3e-3, oracle_of(call, device))


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
    matrix = on_device(packed_layers(layers, 256, size=1 / 16), device)
    call |= {"kv_weight": matrix.weight, "kv_table": matrix.table}

    def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
        check_close(got, wanted, device, normed=True)

    check_fill(call, check, oracle_of(call, device))


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_filled_of_a_row_does_not_depend_on_the_others(
    format: str, device: torch.device
) -> None:
    """Of each layer other rows are filled, in blocks of which the last has few."""
    case = KvFillCase(53, hidden_size=256, num_kv_heads=1, head_dim=24, rotary_dim=24)
    call = test_kv_fill.random_call(case, device=device)
    matrix = on_device(packed_layers([[(format, 48)]] * case.num_layers, 256, size=1 / 16), device)
    call |= {"kv_weight": matrix.weight, "kv_table": matrix.table}
    together = test_kv_fill.filled(ops.kv_fill, call)
    for count in (1, 10, 12, 13, 21, 45):
        caches = call["k_cache"], call["v_cache"]
        for rows in torch.arange(53).split(count):
            by_row = ("hidden", "exit_layer", "slot_mapping", "positions")
            part = {name: call[name][rows] for name in by_row}
            own = {**call, **part, "k_cache": caches[0], "v_cache": caches[1]}
            caches = test_kv_fill.filled(ops.kv_fill, own)
        for got, expected in zip(caches, together, strict=True):
            assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_embeddings_are_what_the_format_says(
    format: str, dtype: torch.dtype, device: torch.device
) -> None:
    matrix = packed_rows(format, 100, 256, device)
    token_ids = torch.tensor([0, 99, 5, 5, 17], device=device)
    previous = torch.tensor([42], device=device)
    sources = torch.tensor([-1, -1, 0, -1, -1], dtype=torch.int32, device=device)
    out = torch.zeros(5, 260, dtype=dtype, device=device)[:, :256]
    ops.embed_tokens(
        token_ids, matrix.weight, table=matrix.table, previous=previous, sources=sources, out=out
    )
    rows = torch.tensor([0, 99, 42, 5, 17], device=device)
    assert torch.equal(out, floats_of(matrix.weight, matrix.table)[rows].to(dtype))


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 80)}, r"weight_table: expected rows in blocks of 32 co.*got 80"),
        ({"weight": torch.zeros(641).byte()[1:]}, r"weight: expected packed bytes that begin at a"),
        ({"weight": torch.zeros(640).char()}, r"weight: expected uint8 \[640\], got int8 \[640\]"),
        ({"weight_table": torch.zeros(3, 3).long()}, r"weight_table: expected int64 \[out_fea"),
        ({"weight_scale": torch.zeros(6)}, r"weight_scale: expected None with weight_table, got"),
    ],
)  # fmt: skip
def test_bad_input_is_named_on_cuda(
    change: Call, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what the table holds, which is not looked at there."""
    emulated.route(monkeypatch)
    call = with_packed(test_skinny_linear.random_call(2, 64, 6, "plain"), "Q4_1")
    check_refusal(call, change, message)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_whole_numbers_are_multiplied_exactly_on_cuda(
    num_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scales that are powers of two no sum is rounded."""
    emulated.route(monkeypatch)
    x = torch.randint(-8, 9, (num_tokens, 576)).to(dtype)
    for format in SMALL_FORMATS:
        blocks = random_blocks(format, 48, 576).view(48, 18, -1)
        powers = 2.0 ** torch.randint(-3, 4, (48, 18, 1))
        blocks[..., :2] = powers.half().view(torch.uint8)
        if format in ("Q4_1", "Q5_1"):
            blocks[..., 2:4] = (-3 * powers).half().view(torch.uint8)
        matrix = ops.pack_weight(blocks.flatten(1), format)
        assert matrix.table is not None
        exact = x.double() @ floats_of(matrix.weight, matrix.table).T
        got = ops.skinny_linear(x, matrix.weight, weight_table=matrix.table)
        assert torch.equal(got, exact.to(dtype))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("op", CUDA_OPS)
def test_random_calls_on_cuda(op: str, seed: int) -> None:
    """Strides, gaps, places and sizes of any kind."""
    random = Random(seed)
    call = op_calls.random_call(op, random)
    while not any(name.endswith("table") for name in call.tensors):
        call = op_calls.random_call(op, random)
    emulated.library()
    memory, before = fuzz_ops.Memory(call.arguments.values()), op_calls.copied(call.arguments)
    getattr(torch.ops.eecore_emulated, op).default(**call.arguments)
    written = [call.arguments.get(name) for name in op_calls.written(op)]
    memory.assert_unchanged(but=[tensor for tensor in written if tensor is not None])
    call.check(before if op == "embed_tokens" else as_floats(before), call.arguments)


def test_opcheck(device: torch.device) -> None:
    call = with_packed(test_skinny_linear.random_call(3, 64, 9, device=device), "Q4_0")
    call |= {"out": torch.zeros(3, 9, device=device), "weight_scale": None}
    torch.library.opcheck(torch.ops.eecore.skinny_linear.default, (), call)


def test_compiles() -> None:
    call = with_packed(test_skinny_linear.random_call(3, 64, 9), "Q4_0")
    compiled = torch.compile(ops.skinny_linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**call), ops.skinny_linear(**call))
