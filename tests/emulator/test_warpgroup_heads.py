"""The LM head and kv_fill by warpgroups, which a setting of EECORE_CUDA_TUNING asks for."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from test_accesses import CPU, Checked, in_float8, measure_of
from test_exit_confidence_softmax import random_case
from test_in_flight import promised
from test_kv_fill import filled, packed
from test_kv_fill import random_call as fill_call

import emulated
import reference
from bench.gpu.calls import Known
from cases import KvFillCase
from coded_calls import FORMATS, as_floats, check_close, coded, whole_blocks
from eecore import ops
from packed_blocks import packed_layers
from tiers import in_all

Call = dict[str, Any]

TUNING = "EECORE_CUDA_TUNING"
HEAD, FILL = "exit_confidence_softmax_warpgroup_kernel", "kv_fill_warpgroup_kernel"
# Whole rows; blocks with minima, which the compiler knows; scales for each half of a block.
SOME_FORMS = ("floats", "int8", "Q4_1", *in_all("Q6_K"))
FORMS = ("floats", "int8", "Q4_1", *in_all(*(form for form in FORMATS if form != "Q4_1")))

each_half = pytest.mark.parametrize("dtype", [torch.bfloat16, *in_all(torch.float16)], ids=str)
each_form = pytest.mark.parametrize("form", FORMS)
is_emulated = pytest.mark.usefixtures("routed")

# Rows, hidden size (of packed weights in whole blocks) and vocabulary: parts of groups of rows, of
# chunks, of tiles of 32 and of turns of a block, in all of which some warps have no tile.
HEADS = ((1, 64, 323), (9, 131, 1003), (64, 64, 2), (65, 72, 130))
NUMBERS: tuple[Call, ...] = ({}, {"multiplier": 0.3, "soft_cap": 1.5})
# First row and number of rows: alone, few, and around the rows of the kernels and of two passes.
SOME_ROWS = ((0, 1), (1, 8), (1, 9), (2, 32), (5, 33), (0, 64), (60, 65), (128, 2))
FILLS = (
    KvFillCase(1, page_size=1),
    KvFillCase(9, num_layers=1, hidden_size=72, head_dim=256, rotary_dim=256, bias=True),
    KvFillCase(20, hidden_size=100, num_layers=2, head_dim=80, rotary_dim=80, k_norm=True),
    KvFillCase(17, hidden_size=40, head_dim=10, rotary_dim=6, bias=True, k_norm=True),
    KvFillCase(33, num_layers=2, num_kv_heads=2, head_dim=36, rotary_dim=20, k_norm=True),
    KvFillCase(64, num_layers=1, hidden_size=136, head_dim=128, rotary_dim=32),
    KvFillCase(
        65, num_layers=2, num_kv_heads=2, k_norm=True, norms_all_k=True, bias=True, num_ropes=2
    ),
    KvFillCase(130, num_layers=1, head_dim=144, rotary_dim=0, pre_norm=False),
)
BY_ROW = ("hidden", "exit_layer", "slot_mapping", "positions")


@pytest.fixture(autouse=True)
def by_warpgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TUNING, "wgmma=1")


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.route(monkeypatch)


def head_call(
    num_rows: int, hidden_size: int, vocab_size: int, form: str, dtype: torch.dtype
) -> Call:
    size = whole_blocks(hidden_size, form)
    call = {**random_case(num_rows, size, vocab_size, dtype), "eps": 1e-5}
    return coded(call, form, "lm_head")


def measured(call: Call) -> torch.Tensor:
    """All outputs, a row for each row."""
    got = ops.exit_confidence_softmax(**call)
    return torch.stack([each.double() for each in got], 1)


def coded_fill(case: KvFillCase, form: str, dtype: torch.dtype) -> Call:
    """K and V of a packed layer have a format of their own each."""
    call = fill_call(case, dtype)
    if form in ("floats", "int8"):
        return coded(call, form, "kv_weight")
    rows, columns = case.num_kv_heads * case.head_dim, whole_blocks(case.hidden_size, form)
    call["hidden"] = 3 * torch.randn(case.num_tokens, columns).to(dtype)
    if case.pre_norm:
        call["norm_weight"] = 1 + 0.1 * torch.randn(case.num_layers, columns).to(dtype)
    layers = [[(form, rows), ("Q8_0", rows)]] * case.num_layers
    matrix = packed_layers(layers, columns, size=1 / 16)
    return {**call, "kv_weight": matrix.weight, "kv_table": matrix.table}


def kernels_of_fill(call: Call) -> list[str]:
    return emulated.kernels_of(lambda: filled(ops.kv_fill, call))


@is_emulated
@each_half
@each_form
def test_the_head_matches_the_reference(
    form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the kernels of warps, to the bit: sums and summaries have their order."""
    for i, (num_rows, hidden_size, vocab_size) in enumerate(HEADS):
        call = {**head_call(num_rows, hidden_size, vocab_size, form, dtype), **NUMBERS[i % 2]}
        if i == 2:
            call["norm_weight"] = None  # rows of x are read where they are
            call["hidden"] /= 4
        launched = emulated.kernels_of(partial(measured, call))
        assert launched[-2:] == [HEAD, "logit_summary_kernel"]
        got = measured(call)
        confidence, logsumexp, logits = reference.exit_confidence_softmax(**as_floats(call))
        chosen = logits.gather(1, got[:, 1:2].long())[:, 0]
        wanted = torch.stack((confidence, chosen, logsumexp, logits.amax(-1)), 1).double()
        got_logits = torch.cat((got[:, :1], logits.amax(-1)[:, None], got[:, 2:]), 1)
        torch.testing.assert_close(got_logits, wanted, rtol=3e-3, atol=3e-3)
        monkeypatch.setenv(TUNING, "wgmma=0")
        assert HEAD not in emulated.kernels_of(partial(measured, call))
        assert torch.equal(measured(call), got)
        monkeypatch.setenv(TUNING, "wgmma=1")


@is_emulated
@pytest.mark.parametrize("form", SOME_FORMS)
def test_a_measured_row_does_not_depend_on_the_others(form: str) -> None:
    """Nor on how many they are, or on what is not finite among them."""
    call = head_call(130, 100, 515, form, torch.bfloat16)
    call["hidden"][[3, 70]] = torch.nan
    call["hidden"][17, 5] = torch.inf
    together = measured(call)
    assert together[71:].isfinite().all()
    for first, count in SOME_ROWS:
        rows = slice(first, first + count)
        got = measured({**call, "hidden": call["hidden"][rows]})
        torch.testing.assert_close(got, together[rows], rtol=0, atol=0, equal_nan=True)


@is_emulated
@pytest.mark.parametrize("tokens", [(5, 40), (255, 256), (300, 700), (992, 1002)])
def test_the_lowest_id_of_equal_logits_wins_by_warpgroups(tokens: tuple[int, int]) -> None:
    call = head_call(20, 64, 1003, "floats", torch.bfloat16)
    call["hidden"] = call["hidden"][:1].repeat(20, 1)
    call["lm_head"][list(tokens)] = 4 * call["hidden"][0] / call["hidden"][0].norm()
    got = ops.exit_confidence_softmax(**call)
    assert (got.token == tokens[0]).all()
    assert (got.confidence == 0).all()


@pytest.mark.parametrize("form", ["floats", "Q8_0"])
@pytest.mark.parametrize("num_rows", [9, 70, 130])
def test_the_head_is_read_as_its_plan_says(
    num_rows: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = head_call(num_rows, 128, 1280, form, torch.bfloat16)
    checked = Checked(monkeypatch, lambda: measured(call), head=call["lm_head"])
    planned, ran = checked.of(HEAD)
    total, distinct = ran.watched["head"]
    assert distinct == planned.reads["weight"] == call["lm_head"].nbytes
    assert total == distinct + planned.repeats["weight"]
    assert planned.grid[0] == -(-num_rows // (128 if form == "floats" else 64))


def test_groups_of_rows_that_are_not_wanted_do_not_read_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden = torch.randn(130, 96).bfloat16()
    measure, kind = measure_of(hidden), torch.zeros(130, dtype=torch.int32)
    out = ops.HeadRows(torch.zeros(130).long(), torch.zeros(130), torch.zeros(130))

    def place() -> None:
        ops.place_head(None, out, kind=kind, wanted=1, measure=measure, hidden=hidden)

    known = Known(tokens_known=True)
    planned, ran = Checked(monkeypatch, place, known, head=measure.lm_head).of(HEAD)
    assert planned.grid[0] == 2
    assert ran.watched["head"] == (0, 0)
    assert not any(bool(each.any()) for each in out)
    kind[[70, 101]] = 1
    _, ran = Checked(monkeypatch, place, head=measure.lm_head).of(HEAD)
    total, distinct = ran.watched["head"]
    assert distinct == measure.lm_head.nbytes
    assert total == 6 * 256 * 96 * 2  # two turns of each block, by one group of rows
    emulated.route(monkeypatch)
    expected = measure(hidden)
    for got, wanted in ((out.token, expected.token), (out.confidence, expected.confidence)):
        assert torch.equal(got[kind == 1], wanted[kind == 1])
        assert not got[kind == 0].any()


@is_emulated
@each_half
@each_form
def test_fills_match_the_reference(
    form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the kernel of warps where as many slices sum the products of a head, to the bit."""
    for case in FILLS:
        call = coded_fill(case, form, dtype)
        assert kernels_of_fill(call)[1] == FILL
        got = filled(ops.kv_fill, call)
        for cache, wanted in zip(got, filled(reference.kv_fill, as_floats(call)), strict=True):
            check_close(cache, wanted, form, CPU)
        whole_heads = case.k_norm or form not in ("floats", "int8")
        if whole_heads and case.head_dim > 32:
            monkeypatch.setenv(TUNING, "wgmma=0")
            assert kernels_of_fill(call)[1] == "kv_fill_kernel"
            for cache, wanted in zip(got, filled(ops.kv_fill, call), strict=True):
                torch.testing.assert_close(cache, wanted, rtol=0, atol=0, equal_nan=True)
            monkeypatch.setenv(TUNING, "wgmma=1")


@is_emulated
@pytest.mark.parametrize("form", SOME_FORMS)
def test_what_warpgroups_fill_of_a_row_does_not_depend_on_the_others(form: str) -> None:
    case = KvFillCase(130, hidden_size=72, num_kv_heads=2, bias=True, num_layers=2)
    call = coded_fill(case, form, torch.bfloat16)
    together = filled(ops.kv_fill, call)
    for first, count in SOME_ROWS[1:]:
        rows = slice(first, first + count)
        some = filled(ops.kv_fill, {**call, **{name: call[name][rows] for name in BY_ROW}})
        for got, wanted in zip(some, together, strict=True):
            written = ~got.isnan()
            assert written.any()
            assert torch.equal(got[written], wanted[written])


@is_emulated
def test_warpgroups_fill_caches_in_float8() -> None:
    call = in_float8(coded_fill(FILLS[2], "floats", torch.bfloat16))
    for name in ("key_scales", "value_scales"):
        call[name] = torch.rand(2, 1) + 0.5
    assert kernels_of_fill(call)[1] == FILL
    for got, wanted in zip(filled(ops.kv_fill, call), filled(reference.kv_fill, call), strict=True):
        # A number between two of float8 may be rounded to either.
        got, wanted = got.float(), wanted.float()
        torch.testing.assert_close(got, wanted, rtol=0.13, atol=0.02, equal_nan=True)
        assert (got == wanted)[~wanted.isnan()].float().mean() > 0.98


@pytest.mark.parametrize(
    ("exits", "head_dim"), [((2, 1, 2), 64), ((2, 1, 2), 80), ((3, 3), 64), ((1,) * 65, 64)]
)
def test_fills_read_the_layers_that_a_row_skipped(
    exits: tuple[int, ...], head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads before the rows are known do not count as a layer."""
    call = fill_call(KvFillCase(len(exits), hidden_size=640, head_dim=head_dim), torch.bfloat16)
    call["exit_layer"] = torch.tensor(exits, dtype=torch.int32)
    call["slot_mapping"] = torch.arange(len(exits))
    weight, run = call["kv_weight"], partial(ops.kv_fill, **packed(call))
    checked = Checked(monkeypatch, run, Known(exit_layers=exits), weight=weight)
    planned, ran = checked.of(FILL)
    total, distinct = ran.watched["weight"]
    if min(exits) == len(weight):
        assert planned.reads["weight"] == 0
        assert total <= weight[-1].numel() * weight.element_size()
        return
    assert distinct == planned.reads["weight"]
    assert distinct == (len(weight) - min(exits)) * weight[0].numel() * weight.element_size()
    assert total == distinct + planned.repeats["weight"]


@is_emulated
@pytest.mark.parametrize("num_rows", [64, 65, *in_all(9)])
def test_a_heads_and_a_fills_weights_are_on_their_way(num_rows: int) -> None:
    """As far as their rings promise; rows of x go to banks side by side."""
    head = head_call(num_rows, 256, 2048, "floats", torch.bfloat16)
    case = KvFillCase(num_rows, hidden_size=1024, head_dim=64, rotary_dim=64)
    fill = fill_call(case, torch.bfloat16)
    fill["exit_layer"].fill_(0)
    for run, name, m_tiles in (
        (partial(measured, head), HEAD, 2),
        (partial(ops.kv_fill, **packed(fill)), FILL, 1),
    ):
        with emulated.counting() as counted:
            run()
        (launch,) = (each for each in counted if each.name == name)
        blocks = launch.grid[1] if name == HEAD else launch.grid[0]
        assert launch.drained == 0
        assert launch.in_flight == promised(m_tiles, blocks), name
        assert launch.bank_ways == 1, launch.bank_place


@is_emulated
def test_the_head_and_fills_wait_for_rows_that_the_kernel_ahead_writes() -> None:
    head = head_call(20, 128, 515, "floats", torch.bfloat16)
    fill = fill_call(KvFillCase(20, hidden_size=128, num_kv_heads=2), torch.bfloat16)
    expected = measured(head), *filled(ops.kv_fill, {**fill, "hidden": head["hidden"]})
    with emulated.checking_races() as checked:
        hidden, k_cache, v_cache = (
            torch.empty_like(head["hidden"]),
            fill["k_cache"].clone(),
            fill["v_cache"].clone(),
        )
        ops.skinny_linear(
            head["hidden"], torch.eye(128).bfloat16(), out=hidden, constant_weight=True
        )
        of_fill = {**fill, "hidden": hidden, "k_cache": k_cache, "v_cache": v_cache}
        ops.kv_fill(**packed(of_fill))
        got = measured({**head, "hidden": hidden}), k_cache, v_cache
        assert checked() > 0
    for each, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(each, wanted, rtol=0, atol=0, equal_nan=True)


@is_emulated
def test_warpgroups_neither_measure_nor_fill_in_float32() -> None:
    head = head_call(9, 64, 323, "floats", torch.float32)
    fill = fill_call(KvFillCase(9), torch.float32)
    launched = emulated.kernels_of(partial(measured, head)) + kernels_of_fill(fill)
    assert {"exit_confidence_softmax_kernel", "kv_fill_pairs_kernel"} <= set(launched)
    assert not {HEAD, FILL} & set(launched)
