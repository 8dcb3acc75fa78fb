"""short_conv: a gated convolution whose earlier inputs lie in pages."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import emulated
from cases import DTYPES, TOLERANCES
from devices import cpu_only
from eecore import ops
from random_calls import Arguments, Checked, Maker, compare, looser
from random_pages import places_of_keys, random_pages, starts

CUTS = ([23], [1] * 23, [7, 1, 9, 6], [2, 21])


def short_conv(
    bcx: Tensor,
    state: Tensor,
    slot_mapping: Tensor,
    weight: Tensor | None,
    page_table: Tensor | None,
    seq_lens: Tensor | None,
    query_start_loc: Tensor | None,
    exit_layer: Tensor | None,
    layer: int,
    out: Tensor | None,
) -> dict[str, Tensor]:
    """The states and the result, position by position."""
    b, c, x = bcx.double().chunk(3, dim=1)
    u = (b * x).to(state.dtype).double()
    state = state.double().clone()
    kept = state.flatten(0, 1)
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0 and (exit_layer is None or exit_layer[row] <= layer):
            kept[slot] = u[row]
    if weight is None:
        return {"state": state}
    out, page_size, taps = out.double().clone(), state.shape[1], len(weight)
    bounds = query_start_loc.tolist()
    for seq, (first, after) in enumerate(itertools.pairwise(bounds)):
        for row in range(first, after):
            position, total = int(seq_lens[seq]) - after + row, torch.zeros_like(u[0])
            for back in range(min(taps, max(position, 0) + 1)):
                if row - back >= first:
                    there = u[row - back]
                else:
                    at = position - back
                    there = state[page_table[seq, at // page_size], at % page_size]
                total += weight[taps - 1 - back].double() * there
            out[row] = c[row] * total
    return {"state": state, "out": out}


def text_of(
    count: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, Any], Tensor]:
    """The arguments for a text in shuffled pages of 4, and its rows."""
    draw = torch.Generator().manual_seed(hidden)
    num_pages = -(-count // 4)
    pages = torch.randperm(num_pages, generator=draw)
    positions = torch.arange(count)
    slots = pages[positions // 4] * 4 + positions % 4
    given = {
        "state": torch.full((num_pages, 4, hidden), torch.nan, dtype=dtype),
        "slot_mapping": slots,
        "weight": torch.randn(3, hidden, generator=draw).to(dtype),
        "page_table": pages.int()[None],
    }
    rows = torch.randn(count, 3 * hidden, generator=draw).to(dtype)
    return {name: each.to(device) for name, each in given.items()}, rows.to(device)


def run(given: dict[str, Any], rows: Tensor, cut: list[int]) -> Tensor:
    """A text in parts."""
    found, first, device = [], 0, rows.device
    slots = given["slot_mapping"]
    for count in cut:
        end = first + count
        places = {
            "slot_mapping": slots[first:end],
            "seq_lens": torch.tensor([end], dtype=torch.int32, device=device),
            "query_start_loc": torch.tensor([0, count], dtype=torch.int32, device=device),
        }
        found.append(ops.short_conv(rows[first:end], **{**given, **places}))
        first = end
    return torch.cat(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 24, 130])
def test_matches_the_reference(hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    if not emulated.supports(device, dtype):
        pytest.skip("float16 is for CUDA")
    given, rows = text_of(23, hidden, dtype, device)
    got = run(given, rows, [23])
    b, c, x = rows.cpu().float().chunk(3, dim=1)
    u = (b * x).to(dtype).float()
    padded = torch.cat((torch.zeros(2, hidden), u))
    taps = given["weight"].cpu().float()
    expected = c * sum(taps[k] * padded[k : k + 23] for k in range(3))
    tolerance = dataclasses.asdict(TOLERANCES[dtype])
    torch.testing.assert_close(got.cpu(), expected.to(dtype), **tolerance)


@cpu_only
def test_states_in_bfloat16_beside_float32() -> None:
    results = []
    for cut in CUTS:
        given, rows = text_of(23, 40, torch.float32, torch.device("cpu"))
        given["state"] = given["state"].bfloat16()
        results.append(run(given, rows, cut))
    b, c, x = rows.chunk(3, dim=1)
    padded = torch.cat((torch.zeros(2, 40), (b * x).bfloat16().float()))
    expected = c * sum(given["weight"][k] * padded[k : k + 23] for k in range(3))
    torch.testing.assert_close(results[0], expected)
    assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_texts_cut_changes_no_bit(dtype: torch.dtype, device: torch.device) -> None:
    results = []
    for cut in CUTS:
        given, rows = text_of(23, 40, dtype, device)
        results.append((run(given, rows, cut), given["state"]))
    for out, state in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(state.nan_to_num(), results[0][1].nan_to_num())


def test_rejected_positions_leave_no_trace(device: torch.device) -> None:
    """Rows of later positions are overwritten, those of other pages untouched."""
    given, rows = text_of(23, 40, torch.float32, device)
    expected = run(given, rows, [23])
    given, rows = text_of(23, 40, torch.float32, device)
    wrong = rows.clone()
    wrong[12:] *= -3
    run(given, wrong, [9, 7])
    kept = {**given, "slot_mapping": given["slot_mapping"]}
    places = {
        "slot_mapping": kept["slot_mapping"][12:],
        "seq_lens": torch.tensor([23], dtype=torch.int32, device=device),
        "query_start_loc": torch.tensor([0, 11], dtype=torch.int32, device=device),
    }
    got = ops.short_conv(rows[12:], **{**kept, **places})
    assert torch.equal(got, expected[12:])


def test_a_fill_writes_the_rows_that_skipped_the_layer(device: torch.device) -> None:
    given, rows = text_of(6, 24, torch.float32, device)
    state, slots = given["state"], given["slot_mapping"].clone()
    slots[5] = -1
    exits = torch.tensor([0, 3, 4, 5, 9, 0], dtype=torch.int32, device=device)
    ops.short_conv_fill(rows, state, slots, exits, 4)
    b, _, x = rows.chunk(3, dim=1)
    kept = state.flatten(0, 1)
    for row, fills in enumerate((True, True, True, False, False)):
        there = kept[slots[row]]
        assert torch.equal(there, (b * x)[row]) if fills else there.isnan().all()


def fuzzed_call(m: Maker) -> Checked:
    dtype, hidden, page_size = m.dtype(), m.size(70, 1), m.size(9, 1)
    lengths = [m.size(20) for _ in range(m.size(4))]
    queries = [m.size(min(length, 9)) for length in lengths]
    total, table = random_pages(m, lengths, page_size)
    state = m.placed(torch.full((total, page_size, hidden), torch.nan).to(dtype))
    for page, offset in places_of_keys(lengths, table, page_size):
        state[page, offset] = m.normal(hidden).to(dtype)
    tokens = sum(queries)
    given: Arguments = {
        "bcx": m.states(tokens, 3 * hidden, dtype),
        "state": state,
        "slot_mapping": torch.empty(0),
        "weight": None,
        "page_table": None,
        "seq_lens": None,
        "query_start_loc": None,
        "exit_layer": None,
        "layer": m.size(5),
        "out": None,
    }
    if m.chance(0.3):
        given["slot_mapping"] = m.slots(min(tokens, total * page_size), state[:, :, None])
        given["bcx"] = given["bcx"][: len(given["slot_mapping"])]
        given["exit_layer"] = m.placed(m.whole(6, len(given["bcx"])).int())
    else:
        own = []
        for row, length, count in zip(table.tolist(), lengths, queries, strict=True):
            for at in range(length - count, length):
                own.append(row[at // page_size] * page_size + at % page_size)
        slots = torch.tensor(own, dtype=torch.int64)
        given["slot_mapping"] = m.placed(torch.where(m.uniform(tokens) < 0.1, -1, slots))
        given |= {
            "weight": m.placed(m.normal(m.size(8, 1), hidden).to(dtype)),
            "page_table": m.placed(table, 1),
            "seq_lens": m.placed(torch.tensor(lengths, dtype=torch.int32)),
            "query_start_loc": m.placed(starts(queries)),
            "out": m.states(tokens, hidden, dtype),
        }
    return given, compare(lambda before: short_conv(**before), looser(dtype))
