"""Kernels read each weight and key as often as they must, in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_exit_rows import LAYER, Point
from test_kv_fill import packed
from test_kv_fill import random_call as fill_call
from test_paged_attention import random_call as attention_call
from test_skinny_products import Product

import emulated
import reference
from bench.gpu.cases import cases
from cases import AttentionCase, KvFillCase
from eecore import ops
from eecore.models.int8 import quantise_rows
from packed_blocks import random_blocks
from tiers import in_all

CPU = torch.device("cpu")
Call = dict[str, Any]
FLOATS = (torch.bfloat16,)


def launched(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], object], **watched: torch.Tensor
) -> dict[str, emulated.CountedLaunch]:
    """The launches of a call by the names of their kernels, each of which it launches once."""
    with monkeypatch.context() as routed:
        emulated.route(routed)
        with emulated.counting(**watched) as counted:
            run()
    by_name = {launch.name: launch for launch in counted}
    assert len(by_name) == len(counted)
    return by_name


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("num_tokens", [1, 9, 70])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 512), (192, 96)])
def test_skinny_linear_reads_each_weight_once_for_a_group_of_rows(
    in_features: int,
    out_features: int,
    num_tokens: int,
    options: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = Product("skinny_linear").call(num_tokens, in_features, out_features, options, dtype)
    ran = launched(monkeypatch, lambda: ops.skinny_linear(**call), weight=call["weight"])
    product = ran["skinny_linear_kernel"]
    total, distinct = product.watched["weight"]
    assert distinct == call["weight"].nbytes
    assert product.grid[1] == groups_of(num_tokens, dtype)
    if out_features % 256 == 0:  # whole tiles, however they are cut
        assert total == product.grid[1] * distinct
    # A few rows the blocks make ready themselves.
    must_be_made = options == "all" or in_features % 64 != 0
    few = num_tokens <= (8 if dtype == torch.float32 else 32)
    assert len(ran) == (2 if must_be_made and not few else 1)


def groups_of(num_rows: int, dtype: torch.dtype) -> int:
    """The passes over a weight for so many rows, each of up to 64, in float32 of 16."""
    return -(-num_rows // (16 if dtype == torch.float32 else 64))


def packed_weight(format: str, rows: int, columns: int) -> ops.Matrix:
    return ops.pack_weight(random_blocks(format, rows, columns, columns**-0.5), format)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, *in_all(9, 33)])
@pytest.mark.parametrize(
    ("in_features", "format"),
    [(512, format) for format in ops.BLOCK_FORMATS],
)
def test_packed_weights_are_read_once_for_a_group_of_rows(
    in_features: int,
    format: str,
    num_tokens: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each group reads the bytes of the format, and none of them in part."""
    x, norm = torch.randn(num_tokens, in_features).to(dtype), torch.rand(in_features).to(dtype)
    matrix = packed_weight(format, 1024, in_features)
    weight, table = matrix.weight, matrix.table
    calls = {
        "skinny_linear_kernel": lambda: ops.skinny_linear(
            x, weight, weight_table=table, norm_weight=norm
        ),
        "skinny_gated_linear_kernel": lambda: ops.skinny_gated_linear(
            x, weight, weight_table=table, norm_weight=norm
        ),
        "exit_confidence_softmax_kernel": lambda: ops.exit_confidence_softmax(
            x, norm, weight, 1e-5, lm_head_table=table
        ),
    }
    for kernel, call in calls.items():
        product = launched(monkeypatch, call, weight=weight)[kernel]
        total, distinct = product.watched["weight"]
        assert distinct == weight.numel()
        # A chunk is half of the 256 columns that K formats have a scale for.
        scales = {"Q2_K": 4, "Q3_K": 2, "Q4_K": 4, "Q5_K": 4, "Q6_K": 2, "IQ4_XS": 2}.get(format, 0)
        scales *= 1024 * in_features // 256
        assert total == product.grid[1] * (distinct + scales)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 9, 33])
@pytest.mark.parametrize("inner_size", [256, 300])
def test_skinny_gated_linear_reads_each_weight_once_for_a_group_of_rows(
    inner_size: int, num_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = torch.randn(num_tokens, 128).to(dtype), torch.randn(2 * inner_size, 128).to(dtype)
    norm = torch.rand(128).to(dtype)
    ran = launched(
        monkeypatch,
        lambda: ops.skinny_gated_linear(x, weight, norm_weight=norm, eps=1e-5),
        weight=weight,
    )
    product = ran["skinny_gated_linear_kernel"]
    total, distinct = product.watched["weight"]
    assert distinct == weight.nbytes
    # The last tile reads the last row in place of missing rows.
    assert total >= product.grid[1] * distinct
    assert (total == product.grid[1] * distinct) is (inner_size % 256 == 0)


def head_kernel(num_rows: int, dtype: torch.dtype) -> tuple[str, int]:
    """The kernel that reads the head for so many rows, and the number of groups of rows."""
    if dtype == torch.bfloat16 and num_rows > 32:
        return "exit_confidence_softmax_many_kernel", -(-num_rows // 96)
    return "exit_confidence_softmax_kernel", -(-num_rows // (32 if dtype == torch.bfloat16 else 16))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_seqs", [1, 33, 100])
def test_the_head_is_read_once_for_a_group_of_rows(
    num_seqs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, head = torch.randn(num_seqs, 128).to(dtype), torch.randn(1280, 128).to(dtype)
    norm = torch.rand(128).to(dtype)
    kernel, groups = head_kernel(num_seqs, dtype)
    ran = launched(
        monkeypatch, lambda: ops.exit_confidence_softmax(hidden, norm, head, 1e-5), head=head
    )
    assert ran[kernel].watched["head"] == (groups * head.nbytes, head.nbytes)


def measure_of(hidden: torch.Tensor) -> ops.SoftmaxMeasure:
    size, dtype = hidden.shape[1], hidden.dtype
    return ops.SoftmaxMeasure(torch.rand(size).to(dtype), torch.randn(1280, size).to(dtype), 1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 8, 9, 70])
def test_the_head_is_read_for_groups_of_rows_of_which_some_are_placed(
    num_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = torch.randn(num_rows, 96).to(dtype)
    measure = measure_of(hidden)
    kind = torch.zeros(num_rows, dtype=torch.int32)
    out = ops.HeadRows(torch.zeros(num_rows).long(), torch.zeros(num_rows), torch.zeros(num_rows))

    def place() -> None:
        ops.place_head(None, out, kind=kind, wanted=1, measure=measure, hidden=hidden)

    head = measure.lm_head
    kernel, groups = head_kernel(num_rows, dtype)
    assert launched(monkeypatch, place, head=head)[kernel].watched["head"] == (0, 0)
    assert not any(bool(tensor.any()) for tensor in out)
    kind[-1] = 1
    ran = launched(monkeypatch, place, head=head)[kernel]
    assert groups in ran.grid
    assert ran.watched["head"] == (head.nbytes, head.nbytes)
    expected = measure(hidden[-1:])
    assert out.token[-1] == expected.token
    torch.testing.assert_close(out.confidence[-1:], expected.confidence, rtol=1e-3, atol=1e-5)
    assert not any(bool(tensor[:-1].any()) for tensor in out)


@pytest.mark.parametrize("num_rows", [1, 9, 33])
@pytest.mark.parametrize("why", ["exited", "accepted", "not asked"])
def test_the_head_is_not_read_where_no_row_is_asked(
    why: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = Point(num_rows, 128)
    measure = measure_of(point.hidden)
    rows, thresholds = point.rows, torch.full((num_rows,), 0.5)
    flags = {"exited": rows.exited, "accepted": rows.accepted}
    for name, flag in flags.items():
        flag.fill_(name == why)
    if why == "not asked":
        thresholds.fill_(math.inf)
    before = [tensor.clone() for tensor in (rows.confidence, rows.token, rows.measured_at)]
    emulated.route(monkeypatch)

    def read() -> int:
        with emulated.counting(head=measure.lm_head) as counted:
            ops.exit_rows(
                *(point.hidden, LAYER, rows, point.active),
                thresholds=thresholds,
                measure=measure,
                decide=False,
            )
        return sum(launch.watched["head"][0] for launch in counted if launch.watched)

    assert read() == 0
    after = (rows.confidence, rows.token, rows.measured_at)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    thresholds[-1] = 0.5
    for flag in flags.values():
        flag[-1] = False
    assert read() == measure.lm_head.nbytes
    assert (rows.measured_at == LAYER)[-1]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("k_norm", [False, True])
@pytest.mark.parametrize("exits", [(0, 0, 0), (2, 1, 2), (3, 2, 3), (1,) * 9, (1,) * 20, (3, 3)])
def test_kv_fill_reads_the_layers_that_a_row_skipped(
    exits: tuple[int, ...], k_norm: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Normed heads are read whole. Reads before the rows are known do not count as a layer."""
    call = fill_call(KvFillCase(len(exits), hidden_size=1024, k_norm=k_norm), dtype)
    call["exit_layer"] = torch.tensor(exits, dtype=torch.int32)
    call["slot_mapping"] = torch.arange(len(exits))
    weight = call["kv_weight"]
    ran = launched(monkeypatch, lambda: ops.kv_fill(**packed(call)), weight=weight)
    fill = ran["kv_fill_kernel" if k_norm else "kv_fill_pairs_kernel"]
    total, distinct = fill.watched["weight"]
    if min(exits) == len(weight):  # the read before the rows are known is not used
        assert total <= weight[-1].numel() * weight.element_size()
        return
    assert distinct == (len(weight) - min(exits)) * weight[0].numel() * weight.element_size()
    assert total == fill.grid[1] * distinct


ATTENTION = {
    "decode": AttentionCase((1, 1, 1), (300, 40, 64), 8, 2, 64, 16),
    "decode, splits": AttentionCase((1, 1), (700, 700), 4, 2, 64, 16, fixed_split_size=128),
    "one long": AttentionCase((1,), (2000,), 4, 2, 128, 16, fixed_split_size=128),
    "verify": AttentionCase((5, 5), (200, 133), 8, 2, 128, 16),
    "float heads": AttentionCase((1, 1), (90, 90), 3, 3, 256, 8),
    "window": AttentionCase((1,), (600,), 4, 2, 64, 16, sliding_window=100),
    "verify, splits": AttentionCase((9,), (512,), 8, 2, 128, 16, fixed_split_size=128),
}


def keys_read(monkeypatch: pytest.MonkeyPatch, call: Call) -> dict[str, emulated.CountedLaunch]:
    """The launches of attention, which watch the keys and values of its caches."""
    return launched(
        monkeypatch,
        lambda: ops.paged_attention(**call),
        k=call["k_cache"],
        v=call["v_cache"],
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_reads_each_key_and_value_once(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ATTENTION[name]
    call = attention_call(case, dtype, CPU)
    is_wide = name == "verify, splits" and dtype != torch.float32
    ran = keys_read(monkeypatch, call)[f"paged_attention_{'wide_' * is_wide}kernel"]
    seen = [min(length, case.sliding_window or length) for length in case.seq_lens]
    row = case.num_kv_heads * case.head_dim * dtype.itemsize
    group = case.num_q_heads // case.num_kv_heads
    tile = 16 if dtype == torch.float32 else 64
    tiles = math.ceil(case.num_queries[0] * group / tile)
    for side in "kv":
        total, distinct = ran.watched[side]
        assert distinct == sum(seen) * row
        # A second tile sees no key that the last query does not.
        assert distinct <= total <= tiles * distinct
        assert (total == distinct) is (tiles == 1)


def in_float8(call: Call) -> Call:
    """The call over caches in float8."""
    caches = ("k_cache", "v_cache")
    return {**call, **{name: reference.to_float8(call[name]) for name in caches}}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["decode", "decode, splits", "one long"])
def test_float8_is_read_byte_by_byte_and_once(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ATTENTION[name]
    call = in_float8(attention_call(case, dtype, CPU))
    ran = keys_read(monkeypatch, call)["paged_attention_float8_kernel"]
    for total, distinct in ran.watched.values():
        assert total == distinct == sum(case.seq_lens) * case.num_kv_heads * case.head_dim


def packed_call(format: str, tokens: int, dtype: torch.dtype) -> Callable[[], object]:
    matrix = packed_weight(format, 512, 256)
    x, norm = torch.randn(tokens, 256).to(dtype), torch.rand(256).to(dtype)
    return lambda: ops.skinny_linear(
        x, matrix.weight, weight_table=matrix.table, norm_weight=norm, eps=1e-5
    )


def calls(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Calls of every op; ops with a ring, a tile or an exchange in shared memory in more shapes."""
    torch.manual_seed(0)
    made = {f"{case.op} {case.name}": case.make().call for case in cases(dtype, CPU, tiny=True)}
    for tokens in (1, 9, 20, 40):
        for features in ((64, 512), (576, 192)):
            call = Product("skinny_linear").call(tokens, *features, "all", dtype)
            made[f"linear {tokens} {features}"] = lambda c=call: ops.skinny_linear(**c)
        fill = fill_call(KvFillCase(tokens, hidden_size=128, head_dim=128, rotary_dim=128), dtype)
        fill["exit_layer"].fill_(1)
        made[f"fill {tokens}"] = lambda c=fill: ops.kv_fill(**packed(c))
        x = torch.randn(tokens, 128).to(dtype)
        weight, norm = torch.randn(512, 128).to(dtype), torch.rand(128).to(dtype)
        made[f"gated {tokens}"] = lambda x=x, w=weight, n=norm: ops.skinny_gated_linear(
            x, w, norm_weight=n, eps=1e-5
        )
        made[f"head {tokens}"] = lambda x=x, w=weight, n=norm: ops.exit_confidence_softmax(
            x, n, w, 1e-5
        )
    # Rows that blocks make; of others half sectors are read, and then the other halves.
    for format in ops.BLOCK_FORMATS:
        for tokens in (1, 8, 20, 40)[: 2 if dtype == torch.float32 else None]:
            made[f"{format} {tokens}"] = packed_call(format, tokens, dtype)
    whole, scale = quantise_rows(torch.randn(512, 256).to(dtype))
    wide, wide_norm = torch.randn(8, 256).to(dtype), torch.rand(256).to(dtype)
    made["int8"] = lambda: ops.skinny_linear(
        wide, whole, weight_scale=scale, norm_weight=wide_norm, eps=1e-5
    )
    for head_dim in (64, 128, 256):
        for queries in (1, 6):
            case = AttentionCase((queries,) * 2, (200, 64), 8, 2, head_dim, 16)
            call = attention_call(case, dtype, CPU)
            call["q"] = call["q"].contiguous()
            call["fixed_split_size"] = 32 if queries > 1 else 0
            made[f"attention {head_dim} {queries}"] = lambda c=call: ops.paged_attention(**c)
            narrow = in_float8(call)
            made[f"float8 {head_dim} {queries}"] = lambda c=narrow: ops.paged_attention(**c)
    return made
