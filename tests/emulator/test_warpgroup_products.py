"""Skinny products by warpgroups, which a setting of EECORE_CUDA_TUNING asks for."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_accesses import CPU, DEVICE
from test_in_flight import promised
from test_skinny_products import OPS, ROWS_TOGETHER, Product

import emulated
from coded_calls import FORMATS, coded
from eecore import ops
from packed_blocks import packed_layers
from tiers import in_all

HALVES = (torch.bfloat16, *in_all(torch.float16))
# Whole rows; numbers of 4 bits and their minima, of which the compiler knows; scales of scales; a
# scale for each half of a block.
SOME_FORMS = ("int8", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
FORMS = ("floats", *SOME_FORMS, *in_all(*(form for form in FORMATS if form not in SOME_FORMS)))
KERNELS = {
    "skinny_linear": "skinny_warpgroup_linear_kernel",
    "skinny_gated_linear": "skinny_warpgroup_gated_kernel",
}
M_TILES = {"skinny_linear": 1, "skinny_gated_linear": 2}
TUNING = "EECORE_CUDA_TUNING"

each_op = pytest.mark.parametrize("op", OPS)
each_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
each_form = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(autouse=True)
def by_warpgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.route(monkeypatch)
    monkeypatch.setenv(TUNING, "wgmma=1")


def kernels_of(product: Product, call: dict[str, Any]) -> list[str]:
    return emulated.kernels_of(lambda: product.run(call))


def check(product: Product, call: dict[str, Any]) -> None:
    """Compare a product by warpgroups with the reference."""
    assert emulated.kernels_of(lambda: product.check(call, CPU))[-1] == KERNELS[product.op]


def compare(product: Product, call: dict[str, Any], expected: torch.Tensor) -> None:
    assert torch.equal(product.run(call), expected)


@each_op
@each_half
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(64, 400), (131, 257), *in_all((576, 150), (1100, 130))]
)
def test_warpgroups_match_the_reference(
    in_features: int, out_features: int, dtype: torch.dtype, op: str
) -> None:
    """Whole tiles and parts of them, rows of x that are made ready ahead and that need not be."""
    product = Product(op)
    for num_tokens, options in ((1, "plain"), (9, "all"), (24, "plain"), (40, "all"), (70, "all")):
        call = product.call(num_tokens, in_features, out_features, options, dtype)
        check(product, call)


@each_op
@pytest.mark.parametrize("form", [form for form in FORMS if form != "floats"])
def test_int8_and_packed_weights_match_the_reference(form: str, op: str) -> None:
    """Also a last chunk of one block, of two and of three, and a part of an int8 chunk."""
    product = Product(op, form)
    for num_tokens, in_features, options in (
        (1, 288, "all"),
        (20, 160, "plain"),
        (70, 64, "all"),
        (9, 230, "plain"),
        (3, 50, "plain"),
    ):
        call = product.call(num_tokens, in_features, 200, options, torch.bfloat16)
        check(product, call)


@each_op
@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_those_of_a_warps_products(
    dtype: torch.dtype, form: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, where as many slices sum them: so the order of k is the same on both sides."""
    product = Product(op, form)
    for in_features, out_features in ((192, 800), (256, 700)):
        call = product.call(33, in_features, out_features, "all", dtype)
        by_warpgroups = product.run(call)
        monkeypatch.setenv(TUNING, "wgmma=0")
        kernels = emulated.kernels_of(partial(compare, product, call, by_warpgroups))
        assert kernels[-1] == f"{op}_kernel"
        monkeypatch.setenv(TUNING, "wgmma=1")


@each_op
@each_form
def test_a_cluster_of_blocks_shares_the_rows_of_a_small_weight(
    form: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit as eight slices, or four, of one block sum them."""
    product = Product(op, form)
    columns = 64 if form == "floats" else 128  # of a chunk
    for num_tokens, num_chunks, out_features, options in (
        (33, 8, 64, "all"),
        (9, 17, 50, "plain"),
        (70, 6, 100, "plain"),
        (1, 4, 128, "all"),
    ):
        call = product.call(num_tokens, num_chunks * columns, out_features, options, torch.bfloat16)
        with emulated.counting() as counted:
            together = product.run(call)
        num_slices = 8 if out_features <= 64 else 4
        assert counted[-1].name == KERNELS[op]
        groups = 1 if form in ("floats", "int8") else -(-num_tokens // 64)
        assert counted[-1].grid[0] == num_slices // 2 * groups
        assert counted[-1].grid[1] == -(-out_features // 64)
        monkeypatch.setenv(TUNING, "wgmma=0")
        assert torch.equal(product.run(call), together)
        monkeypatch.setenv(TUNING, "wgmma=1")


@each_op
def test_a_cluster_multiplies_what_is_not_finite_and_ends_anywhere(op: str) -> None:
    """Also a last chunk that is a part of one, which one block of the cluster has."""
    product = Product(op)
    for in_features, out_features in ((500, 64), (1100, 41), (300, 90)):
        call = product.call(20, in_features, out_features, "all", torch.bfloat16)
        call["x"][3, 7] = torch.nan
        check(product, call)


def test_warpgroups_multiply_packed_rows_of_any_place_and_format() -> None:
    """Formats in turn and rows in any order: all warps of a tile make the same products."""
    matrix = packed_layers([[(format, 18) for format in FORMATS]], 256, size=1 / 16).unbind()[0]
    assert matrix.table is not None
    call = {"x": torch.randn(9, 256).bfloat16(), "weight": matrix.weight}
    order = torch.randperm(144, generator=torch.Generator().manual_seed(1))
    for rows in (torch.arange(144), order, order.repeat(5)):
        call["weight_table"] = matrix.table[rows]
        product = Product("skinny_linear", "packed")
        assert kernels_of(product, call) == [KERNELS[product.op]]
        product.check(call, CPU)


def check_rows(
    product: Product, call: dict[str, Any], together: torch.Tensor, first: int, count: int
) -> None:
    """Rows of a call give alone what they give in all of it, to the bit."""
    rows = slice(first, first + count)
    own = {name: call[name][rows] for name in ("x", "residual") if name in call}
    got = product.run({**call, **own})
    torch.testing.assert_close(got, together[rows], rtol=0, atol=0, equal_nan=True)


@each_op
@pytest.mark.parametrize(
    ("options", "form", "in_features", "out_features"),
    [
        ("plain", "floats", 200, 140),
        ("all", "floats", 200, 140),
        ("plain", "floats", 520, 70),
        ("all", "int8", 200, 140),
        ("plain", "Q4_K", 200, 140),
    ],
)
def test_a_row_of_a_warpgroup_does_not_depend_on_the_others(
    options: str, form: str, in_features: int, out_features: int, op: str
) -> None:
    """Nor on how many they are, or on what is not finite among them."""
    product = Product(op, form)
    call = product.call(75, in_features, out_features, options, torch.bfloat16)
    call["x"][[3, 21]] = torch.nan
    call["x"][17, -1] = torch.inf
    together = product.run(call)
    assert together[22:].isfinite().all()
    for first, count in ROWS_TOGETHER[::3]:
        check_rows(product, call, together, first, count)


@each_op
@pytest.mark.parametrize(
    ("options", "form", "in_features", "out_features"),
    [
        ("all", "floats", 72, 260),
        ("plain", "floats", 136, 400),
        ("plain", "floats", 520, 70),
        ("all", "int8", 200, 140),
        ("all", "Q4_1", 64, 140),
    ],
)
def test_a_row_is_the_same_among_up_to_256(
    options: str, form: str, in_features: int, out_features: int, op: str
) -> None:
    """Passes of 128 rows, of 64 with a packed weight, of which the last one is a part."""
    product = Product(op, form)
    call = product.call(256, in_features, out_features, options, torch.bfloat16)
    call["x"][[66, 200]] = torch.nan
    together = product.run(call)
    for first, count in ((63, 1), (1, 65), (100, 72), (0, 128), (40, 160)):
        with emulated.counting() as counted:
            check_rows(product, call, together, first, count)
        rows_of_pass = 64 if form == "Q4_1" else 128
        blocks_of_cluster = 2 if in_features > 500 else 1
        assert counted[-1].grid[0] == -(-count // rows_of_pass) * blocks_of_cluster


@each_op
def test_warpgroups_multiply_where_they_can_and_tiles_suffice(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the weight alone: whatever the number of rows of x."""
    product = Product(op)
    for in_features, out_features, form, dtype, is_by_warpgroups in (
        (128, 129, "floats", torch.bfloat16, True),
        (128, 128, "floats", torch.bfloat16, False),
        (256, 128, "floats", torch.bfloat16, True),
        (448, 64, "floats", torch.bfloat16, False),
        (128, 400, "floats", torch.float32, False),
        (128, 129, "int8", torch.bfloat16, True),
        (384, 128, "int8", torch.bfloat16, False),
        (128, 129, "Q4_1", torch.float16, True),
        (384, 128, "Q4_1", torch.float16, False),
        (128, 400, "Q4_1", torch.float32, False),
    ):
        for num_tokens in (1, 40):
            call = product.call(num_tokens, in_features, out_features, "plain", torch.float32)
            call = coded({**call, "x": call["x"].to(dtype)}, form)
            if form == "floats":
                call["weight"] = call["weight"].to(dtype)
            names = kernels_of(product, call)
            found = names[-1] == KERNELS[op]
            assert found is is_by_warpgroups, (in_features, out_features, form)
    call = product.call(20, 128, 400, "plain", torch.bfloat16)
    monkeypatch.delenv(TUNING)
    assert kernels_of(product, call) == [f"{op}_kernel"]


@each_op
@pytest.mark.parametrize("form", ["floats", "int8"])
@pytest.mark.parametrize("num_tokens", [9, 64, 100])
def test_a_warpgroups_weight_is_on_its_way(num_tokens: int, form: str, op: str) -> None:
    """As far as its ring promises, and read once; rows of x go to banks side by side."""
    call = Product(op, form).call(num_tokens, 1024, 1536, "plain", torch.bfloat16)
    with emulated.counting(weight=call["weight"]) as counted:
        Product(op).run(call)
    (launch,) = counted
    assert launch.watched["weight"] == (call["weight"].nbytes, call["weight"].nbytes)
    assert launch.drained == 0
    blocks = math.prod(launch.grid[:2])
    assert launch.in_flight == promised(M_TILES[op], blocks)
    assert blocks <= 2 * DEVICE.num_multiprocessors
    assert launch.bank_ways == 1, launch.bank_place


@each_op
@pytest.mark.parametrize(("in_features", "out_features"), [(192, 400), (512, 64)])
def test_warpgroups_wait_for_rows_that_the_kernel_ahead_writes(
    in_features: int, out_features: int, op: str
) -> None:
    product = Product(op)
    call = product.call(20, in_features, out_features, "all", torch.bfloat16)
    run: Callable[..., torch.Tensor] = getattr(ops, op)
    with emulated.checking_races() as checked:
        expected = run(**call, constant_weight=True)
        x = torch.empty_like(call["x"])
        ops.skinny_linear(call["x"], torch.eye(in_features).bfloat16(), out=x, constant_weight=True)
        assert torch.equal(run(**{**call, "x": x}, constant_weight=True), expected)
        assert checked() > 0
