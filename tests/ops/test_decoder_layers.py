"""decoder_layers: the bits of the single ops, for any rows and number of threads."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Iterator
from random import Random
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

import reference
from cases import DECODER_LAYERS_CASES, DTYPES, DecoderLayersCase, Tolerance
from eecore import ops
from random_calls import Arguments, Checked, Maker, compare
from random_pages import fill_keys, places_of_keys, random_pages, starts

MAX_POSITION = 1024
SMALL = DecoderLayersCase((2, 1), (9, 20), bias=True, qk_norm=True)
ENCODED = DecoderLayersCase((2, 1), (9, 20), cross_lens=(20, 3), num_buckets=32)
# Enough weights for helpers to be woken, twice as many as for one.
LARGE = DecoderLayersCase(
    (1, 3), (300, 70), num_layers=4, end_layer=4, hidden_size=576, inner_size=1100
)


def random_weights(case: DecoderLayersCase, dtype: torch.dtype) -> ops.DecoderWeights:
    generator = torch.Generator().manual_seed(1)
    layers, hidden, inner = case.num_layers, case.hidden_size, case.inner_size
    q_size = case.num_q_heads * case.head_dim
    qkv_size = q_size + 2 * case.num_kv_heads * case.head_dim
    halves = 1 if case.activation == "relu" else 2

    def norm(wanted: bool, size: int) -> Any:
        return (
            (1 + torch.randn(layers, size, generator=generator) / 8).to(dtype) if wanted else None
        )

    def linear(rows: int, columns: int) -> ops.Matrix:
        weight = torch.randn(layers, rows, columns, generator=generator) / math.sqrt(columns)
        bias = torch.randn(layers, rows, generator=generator).to(dtype) if case.bias else None
        return ops.Matrix(weight.to(dtype), bias)

    return ops.DecoderWeights(
        attention_norm=norm(case.pre_norm, hidden),
        qkv=linear(qkv_size, hidden),
        q_norm=norm(case.qk_norm, q_size if case.norms_all else case.head_dim),
        k_norm=norm(case.qk_norm, (qkv_size - q_size) // 2 if case.norms_all else case.head_dim),
        o=linear(hidden, q_size),
        mlp_norm=norm(case.pre_norm, hidden),
        gate_up=linear(halves * inner, hidden),
        down=linear(hidden, inner),
        attention_post_norm=norm(case.post_norm, hidden),
        mlp_post_norm=norm(case.post_norm, hidden),
    )


def random_cross(
    case: DecoderLayersCase, pages: torch.Tensor, caches: list[torch.Tensor]
) -> ops.CrossAttention:
    """An encoder's keys and values written into `pages`, as many as there are for each sequence."""
    assert case.cross_lens is not None
    generator = torch.Generator().manual_seed(3)
    dtype, layers, hidden = caches[0].dtype, case.num_layers, case.hidden_size
    q_size = case.num_q_heads * case.head_dim

    def normal(*shape: int, deviation: float) -> torch.Tensor:
        return (deviation * torch.randn(shape, generator=generator)).to(dtype)

    num_seqs = len(case.cross_lens)
    page_table = pages.view(num_seqs, len(pages) // max(num_seqs, 1)).int()
    for length, row in zip(case.cross_lens, page_table.tolist(), strict=True):
        for position in range(length):
            index, offset = divmod(position, case.page_size)
            for cache in caches:
                keys = cache[:, row[index], offset]
                keys.copy_(normal(*keys.shape, deviation=1))
    for length, row in zip(case.cross_lens, page_table, strict=True):
        row[-(-length // case.page_size) :] = 2**31 - 1  # entries that no key uses
    return ops.CrossAttention(
        norm=1 + normal(layers, hidden, deviation=1 / 8),
        q=ops.Matrix(normal(layers, q_size, hidden, deviation=hidden**-0.5)),
        o=ops.Matrix(normal(layers, hidden, q_size, deviation=q_size**-0.5)),
        page_table=page_table,
        seq_lens=torch.tensor(case.cross_lens, dtype=torch.int32),
    )


def random_call(
    case: DecoderLayersCase,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """A call with scattered pages, and NaN in all slots without a key of an earlier position."""
    generator = torch.Generator().manual_seed(2)
    size, num_seqs = case.page_size, len(case.seq_lens)
    max_pages = max((-(-length // size) for length in case.seq_lens), default=0)
    max_cross_pages = max((-(-length // size) for length in case.cross_lens or ()), default=0) + 1
    num_cross_pages = 0 if case.cross_lens is None else num_seqs * max_cross_pages
    num_pages = num_seqs * max_pages + num_cross_pages + 3
    pages = torch.randperm(num_pages, generator=generator)[: num_seqs * max_pages + num_cross_pages]
    pages, cross_pages = pages.split((num_seqs * max_pages, num_cross_pages))
    page_table = pages.view(num_seqs, max_pages)
    cache_shape = (case.num_layers, num_pages, size, case.num_kv_heads, case.head_dim)
    caches = [torch.full(cache_shape, torch.nan, dtype=dtype) for _ in range(2)]
    positions, slots = [], []
    for seq, (length, num_queries) in enumerate(zip(case.seq_lens, case.num_queries, strict=True)):
        for position in range(length):
            page, offset = int(page_table[seq, position // size]), position % size
            if position >= length - num_queries:
                positions.append(position)
                slots.append(page * size + offset)
            else:
                for cache in caches:
                    keys = torch.randn(cache[:, page, offset].shape, generator=generator)
                    cache[:, page, offset] = keys.to(dtype)
    tables = (case.num_ropes,) if case.num_ropes else ()
    angles = torch.randn(*tables, MAX_POSITION, case.rotary_dim // 2, generator=generator)
    places = torch.arange(2 * case.num_layers).view(-1, 2) % max(case.num_ropes, 1)
    hidden = 3 * torch.randn(len(positions), case.hidden_size, generator=generator)
    bias = torch.randn(case.num_buckets, case.num_q_heads, generator=generator)

    def flags(layers: tuple[int, ...]) -> torch.Tensor | None:
        mask = torch.zeros(case.num_layers, dtype=torch.bool)
        mask[list(layers)] = True
        return mask if layers else None

    window = case.sliding_window
    call = {
        "hidden": hidden.to(dtype),
        "weights": random_weights(case, dtype),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "slot_mapping": torch.tensor(slots, dtype=torch.int64),
        "positions": torch.tensor(positions, dtype=torch.int64) if case.rotary else None,
        "cos_sin": torch.cat((angles.cos(), angles.sin()), -1) if case.rotary else None,
        "layer_ropes": places.int() if case.num_ropes else None,
        "page_table": page_table.to(torch.int32),
        "seq_lens": torch.tensor(case.seq_lens, dtype=torch.int32),
        "query_start_loc": torch.tensor(
            [0, *itertools.accumulate(case.num_queries)], dtype=torch.int32
        ),
        "begin_layer": case.begin_layer,
        "end_layer": case.end_layer,
        "scale": case.head_dim**-0.5,
        "eps": 1e-5,
        "sliding_window": None if window is None else torch.tensor(window, dtype=torch.int32),
        "skip_attention": flags(case.skip_attention),
        "skip_mlp": flags(case.skip_mlp),
        "fixed_split_size": case.fixed_split_size,
        "cross": None if case.cross_lens is None else random_cross(case, cross_pages, caches),
        "position_bias": bias if case.num_buckets else None,
        "max_distance": case.max_distance,
        "activation": case.activation,
        "residual_multiplier": case.residual_multiplier,
        "soft_cap": case.soft_cap,
        "causal": case.causal,
    }
    if device is not None:
        assert device.type == "cpu", "tensors of the call are made on the CPU"
    return call


def with_own_caches(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "k_cache": call["k_cache"].clone(), "v_cache": call["v_cache"].clone()}


def linear_of(matrix: ops.Matrix, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """A linear layer by the single op."""
    weight, bias, scale, table = matrix
    return ops.skinny_linear(
        x, weight, bias=bias, weight_scale=scale, weight_table=table, **options
    )


def scales_of(call: dict[str, Any], layer: int) -> dict[str, torch.Tensor]:
    """The scales of a layer's keys and values, where caches in float8 have some."""
    names = ("key_scales", "value_scales")
    return {name: call[name][layer] for name in names if call.get(name) is not None}


def compose_cross(call: dict[str, Any], hidden: torch.Tensor, layer: int) -> torch.Tensor:
    """The attention of a layer to the encoder's keys, one op after the other."""
    cross: ops.CrossAttention = call["cross"]
    into, out_of = cross.q.unbind()[layer], cross.o.unbind()[layer]
    q = linear_of(into, hidden, norm_weight=cross.norm[layer], eps=call["eps"])
    attended = ops.paged_attention(
        q.unflatten(1, (-1, call["k_cache"].shape[4])),
        call["k_cache"][layer],
        call["v_cache"][layer],
        cross.page_table,
        cross.seq_lens,
        call["query_start_loc"],
        scale=call["scale"],
        causal=False,
        fixed_split_size=call["fixed_split_size"],
        **scales_of(call, layer),
    )
    return onto(call, hidden, attended.view(q.shape), out_of, None)


def onto(
    call: dict[str, Any],
    hidden: torch.Tensor,
    x: torch.Tensor,
    matrix: ops.Matrix,
    norm: torch.Tensor | None,
) -> torch.Tensor:
    """The residual stream plus the output of a sublayer."""
    multiplier = call["residual_multiplier"]
    if norm is None:
        return linear_of(matrix, x, residual=hidden, multiplier=multiplier)
    given = linear_of(matrix, x)
    return ops.add_normed(given, norm, hidden, eps=call["eps"], multiplier=multiplier)


def compose(call: dict[str, Any]) -> torch.Tensor:
    """The same layers, one op after the other."""
    hidden, weights, eps = call["hidden"], call["weights"], call["eps"]
    num_tokens, num_kv_heads = hidden.shape[0], call["k_cache"].shape[3]
    head_dim = call["k_cache"].shape[4]
    for layer in range(call["begin_layer"], call["end_layer"]):
        w = weights.unbind()[layer]
        k_cache, v_cache = call["k_cache"][layer], call["v_cache"][layer]
        window = call["sliding_window"]
        if call["skip_attention"] is None or not call["skip_attention"][layer]:
            qkv = linear_of(w.qkv, hidden, norm_weight=w.attention_norm, eps=eps)
            qkv = qkv.view(num_tokens, qkv.shape[1] // head_dim, head_dim)
            sizes = (qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads)
            q, k, v = qkv.split(sizes, dim=1)
            tables, places = call["cos_sin"], call["layer_ropes"]
            ops.append_kv(
                q,
                k,
                v,
                k_cache,
                v_cache,
                call["slot_mapping"],
                positions=call["positions"],
                cos_sin=tables if places is None else tables[places[layer, 1]],
                q_cos_sin=None if places is None else tables[places[layer, 0]],
                q_norm_weight=w.q_norm,
                k_norm_weight=w.k_norm,
                eps=eps,
                **scales_of(call, layer),
            )
            attended = ops.paged_attention(
                q,
                k_cache,
                v_cache,
                call["page_table"],
                call["seq_lens"],
                call["query_start_loc"],
                scale=call["scale"],
                soft_cap=call["soft_cap"],
                causal=call["causal"],
                sliding_window=0 if window is None else int(window[layer]),
                fixed_split_size=call["fixed_split_size"],
                position_bias=call["position_bias"],
                max_distance=call["max_distance"],
                **scales_of(call, layer),
            ).flatten(1)
            hidden = onto(call, hidden, attended, w.o, w.attention_post_norm)
            if call["cross"] is not None:
                hidden = compose_cross(call, hidden, layer)
        if call["skip_mlp"] is None or not call["skip_mlp"][layer]:
            is_gated = call["activation"] != "relu"
            into_inner = ops.skinny_gated_linear if is_gated else ops.skinny_linear
            inner = into_inner(
                hidden,
                w.gate_up.weight,
                weight_scale=w.gate_up.scale,
                weight_table=w.gate_up.table,
                norm_weight=w.mlp_norm,
                eps=eps,
                bias=w.gate_up.bias,
                activation=call["activation"],
            )
            hidden = onto(call, hidden, inner, w.down, w.mlp_post_norm)
    return hidden


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Caches have to be equal to the bit, with NaN at the same places."""
    for name in ("k_cache", "v_cache"):
        one, other = got[name].float(), expected[name].float()
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")  # a split left to the call depends on the threads it gets
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", DECODER_LAYERS_CASES, ids=str)
def test_gives_the_bits_of_the_single_ops(
    case: DecoderLayersCase, dtype: torch.dtype, device: torch.device
) -> None:
    one_by_one = random_call(case, dtype, device)
    at_once = with_own_caches(one_by_one)
    before = at_once["hidden"].clone()
    assert torch.equal(ops.decoder_layers(**at_once), compose(one_by_one))
    assert_same(at_once, one_by_one)
    assert torch.equal(at_once["hidden"], before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_stretch_may_be_cut_anywhere(dtype: torch.dtype, device: torch.device) -> None:
    whole = random_call(SMALL, dtype, device)
    parts = with_own_caches(whole)
    for begin, end in ((0, 1), (1, 1), (1, 3)):
        parts["hidden"] = ops.decoder_layers(**{**parts, "begin_layer": begin, "end_layer": end})
    assert torch.equal(parts["hidden"], ops.decoder_layers(**whole))
    assert_same(parts, whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cross_lens", [None, (20, 100, 0)])
def test_a_row_depends_on_its_sequence_alone(
    cross_lens: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device
) -> None:
    num_buckets = 0 if cross_lens is None else 32
    case = DecoderLayersCase(
        (1, 2, 1), (70, 9, 130), cross_lens=cross_lens, num_buckets=num_buckets
    )
    call = random_call(case, dtype, device)
    together = ops.decoder_layers(**with_own_caches(call))
    for seq, rows in enumerate((slice(0, 1), slice(1, 3), slice(3, 4))):
        alone = with_own_caches(call)
        for name in ("hidden", "slot_mapping", "positions"):
            alone[name] = call[name][rows]
        alone["page_table"] = call["page_table"][seq : seq + 1]
        alone["seq_lens"] = call["seq_lens"][seq : seq + 1]
        if cross_lens is not None:
            alone["cross"] = call["cross"]._replace(
                page_table=call["cross"].page_table[seq : seq + 1],
                seq_lens=call["cross"].seq_lens[seq : seq + 1],
            )
        alone["query_start_loc"] = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
        assert torch.equal(ops.decoder_layers(**alone), together[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cross_lens", [None, (90, 200)])
def test_the_number_of_threads_changes_nothing(
    cross_lens: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device
) -> None:
    call = random_call(dataclasses.replace(LARGE, cross_lens=cross_lens), dtype, device)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3, 13):
            torch.set_num_threads(num_threads)
            run = with_own_caches(call)
            results.append((ops.decoder_layers(**run), run))
    finally:
        torch.set_num_threads(before)
    for got, run in results[1:]:
        assert torch.equal(got, results[0][0])
        assert_same(run, results[0][1])


def test_calls_from_several_python_threads(device: torch.device) -> None:
    """Every caller has a crew of its own, on more threads than there may be cores."""
    call = random_call(LARGE, device=device)
    expected = ops.decoder_layers(**with_own_caches(call))
    before = torch.get_num_threads()
    wrong: list[int] = []

    def work(index: int) -> None:
        torch.set_num_threads(2)
        run = with_own_caches(call)
        for _ in range(5):
            if not torch.equal(ops.decoder_layers(**run), expected):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert not wrong


def test_slot_minus_one_writes_nothing(device: torch.device) -> None:
    call = random_call(DecoderLayersCase((1, 1), (1, 9)), device=device)
    call["slot_mapping"][0] = -1
    written = with_own_caches(call)
    ops.decoder_layers(**written)
    changed = ~((written["k_cache"] == call["k_cache"]) | call["k_cache"].isnan())
    page, offset = divmod(int(call["slot_mapping"][1]), 8)
    assert not changed.any()
    was_free = call["k_cache"].isnan() & ~written["k_cache"].isnan()
    assert was_free.nonzero()[:, 1:3].unique(dim=0).tolist() == [[page, offset]]


def arguments(fields: Any) -> dict[str, Any]:
    """The tensors of DecoderWeights or of CrossAttention under the names of the schema."""
    found = {}
    for name, field in fields._asdict().items():
        if isinstance(field, ops.Matrix):
            found |= {f"{name}_{part}": tensor for part, tensor in field._asdict().items()}
        else:
            found[name] = field
    return found


def test_the_schema_lists_what_the_wrapper_is_given() -> None:
    """The stable ABI has no structs: a matrix is four arguments, its field's name before each.

    Those of its table stand at the end of the schema, before the scales of a cache and switches.
    """

    def names(fields: type, prefix: str = "") -> list[str]:
        listed = []
        for name, hint in get_type_hints(fields).items():
            is_matrix = hint is ops.Matrix
            listed += names(ops.Matrix, f"{prefix}{name}_") if is_matrix else [prefix + name]
        return listed

    def tables(listed: list[str]) -> list[str]:
        return [name for name in listed if name.endswith("_table") and name != "cross_page_table"]

    schema = torch.ops.eecore.decoder_layers.default._schema
    given = up_to_a_cache([argument.name for argument in schema.arguments])
    weights, cross = names(ops.DecoderWeights), names(ops.CrossAttention, "cross_")
    at_the_end = tables(weights) + tables(cross)
    assert len(at_the_end) == 6
    assert given[-len(at_the_end) :] == at_the_end
    weights, cross = ([n for n in each if n not in at_the_end] for each in (weights, cross))
    assert given[1 : 1 + len(weights)] == weights
    begin = given.index("cross_norm")
    assert given[begin : begin + len(cross)] == cross


def up_to_a_cache(names: list[str]) -> list[str]:
    """The arguments before the scales of a cache, after which are numbers and switches."""
    end = names.index("key_scales")
    assert names[end + 1] == "value_scales"
    return names[:end]


def test_the_schema_of_kv_fill_lists_a_matrix_too() -> None:
    arguments = torch.ops.eecore.kv_fill.default._schema.arguments
    given = up_to_a_cache([argument.name for argument in arguments])
    assert [*given[3:6], given[-1]] == [f"kv_{part}" for part in ops.Matrix._fields]


@pytest.mark.parametrize("head_dim", [36, 264])
def test_a_head_dim_that_attention_cannot_do_is_refused(head_dim: int) -> None:
    call = random_call(DecoderLayersCase(head_dim=head_dim, rotary_dim=32))
    with pytest.raises(RuntimeError, match="k_cache: expected head_dim a multiple of 8 in"):
        ops.decoder_layers(**call)


def test_pages_before_every_window_may_hold_garbage() -> None:
    case = DecoderLayersCase((1,), (100,), sliding_window=(9, 7, 0), skip_attention=(2,))
    call = random_call(case)
    call["page_table"][:, :11] = 2**31 - 1
    ops.decoder_layers(**call)
    call["skip_attention"] = None
    with pytest.raises(RuntimeError, match="page_table: expected entries in"):
        ops.decoder_layers(**call)


def as_wrapped(arguments: Arguments) -> dict[str, Any]:
    """Arguments of the schema as the wrapper takes them: matrices, weights, cross-attention."""
    made = dict(arguments)

    def matrix(name: str) -> ops.Matrix:
        return ops.Matrix(*(made.pop(f"{name}_{part}") for part in ops.Matrix._fields))

    def gathered(fields: Any, prefix: str = "") -> Any:
        hints = get_type_hints(fields)
        names = {name: prefix + name for name in fields._fields}
        return fields(
            **{
                field: matrix(name) if hints[field] is ops.Matrix else made.pop(name, None)
                for field, name in names.items()
            }
        )

    made["weights"] = gathered(ops.DecoderWeights)
    if "cross_norm" in made:
        made["cross"] = gathered(ops.CrossAttention, "cross_")
    return made


@pytest.mark.usefixtures("one_thread", "device")
def test_random_stretches_give_the_bits_of_the_single_ops() -> None:
    """Weights of any form, biases, cross-attention, caches in float8, strides of any kind."""
    defaults = dict.fromkeys(("sliding_window", "skip_attention", "skip_mlp", "cross"))
    defaults |= {"layer_ropes": None, "soft_cap": 0.0}
    for seed in range(60):
        given, _ = fuzzed_call(Maker(Random(seed)))
        one_by_one = defaults | as_wrapped(given)
        out = one_by_one.pop("out").clone()
        at_once = with_own_caches(one_by_one)
        got = ops.decoder_layers(**at_once, out=out)
        torch.testing.assert_close(got, compose(one_by_one), rtol=0, atol=0, equal_nan=True)
        assert_same(at_once, one_by_one)


def fuzzed_call(m: Maker) -> Checked:
    layers, dtype = m.size(3, 1), torch.float32
    heads, group, width = m.size(2, 1), m.size(3, 1), 8 * m.size(4, 1)
    size, inner, page_size = m.columns(40), m.columns(40), m.size(9, 1)
    lengths = [m.size(30, 1) for _ in range(m.size(3))]
    queries = [m.size(min(length, 4), 1) for length in lengths]
    tokens = sum(queries)
    has_cross = m.chance(0.3)
    cross_lens = [m.size(20) for _ in lengths] if has_cross else []
    total, table = random_pages(m, [*lengths, *cross_lens], page_size)
    table, cross_table = table[: len(lengths)], table[len(lengths) :]
    kept, scales = m.cache_format(dtype, layers, heads)
    k_cache, v_cache = m.caches(layers, total, page_size, heads, width, dtype=kept)
    slots, positions = [], []
    for row, length, count in zip(table.tolist(), lengths, queries, strict=True):
        for key in range(length - count, length):
            positions.append(key)
            slots.append(row[key // page_size] * page_size + key % page_size)
    for cache in (k_cache, v_cache):
        fill_keys(m, cache, list(places_of_keys(lengths, table, page_size)))
        fill_keys(m, cache, list(places_of_keys(cross_lens, cross_table, page_size)))
    q_size, kv_size = group * heads * width, heads * width
    relu = m.chance(0.3)

    def matrix(name: str, rows: int, columns: int) -> Arguments:
        made = m.weight(dtype, layers, rows, columns)
        bias = m.maybe(lambda: m.placed(m.normal(layers, rows)))
        parts = made._replace(bias=bias)._asdict()
        return {f"{name}_{part}": value for part, value in parts.items()}

    def norm(columns: int) -> Tensor:
        return m.placed(1 + m.normal(layers, columns) / 8)

    rotates = m.chance()
    begin = m.random.randint(0, layers)
    hidden = m.states(tokens, size, dtype)
    given = {
        "hidden": hidden,
        "attention_norm": m.maybe(lambda: norm(size)),
        **matrix("qkv", q_size + 2 * kv_size, size),
        "q_norm": m.maybe(lambda: norm(m.one_of(width, q_size))),
        "k_norm": m.maybe(lambda: norm(m.one_of(width, kv_size))),
        **matrix("o", size, q_size),
        "mlp_norm": m.maybe(lambda: norm(size)),
        **matrix("gate_up", inner if relu else 2 * inner, size),
        **matrix("down", size, inner),
        "attention_post_norm": m.maybe(lambda: norm(size)),
        "mlp_post_norm": m.maybe(lambda: norm(size)),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": m.placed(torch.tensor(slots, dtype=torch.int64)),
        "positions": m.placed(torch.tensor(positions, dtype=torch.int64)) if rotates else None,
        "cos_sin": m.rotary(30, width) if rotates else None,
        "page_table": m.placed(table, 1),
        "seq_lens": m.placed(torch.tensor(lengths, dtype=torch.int32)),
        "query_start_loc": m.placed(starts(queries)),
        "sliding_window": m.maybe(lambda: m.placed(m.whole(20, layers).int())),
        "skip_attention": m.maybe(lambda: m.flags(layers)),
        "skip_mlp": m.maybe(lambda: m.flags(layers)),
        "out": hidden if m.chance(0.3) else m.states(tokens, size, dtype),
        "begin_layer": begin,
        "end_layer": m.random.randint(begin, layers),
        "scale": width**-0.5,
        "eps": 1e-5,
        "fixed_split_size": m.one_of(0, 16),
        "position_bias": m.maybe(lambda: m.placed(m.normal(8, heads * group))),
        "max_distance": 30,
        "activation": "relu" if relu else m.one_of("silu", "gelu_tanh"),
        "residual_multiplier": m.one_of(1.0, 0.3),
        "causal": m.chance(),
        **scales,
    }
    if given["position_bias"] is None:
        given["soft_cap"] = m.one_of(0.0, 1.5)
    if rotates and m.chance():
        given["cos_sin"] = m.placed(torch.stack([given["cos_sin"], given["cos_sin"].flip(0)]))
        given["layer_ropes"] = m.placed(m.whole(2, layers, 2).int())
    if has_cross:
        given |= {
            "cross_norm": norm(size),
            **matrix("cross_q", q_size, size),
            **matrix("cross_o", size, q_size),
            "cross_page_table": m.placed(cross_table, 1),
            "cross_seq_lens": m.placed(torch.tensor(cross_lens, dtype=torch.int32)),
        }

    def oracle(before: Arguments) -> dict[str, Tensor]:
        made = as_wrapped(before)
        for name in ("out", "fixed_split_size"):
            del made[name]
        caches = {name: made[name] for name in ("k_cache", "v_cache")}
        return {"out": reference.decoder_layers(**made), **caches}

    tables = given.keys() - {"page_table", "cross_page_table"}
    packed = any(given[name] is not None for name in tables if name.endswith("_table"))
    # A step of 8 bits, taken where the oracle does not, goes through the layers after it.
    steps = packed or kept != dtype
    return given, compare(oracle, Tolerance(0.1, 0.2) if steps else Tolerance(4e-4, 4e-4))
