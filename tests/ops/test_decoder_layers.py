"""decoder_layers: the very bits of the single ops, and no write before all checks."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import reference
from cases import DECODER_LAYERS_CASES, DTYPES, TOLERANCES, DecoderLayersCase
from eecore import ops
from eecore.models.int8 import quantise_rows

MAX_POSITION = 1024
SMALL = DecoderLayersCase((2, 1), (9, 20), bias=True, qk_norm=True)
# Enough weights for helpers to be woken, twice as many as for one.
LARGE = DecoderLayersCase(
    (1, 3), (300, 70), num_layers=4, end_layer=4, hidden_size=576, inner_size=1100
)


def random_weights(case: DecoderLayersCase, dtype: torch.dtype) -> ops.DecoderWeights:
    generator = torch.Generator().manual_seed(1)
    layers, hidden, inner = case.num_layers, case.hidden_size, case.inner_size
    q_size = case.num_q_heads * case.head_dim
    qkv_size = q_size + 2 * case.num_kv_heads * case.head_dim

    def norm(wanted: bool, size: int) -> Any:
        return (
            (1 + torch.randn(layers, size, generator=generator) / 8).to(dtype) if wanted else None
        )

    def linear(rows: int, columns: int) -> torch.Tensor:
        weight = torch.randn(layers, rows, columns, generator=generator) / math.sqrt(columns)
        return weight.to(dtype)

    def bias(size: int) -> Any:
        return torch.randn(layers, size, generator=generator).to(dtype) if case.bias else None

    return ops.DecoderWeights(
        attention_norm=norm(True, hidden),
        qkv_weight=linear(qkv_size, hidden),
        qkv_bias=bias(qkv_size),
        q_norm=norm(case.qk_norm, case.head_dim),
        k_norm=norm(case.qk_norm, case.head_dim),
        o_weight=linear(hidden, q_size),
        o_bias=bias(hidden),
        mlp_norm=norm(True, hidden),
        gate_up_weight=linear(2 * inner, hidden),
        gate_up_bias=bias(2 * inner),
        down_weight=linear(hidden, inner),
        down_bias=bias(hidden),
    )


def random_call(
    case: DecoderLayersCase,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Scattered pages; NaN in all slots that hold no key of an earlier position."""
    generator = torch.Generator().manual_seed(2)
    size, num_seqs = case.page_size, len(case.seq_lens)
    max_pages = max((-(-length // size) for length in case.seq_lens), default=0)
    num_pages = num_seqs * max_pages + 3
    pages = torch.randperm(num_pages, generator=generator)[: num_seqs * max_pages]
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
    angles = torch.randn(MAX_POSITION, case.rotary_dim // 2, generator=generator)
    hidden = 3 * torch.randn(len(positions), case.hidden_size, generator=generator)

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
        "positions": torch.tensor(positions, dtype=torch.int64),
        "cos_sin": torch.cat((angles.cos(), angles.sin()), 1),
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
    }
    if device is not None:
        assert device.type == "cpu", "tensors of the call are made on the CPU"
    return call


def with_own_caches(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "k_cache": call["k_cache"].clone(), "v_cache": call["v_cache"].clone()}


def compose(call: dict[str, Any]) -> torch.Tensor:
    """The same layers, one op after the other."""
    hidden, weights, eps = call["hidden"], call["weights"], call["eps"]
    num_tokens, num_kv_heads = hidden.shape[0], call["k_cache"].shape[3]
    head_dim = call["k_cache"].shape[4]
    for layer in range(call["begin_layer"], call["end_layer"]):
        w = ops.DecoderWeights(*(None if t is None else t[layer] for t in weights))
        k_cache, v_cache = call["k_cache"][layer], call["v_cache"][layer]
        window = call["sliding_window"]
        if call["skip_attention"] is None or not call["skip_attention"][layer]:
            qkv = ops.skinny_linear(
                hidden,
                w.qkv_weight,
                weight_scale=w.qkv_scale,
                norm_weight=w.attention_norm,
                eps=eps,
                bias=w.qkv_bias,
            ).view(num_tokens, w.qkv_weight.shape[0] // head_dim, head_dim)
            sizes = (qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads)
            q, k, v = qkv.split(sizes, dim=1)
            ops.append_kv(
                q,
                k,
                v,
                k_cache,
                v_cache,
                call["slot_mapping"],
                positions=call["positions"],
                cos_sin=call["cos_sin"],
                q_norm_weight=w.q_norm,
                k_norm_weight=w.k_norm,
                eps=eps,
            )
            attended = ops.paged_attention(
                q,
                k_cache,
                v_cache,
                call["page_table"],
                call["seq_lens"],
                call["query_start_loc"],
                scale=call["scale"],
                sliding_window=0 if window is None else int(window[layer]),
                fixed_split_size=call["fixed_split_size"],
            ).view(num_tokens, w.o_weight.shape[1])
            hidden = ops.skinny_linear(
                attended, w.o_weight, weight_scale=w.o_scale, bias=w.o_bias, residual=hidden
            )
        if call["skip_mlp"] is None or not call["skip_mlp"][layer]:
            gated = ops.skinny_gated_linear(
                hidden,
                w.gate_up_weight,
                weight_scale=w.gate_up_scale,
                norm_weight=w.mlp_norm,
                eps=eps,
                bias=w.gate_up_bias,
            )
            hidden = ops.skinny_linear(
                gated, w.down_weight, weight_scale=w.down_scale, bias=w.down_bias, residual=hidden
            )
    return hidden


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Caches alike to the bit, NaN where there is NaN."""
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0, equal_nan=True)


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
@pytest.mark.parametrize("which", [("qkv", "o", "gate_up", "down"), ("qkv", "down"), ("o",)])
def test_weights_may_be_int8(
    which: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> None:
    one_by_one = random_call(SMALL, dtype, device)
    for name in which:
        whole, scale = quantise_rows(getattr(one_by_one["weights"], f"{name}_weight"))
        int8 = {f"{name}_weight": whole, f"{name}_scale": scale}
        one_by_one["weights"] = one_by_one["weights"]._replace(**int8)
    at_once = with_own_caches(one_by_one)
    assert torch.equal(ops.decoder_layers(**at_once), compose(one_by_one))
    assert_same(at_once, one_by_one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", DECODER_LAYERS_CASES, ids=str)
def test_matches_the_reference(
    case: DecoderLayersCase, dtype: torch.dtype, device: torch.device
) -> None:
    call = random_call(case, dtype, device)
    expected = with_own_caches(call)
    got = ops.decoder_layers(**call)
    expected.pop("fixed_split_size")
    # Roundings of several layers add up.
    tolerance = TOLERANCES[dtype]
    close = {"rtol": 4 * tolerance.rtol, "atol": 16 * tolerance.atol, "equal_nan": True}
    torch.testing.assert_close(got, reference.decoder_layers(**expected), **close)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(call[name], expected[name], **close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_stretch_may_be_cut_anywhere(dtype: torch.dtype, device: torch.device) -> None:
    whole = random_call(SMALL, dtype, device)
    parts = with_own_caches(whole)
    for begin, end in ((0, 1), (1, 1), (1, 3)):
        parts["hidden"] = ops.decoder_layers(**{**parts, "begin_layer": begin, "end_layer": end})
    assert torch.equal(parts["hidden"], ops.decoder_layers(**whole))
    assert_same(parts, whole)


@pytest.mark.parametrize("skip", [(), (0, 1, 2)])
def test_out_may_be_hidden(skip: tuple[int, ...], device: torch.device) -> None:
    call = random_call(DecoderLayersCase((2,), (9,), skip_attention=skip), device=device)
    expected = ops.decoder_layers(**with_own_caches(call))
    assert ops.decoder_layers(**call, out=call["hidden"]) is call["hidden"]
    assert torch.equal(call["hidden"], expected)


def test_strides(device: torch.device) -> None:
    call = random_call(SMALL, device=device)
    expected = ops.decoder_layers(**with_own_caches(call))

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        """The same values between others: NaN behind each row and, in a stack, each layer."""
        wide = torch.full(tuple(n + 1 for n in tensor.shape), torch.nan)
        view = wide[tuple(slice(n) for n in tensor.shape)]
        return view.copy_(tensor)

    names = ("qkv_weight", "o_weight", "gate_up_weight", "down_weight")
    weights = call["weights"]
    call["weights"] = weights._replace(**{name: padded(getattr(weights, name)) for name in names})
    call["hidden"] = padded(call["hidden"])
    both = torch.full((3, 2 * SMALL.hidden_size), torch.nan)
    out = both[:, 5 : 5 + SMALL.hidden_size]
    assert torch.equal(ops.decoder_layers(**call, out=out), expected)
    assert both[:, :5].isnan().all()
    assert both[:, 5 + SMALL.hidden_size :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_depends_on_its_sequence_alone(dtype: torch.dtype, device: torch.device) -> None:
    case = DecoderLayersCase((1, 2, 1), (70, 9, 130))
    call = random_call(case, dtype, device)
    together = ops.decoder_layers(**with_own_caches(call))
    for seq, rows in enumerate((slice(0, 1), slice(1, 3), slice(3, 4))):
        alone = with_own_caches(call)
        for name in ("hidden", "slot_mapping", "positions"):
            alone[name] = call[name][rows]
        alone["page_table"] = call["page_table"][seq : seq + 1]
        alone["seq_lens"] = call["seq_lens"][seq : seq + 1]
        alone["query_start_loc"] = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
        assert torch.equal(ops.decoder_layers(**alone), together[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_nothing(dtype: torch.dtype, device: torch.device) -> None:
    call = random_call(LARGE, dtype, device)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3, 4, 13):
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


def replaced(**weights: Any) -> dict[str, Any]:
    return {"weights": weights}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 64).long()}, r"hidden: expected float32, bfloat16 .* got int64"),
        ({"hidden": torch.zeros(3, 64).half()}, r"hidden: expected float32 or bfloat16 on the CPU"),
        ({"hidden": torch.zeros(64, 3).T}, r"hidden: expected the last 1 .* contiguous"),
        ({"hidden": torch.zeros(3, 65)}, r"attention_norm: expected float32 \[num_layers, hidden_"),
        (replaced(mlp_norm=torch.zeros(3, 63)), r"mlp_norm: expected float32 \[num_layers=3, hidd"),
        (replaced(q_norm=torch.zeros(3, 63)), r"q_norm: expected float32 \[num_layers=3, head_dim"),
        (replaced(k_norm=torch.zeros(2, 64)), r"k_norm: expected float32 \[num_layers=3, head_dim"),
        (replaced(o_weight=torch.zeros(3, 63, 256)), r"o_weight: expected float32 \[num_layers=3,"),
        (replaced(o_weight=torch.zeros(3, 64, 250), qkv_weight=torch.zeros(3, 506, 64),
                  qkv_bias=None), r"o_weight: expected q_size a multiple of num_kv_heads \* head_"),
        (replaced(o_bias=torch.zeros(3, 63)), r"o_bias: expected float32 \[num_layers=3, hidden_"),
        (replaced(qkv_weight=torch.zeros(3, 511, 64)), r"qkv_weight: .*=3, 512, hidden_size=64\],"),
        (replaced(qkv_bias=torch.zeros(3, 511)), r"qkv_bias: expected float32 .* got float32 \[3,"),
        (replaced(qkv_scale=torch.ones(3, 512)), r"qkv_weight: expected int8 \[num_layers=3, 512,"),
        (replaced(o_weight=torch.zeros(3, 64, 256).char()), r"o_weight: expected float32 .* got i"),
        (replaced(o_weight=torch.zeros(3, 64, 256).char(), o_scale=torch.ones(3, 63)),
         r"o_scale: expected float32 \[num_layers=3, hidden_size=64\], got float32 \[3, 63\]"),
        (replaced(down_weight=torch.zeros(3, 64, 96).char(), down_scale=torch.ones(3, 65)[:, :64]),
         r"down_scale: expected a contiguous tensor, got layer stride 65"),
        (replaced(qkv_weight=torch.zeros(3, 64, 512).mT), r"qkv_weight: .* last 1 .* contiguous"),
        (replaced(down_weight=torch.zeros(2, 64, 96)), r"down_weight: expected float32 \[num_laye"),
        (replaced(down_bias=torch.zeros(64)), r"down_bias: expected float32 .* got float32 \[64\]"),
        (replaced(gate_up_weight=torch.zeros(3, 191, 64)), r"gate_up_weight: .*=3, 192, hidden_si"),
        (replaced(gate_up_bias=torch.zeros(3, 191)), r"gate_up_bias: expected float32 \[num_layer"),
        ({"v_cache": torch.zeros(3, 9, 8, 1, 64)}, r"v_cache: expected float32 \[num_layers=3, nu"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, r"slot_mapping: expected int64 \[nu"),
        ({"slot_mapping": torch.tensor([0, 72, 1])}, r"slot_mapping: expected values in \[-1, 72"),
        ({"positions": torch.zeros(3).int()}, r"positions: expected int64 \[num_tokens=3\], got i"),
        ({"positions": torch.tensor([0, 1, 1024])}, r"positions: expected values in \[0, 1024\), "),
        ({"cos_sin": torch.zeros(9, 66)}, r"cos_sin: expected an even rotary_dim of at most head_"),
        ({"page_table": torch.zeros(2, 3)}, r"page_table: expected int32 \[num_seqs, max_pages_pe"),
        ({"page_table": torch.full((2, 3), 9).int()}, r"page_table: expected entries in \[0, num_"),
        ({"seq_lens": torch.tensor([9]).int()}, r"seq_lens: expected int32 \[num_seqs=2\], got in"),
        ({"seq_lens": torch.tensor([9, 25]).int()}, r"seq_lens: expected values in \[0, max_pages"),
        ({"query_start_loc": torch.tensor([0, 3]).int()}, r"query_start_loc: expected int32 \[3\]"),
        ({"query_start_loc": torch.tensor([0, 2, 4]).int()}, r"query_start_loc: .* end at num_tok"),
        ({"sliding_window": torch.zeros(2).int()}, r"sliding_window: expected int32 \[num_layers="),
        ({"sliding_window": torch.tensor([0, -1, 0]).int()}, r"sliding_window: .* -1 for layer 1"),
        ({"skip_attention": torch.zeros(3)}, r"skip_attention: expected bool \[num_layers=3\], go"),
        ({"skip_mlp": torch.zeros(2).bool()}, r"skip_mlp: expected bool \[num_layers=3\], got boo"),
        ({"begin_layer": -1}, r"begin_layer, end_layer: expected 0 <= .* num_layers=3, got -1 and"),
        ({"begin_layer": 2, "end_layer": 1}, r"begin_layer, end_layer: expected .* got 2 and 1"),
        ({"end_layer": 4}, r"begin_layer, end_layer: expected .* <= num_layers=3, got 0 and 4"),
        ({"eps": -1.0}, r"eps: expected a number >= 0, got -1"),
        ({"fixed_split_size": -1}, r"fixed_split_size: expected 0 or more keys, got -1"),
        ({"out": torch.zeros(3, 63)}, r"out: expected float32 \[num_tokens=3, hidden_size=64\], g"),
        ({"out": torch.zeros(64).expand(3, 64)}, r"out: expected rows that do not overlap, got ro"),
    ],
)  # fmt: skip
def test_bad_input_is_named_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    call = {**random_call(SMALL), "out": torch.zeros(3, 64)}
    weights = call["weights"]._replace(**change.get("weights", {}))
    call = {**call, **change, "weights": weights}
    untouched = with_own_caches(call)
    with pytest.raises(RuntimeError, match=f"decoder_layers: {message}"):
        ops.decoder_layers(**call)
    assert not call["out"].any()
    assert_same(call, untouched)


@pytest.mark.parametrize("head_dim", [36, 264])
def test_a_head_dim_that_attention_cannot_do_is_refused(head_dim: int) -> None:
    call = random_call(DecoderLayersCase(head_dim=head_dim, rotary_dim=32))
    with pytest.raises(RuntimeError, match="k_cache: expected head_dim a multiple of 8 in"):
        ops.decoder_layers(**call)


def test_pages_behind_every_window_may_hold_garbage() -> None:
    case = DecoderLayersCase((1,), (100,), sliding_window=(9, 7, 0), skip_attention=(2,))
    call = random_call(case)
    call["page_table"][:, :11] = 2**31 - 1
    ops.decoder_layers(**call)
    call["skip_attention"] = None
    with pytest.raises(RuntimeError, match="page_table: expected entries in"):
        ops.decoder_layers(**call)


def test_hidden_that_overlaps_out_is_refused() -> None:
    call = random_call(DecoderLayersCase((2,), (2,)))
    memory = torch.zeros(300)
    call["hidden"] = memory[:128].view(2, 64)
    with pytest.raises(RuntimeError, match="hidden: expected out itself or memory apart from it"):
        ops.decoder_layers(**call, out=memory[8:136].view(2, 64))
    assert not memory.any()


def test_opcheck(device: torch.device) -> None:
    call = {**random_call(SMALL, device=device), "out": torch.zeros(3, 64)}
    call = {**call.pop("weights")._asdict(), **call}
    torch.library.opcheck(torch.ops.eecore.decoder_layers.default, (), call)


def test_compiles() -> None:
    call = random_call(SMALL)
    expected = ops.decoder_layers(**with_own_caches(call))
    compiled = torch.compile(ops.decoder_layers, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**call), expected)
