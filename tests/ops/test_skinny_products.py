"""skinny_linear and skinny_gated_linear: norm, product and activation, then residual or gate.

Each rounded where a model rounds; the weight in floats, int8 rows or packed blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import cases
import emulated
import reference
from cases import DTYPES, LARGE_BATCH_SIZES, SKINNY_BATCH_SIZES, SKINNY_LINEARS
from coded_calls import (
    FORMATS,
    FORMS,
    Call,
    as_floats,
    check_close,
    coded,
    on_device,
    oracle_of,
    packed_rows,
    whole_blocks,
)
from eecore import _C, ops
from eecore.ops import AppendKv
from packed_blocks import SMALL_FORMATS, packed_layers, random_blocks
from random_calls import Arguments, Checked, Maker, compare, looser, out_of

OPTIONS = ("plain", "all")
ACTIVATIONS = {"skinny_linear": (None, "relu"), "skinny_gated_linear": ("silu", "gelu_tanh")}
OPS = tuple(ACTIVATIONS)


@dataclass(frozen=True)
class Product:
    """An op, and the form of its weight."""

    op: str
    form: str = "floats"

    def __str__(self) -> str:
        return f"{self.op}-{self.form}"

    def call(
        self,
        num_tokens: int,
        in_features: int,
        out_features: int,
        options: str = "all",
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> Call:
        """Arguments of a call, with as many columns as fill blocks of the form."""
        generator = torch.Generator().manual_seed(num_tokens)
        in_features = whole_blocks(in_features, self.form)
        rows = out_features * (2 if self.op == "skinny_gated_linear" else 1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

        weight = normal(rows, in_features) / math.sqrt(in_features)
        call: Call = {"x": 3 * normal(num_tokens, in_features), "weight": weight}
        if options == "all":
            call["norm_weight"] = 1 + normal(in_features) / 8
            call["eps"] = 1e-5
            call["bias"] = normal(rows)
            if self.op == "skinny_linear":
                call["residual"] = normal(num_tokens, out_features)
        return coded(call, self.form)

    def run(self, call: Call) -> Tensor:
        result: Tensor = getattr(ops, self.op)(**call)
        return result

    def check(self, call: Call, device: torch.device) -> None:
        """Compare a call with the reference."""
        expected = getattr(reference, self.op)(**oracle_of(call, device))
        is_normed = call.get("norm_weight") is not None
        check_close(self.run(call), expected, self.form, device, is_normed=is_normed)


@pytest.fixture
def product(op: str, form: str) -> Product:
    return Product(op, form)


def products(*forms: str) -> pytest.MarkDecorator:
    """Each op with each form as one parameter, so that the short suite has all pairs too."""
    pairs = [Product(op, form) for form in forms for op in OPS]
    return pytest.mark.parametrize("product", pairs, ids=str)


each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_op = pytest.mark.parametrize("op", OPS)
each_form = pytest.mark.parametrize("form", FORMS)
each_format = pytest.mark.parametrize("form", FORMATS)
on_linear = pytest.mark.parametrize("op", ["skinny_linear"])
on_int8 = pytest.mark.parametrize("product", [Product("skinny_linear", "int8")], ids=str)


@products("floats", "int8")
@pytest.mark.parametrize("num_tokens", [*SKINNY_BATCH_SIZES, *LARGE_BATCH_SIZES])
@each_dtype
def test_matches_the_reference(
    num_tokens: int, dtype: torch.dtype, product: Product, device: torch.device
) -> None:
    """Options and activations alternate."""
    for turn, sizes in enumerate(SKINNY_LINEARS, num_tokens):
        if num_tokens in SKINNY_BATCH_SIZES or math.prod(sizes) < 30000:
            call = product.call(num_tokens, *sizes, OPTIONS[turn % 2], dtype, device)
            call["activation"] = ACTIVATIONS[product.op][turn // 2 % 2]
            product.check(call, device)


@on_linear
@each_form
@pytest.mark.parametrize(("multiplier", "soft_cap"), [(0.22, 0.0), (1.0, 1.5), (0.5, 0.7)])
@pytest.mark.parametrize("num_tokens", [1, 9, 40])
def test_multiplied_and_capped_match_the_reference(
    num_tokens: int, multiplier: float, soft_cap: float, product: Product, device: torch.device
) -> None:
    call = product.call(num_tokens, 72, 33, device=device)
    product.check({**call, "multiplier": multiplier, "soft_cap": soft_cap}, device)


@on_linear
@each_form
@each_dtype
def test_a_float32_result_is_what_a_narrower_one_is_rounded_from(
    dtype: torch.dtype, product: Product, device: torch.device
) -> None:
    for num_tokens in (1, 9, 40):
        call = product.call(num_tokens, 72, 33, "all", dtype, device)
        residual = call.pop("residual")
        wide = ops.skinny_linear(**call, dtype=torch.float32)
        assert torch.equal(wide.to(dtype), ops.skinny_linear(**call))
        both = ops.skinny_linear(**call, residual=residual, dtype=torch.float32)
        assert torch.equal(both, residual.float() + wide)


@products(*FORMATS)
@each_dtype
def test_packed_products_match_the_reference(
    dtype: torch.dtype, product: Product, device: torch.device
) -> None:
    for turn, num_tokens in enumerate((0, 1, 2, 3, 7, 33), DTYPES.index(dtype)):
        call = product.call(num_tokens, 512, 70, OPTIONS[turn % 2], dtype, device)
        call["activation"] = ACTIVATIONS[product.op][turn // 2 % 2]
        product.check(call, device)


@each_format
def test_packed_rows_of_any_width_and_view(form: str, device: torch.device) -> None:
    """Also an odd number of blocks; rows of a view begin and end inside panels."""
    for columns in sorted(
        {whole_blocks(each, form) for each in (32, 96, 256, 576, 768, 1536, 4864)}
    ):
        matrix = packed_rows(form, 75, columns, device)
        x = torch.randn(3, columns, device=device)
        call = {"x": x, "weight": matrix.weight, "weight_table": matrix.table}
        Product("skinny_linear", form).check(call, device)
        whole = ops.skinny_linear(**call)
        for rows in (slice(8, None), slice(16, 40), slice(31, 33), slice(1, 75)):
            part = matrix.rows(rows)
            got = ops.skinny_linear(x, part.weight, weight_table=part.table)
            assert torch.equal(got, whole[:, rows])


@each_dtype
def test_packed_rows_of_any_place_and_format(dtype: torch.dtype, device: torch.device) -> None:
    """16 rows of a table need not be a panel: formats in turn, and rows in any order."""
    parts = [(format, 5) for format in FORMATS]
    matrix = on_device(packed_layers([parts], 256, size=1 / 16).unbind()[0], device)
    assert matrix.table is not None
    call = {"x": torch.randn(9, 256, device=device).to(dtype), "weight": matrix.weight}
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(device)
    for rows in (torch.arange(40, device=device), order, order.repeat(3)):
        Product("skinny_linear", "packed").check(
            {**call, "weight_table": matrix.table[rows]}, device
        )


@each_dtype
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu_tanh"])
def test_activations_of_every_size(
    activation: str, dtype: torch.dtype, device: torch.device
) -> None:
    """0 stays 0, large numbers stay, large negative ones go to 0, and NaN stays NaN."""
    sizes = [0.0, 1e-30, 0.5, 2, 5, 9, 11, 20, 87, 89, 200, 1e30, torch.inf]
    values = torch.tensor([*sizes, *(-size for size in sizes), torch.nan], device=device).to(dtype)
    x = torch.ones(1, 1, dtype=dtype, device=device)
    if activation == "relu":
        got, expected = ops.skinny_linear(x, values[:, None], activation="relu"), values.relu()
    else:
        weight = torch.cat((values, torch.ones_like(values)))[:, None]
        got = ops.skinny_gated_linear(x, weight, activation=activation)
        expected = reference.activate_gate(values, activation)
    # 1 + tanh of the oracle loses digits where it is nearly 0.
    atol = {"relu": 0.0, "silu": 1e-30, "gelu_tanh": 1e-15}[activation]
    rtol = 0.0 if activation == "relu" else 1e-5
    torch.testing.assert_close(got[0], expected, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("activation", ACTIVATIONS["skinny_linear"])
@each_dtype
def test_rounds_the_projection_before_the_residual(
    activation: str | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Products of small whole numbers are exact, so that each rounding shows."""
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-9, 10, shape, generator=generator).to(device=device, dtype=dtype)

    call: Call = {"x": whole(5, 200), "weight": whole(37, 200), "bias": whole(37)}
    call |= {"residual": whole(5, 37) * 129, "activation": activation}
    got = ops.skinny_linear(**call)
    assert torch.equal(got, reference.skinny_linear(**call))
    assert (got < 0).any()


@each_op
@each_form
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(
    value: float, product: Product, device: torch.device
) -> None:
    """The row itself is NaN throughout, or at least not finite anywhere."""
    rounds = product.form != "floats" and not emulated.is_cuda_kernel(device)
    for options in OPTIONS:
        call = product.call(5, 70, 33, options, device=device)
        expected = product.run(call)
        call["x"][2, 69] = value
        got = product.run(call)
        assert not got[2].isfinite().any()
        assert got[2].isnan().all() or not (math.isnan(value) or rounds)
        rest = [0, 1, 3, 4]
        assert torch.equal(got[rest], expected[rest])


@on_linear
@each_format
def test_vectors_of_every_width_agree(product: Product) -> None:
    """AVX2, AVX-512 and matrix tiles: exact integers, and one order of the sums."""
    names = [name for name in cases.cpu_capabilities() if name != "portable"]
    if len(names) < 2:
        pytest.skip("this CPU has one width of vectors")
    call = product.call(41, 768, 70, "plain")
    before = _C.cpu_capability()
    try:
        results = []
        for name in names:
            _C.set_cpu_capability(name)
            results.append(product.run(call))
    finally:
        _C.set_cpu_capability(before)
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("form", ["int8", *SMALL_FORMATS])
@pytest.mark.parametrize("num_tokens", [1, 17])
@pytest.mark.parametrize("columns", [131, 576])
@each_dtype
def test_nothing_but_the_result_is_rounded_on_cuda(
    columns: int, num_tokens: int, form: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Numbers are small and whole, and scales powers of two, so that all products are exact."""
    generator = torch.Generator().manual_seed(columns)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    columns = whole_blocks(columns, form)
    x, bias = whole(-8, 9, num_tokens, columns).to(device, dtype), whole(-9, 10, 256)
    call: Call = {"x": x, "bias": bias.to(device, dtype)}
    if form == "int8":
        weight = torch.arange(256 * columns).view(256, columns) * 7 % 256 - 128
        call["weight"] = weight.to(device, torch.int8)
        call["weight_scale"] = (2.0 ** whole(-9, -5, 256)).to(device)
    else:
        blocks = random_blocks(form, 256, columns).view(256, columns // 32, -1)
        powers = 2.0 ** whole(-3, 4, 256, columns // 32, 1)
        blocks[..., :2] = powers.half().view(torch.uint8)
        if form == "MXFP4":
            blocks[..., :1] = 128 + powers.log2()
        if form in ("Q4_1", "Q5_1"):
            blocks[..., 2:4] = (-3 * powers).half().view(torch.uint8)
        matrix = on_device(ops.pack_weight(blocks.flatten(1), form), device)
        call |= {"weight": matrix.weight, "weight_table": matrix.table}
    exact = x.double() @ as_floats(call)["weight"].T + call["bias"].double()
    assert torch.equal(ops.skinny_linear(**call), exact.to(dtype))


@on_int8
def test_large_in_one_place_does_not_blur_the_rest(product: Product, device: torch.device) -> None:
    """With 16 bits, x of about 1 keeps 8 bits and more beside an outlier of 100."""
    call = product.call(1, 576, 64, "plain", device=device)
    call["x"] /= 3
    call["x"][0, 5] = 100
    exact = call["x"].double() @ as_floats(call)["weight"].T
    torch.testing.assert_close(product.run(call), exact.float(), rtol=0, atol=5e-3)


@pytest.mark.parametrize("columns", [4096, 4097, 8192, 8200, (1 << 20) + 33])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_the_largest_weights_fit_at_any_length(
    num_tokens: int, columns: int, device: torch.device
) -> None:
    """Sums in 32 bits would overflow, so that each takes fewer columns."""
    x = torch.ones(num_tokens, columns, device=device)
    weight = torch.full((5, columns), -128, dtype=torch.int8, device=device)
    got = ops.skinny_linear(x, weight, weight_scale=torch.ones(5, device=device))
    torch.testing.assert_close(got, torch.full_like(got, -128 * columns), rtol=1e-6, atol=0)


@on_linear
@pytest.mark.parametrize("form", ["int8", "Q4_1"])
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1e30, 1e36, 3e38])
def test_rows_of_any_size(size: float, product: Product, device: torch.device) -> None:
    if product.form != "int8":
        size = min(size, 1e36)
    elif emulated.is_cuda_kernel(device):
        size = min(size, 1e33)  # unscaled sums have to be finite
    call = product.call(2, 70, 33, "plain", device=device)
    call["x"] = call["x"].sign() * size
    exact = (call["x"].double() @ as_floats(call)["weight"].T).float()
    atol = size * (1e-3 if product.form == "int8" else 1e-4) + 1e-35
    torch.testing.assert_close(product.run(call), exact, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_int8_weight_that_was_not_finite_shows(value: float, device: torch.device) -> None:
    call = Product("skinny_linear").call(2, 40, 9, "plain", device=device)
    call["weight"][4, 7] = value
    got = ops.skinny_linear(**coded(call, "int8"))
    assert got[:, 4].isnan().all()
    assert got[:, :4].isfinite().all()


LINEAR, GATED = OPS[:1], OPS[1:]


def test_heads_for_a_cache_are_refused_in_float32() -> None:
    call = Product("skinny_linear").call(2, 8, 24, "plain", torch.bfloat16)
    cache = torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16)
    append = AppendKv(cache, cache.clone(), torch.zeros(2).long())
    with pytest.raises(RuntimeError, match="out: expected the dtype of x with k_cache, got float"):
        ops.skinny_linear(**call, append=append, dtype=torch.float32)


def fuzzed_skinny_gated_linear(m: Maker) -> Checked:
    tokens, inner, dtype = m.size(40), m.size(40), m.dtype()
    given = {
        **m.product(tokens, 2 * inner, dtype, ("silu", "gelu_tanh")),
        "out": m.states(tokens, inner, dtype),
    }
    return given, compare(out_of(reference.skinny_gated_linear), looser(dtype, 12.0))


def fuzzed_skinny_linear(m: Maker) -> Checked:
    tokens, dtype = m.size(40), m.dtype()
    if m.chance(0.3):
        return appended_call(m, tokens, dtype)
    rows = m.size(70)
    residual = m.maybe(lambda: m.states(tokens, rows, dtype))
    own = residual is None or m.chance()
    given = {
        **m.product(tokens, rows, dtype, (None, "relu")),
        "multiplier": m.one_of(1.0, 0.3),
        "soft_cap": m.one_of(0.0, 2.0),
        "residual": residual,
        "out": m.states(tokens, rows, dtype) if own else residual,
    }
    return given, compare(out_of(reference.skinny_linear), looser(dtype, 8.0))


def appended_call(m: Maker, tokens: int, dtype: torch.dtype) -> Checked:
    """A product whose heads of q, k and v are appended."""
    width, page_size = m.columns(40), m.size(9, 1)
    heads = m.size(4), m.size(3)
    rows = (heads[0] + 2 * heads[1]) * width
    pages = tokens // page_size + m.size(3, 1)
    k_cache, v_cache = m.caches(pages, page_size, heads[1], width, dtype=dtype)
    rotates, normed = m.chance(), width >= 8 and m.chance()

    def norm() -> Tensor:
        return m.placed((1 + m.normal(width) / 8).to(dtype))

    given = {
        **m.product(tokens, rows, dtype, (None,)),
        "residual": None,
        "out": m.states(tokens, rows, dtype),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": m.slots(tokens, k_cache),
        "positions": m.placed(m.whole(30, tokens)) if rotates else None,
        "cos_sin": m.rotary(30, width) if rotates else None,
        "q_norm_weight": norm() if normed else None,
        "k_norm_weight": norm() if normed else None,
        "key_scales": None,
        "value_scales": None,
        "q_cos_sin": None,
    }
    if rotates and m.chance(0.3):
        given["q_cos_sin"] = m.placed(given["cos_sin"].flip(0) * 2)
    appended = [name for name in AppendKv._fields if name in given]

    def oracle(before: Arguments) -> dict[str, Tensor]:
        product = {name: x for name, x in before.items() if name not in (*appended, "out")}
        out = reference.skinny_linear(**product)
        q, k, v = out.view(tokens, sum(heads) + heads[1], width).split((*heads, heads[1]), 1)
        append = {name: before[name] for name in appended}
        turned, k_cache, v_cache = reference.append_kv(q, k, v, **append, eps=before["eps"])
        assert turned is not None
        out = torch.cat((turned.flatten(1), k.flatten(1), v.flatten(1)), 1)
        return {"out": out, "k_cache": k_cache, "v_cache": v_cache}

    return given, compare(oracle, looser(dtype, 8.0))
