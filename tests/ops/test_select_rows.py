"""select_rows: the active rows picked, their order, and their states side by side."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import BATCH_SIZES
from eecore import ops
from random_calls import Arguments, Checked, Maker, compare

INF = float("inf")


def select_rows(
    num_active: int,
    row: Tensor | None = None,
    kind: Tensor | None = None,
    wanted: int = 0,
    thresholds: Tensor | None = None,
    accepted: Tensor | None = None,
) -> Tensor:
    """The indices of the rows picked; see eecore.ops.select_rows."""
    rows = torch.arange(num_active) if row is None else row.long()
    picked = torch.ones(num_active, dtype=torch.bool)
    if kind is not None:
        picked &= kind[rows] == wanted
    if thresholds is not None:
        picked &= thresholds[rows] < float("inf")
    if accepted is not None:
        picked &= ~accepted[rows]
    return picked.nonzero().flatten().to(torch.int32)


def given_rows(num_active: int, num_rows: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(num_active)
    draw = {"generator": generator}
    thresholds = torch.tensor([0.5, 2.0, INF])
    return {
        "row": torch.randperm(num_rows, **draw)[:num_active].sort().values.int(),
        "kind": torch.randint(0, 3, (num_rows,), **draw).int(),
        "thresholds": thresholds[torch.randint(0, 3, (num_rows,), **draw)],
        "accepted": torch.rand(num_rows, **draw) < 0.4,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "by", [(), ("kind",), ("thresholds", "accepted"), ("kind", "thresholds", "accepted")]
)
@pytest.mark.parametrize("with_row", [True, False])
@pytest.mark.parametrize("num_active", BATCH_SIZES)
def test_matches_the_reference(
    num_active: int, with_row: bool, by: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> None:
    given = given_rows(num_active, num_active + 5 if with_row else num_active)
    given = {name: given[name] for name in (*by, "row")}
    if not with_row:
        del given["row"]
    hidden = torch.randn(num_active, 36).to(dtype)[:, 1:34]
    expected = select_rows(num_active, wanted=2, **given)
    states = torch.full((num_active, 40), 9.0, dtype=dtype)
    selected = ops.select_rows(
        hidden.to(device),
        wanted=2,
        **given,
        index=torch.full((num_active,), -7).int(),
        states=states[:, :33],
    )
    count = int(selected.count)
    assert torch.equal(selected.index[:count], expected)
    assert torch.equal(selected.hidden[:count], hidden[expected.long()])
    assert (selected.index[count:] == -7).all()
    assert (selected.hidden[count:] == 9).all()
    assert (states[:, 33:] == 9).all()


def test_states_may_be_where_they_were(device: torch.device) -> None:
    hidden = torch.randn(7, 33, device=device)
    accepted = torch.tensor([False, True, False, False, True, True, False])
    expected = hidden[~accepted]
    selected = ops.select_rows(hidden, accepted=accepted, states=hidden)
    assert selected.count.item() == 4
    assert torch.equal(hidden[:4], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": torch.zeros(3).int()}, r"thresholds: expected float32 \[num_rows=3\], got"),
        ({"row": None, "kind": torch.zeros(3).int()}, r"kind: expected int32 \[num_active=4\]"),
        ({"row": torch.tensor([0, 1, 2, 4]).int()}, r"row: expected values in \[0, 4\), got 4"),
        ({"wanted": 1 << 40}, "wanted: expected a kind of 32 bits"),
        ({"index": torch.zeros(4).long()}, "index: expected int32 .* got int64"),
        ({"count": torch.zeros(2).int()}, r"count: expected int32 \[1\], got int32 \[2\]"),
        ({"states": torch.zeros(4, 8).bfloat16()}, "states: expected float32 .* got bfloat16"),
        (
            {"states": torch.zeros(1, 8).expand(4, 8)},
            "states: expected elements that do not overlap",
        ),
    ],
)
def test_bad_input_is_named_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    given = given_rows(4, 4) | {
        "index": torch.full((4,), -7).int(),
        "count": torch.tensor([-7]).int(),
        "states": torch.full((4, 8), 9.0),
    }
    given |= change
    written = [given[name].clone() for name in ("index", "count", "states")]
    with pytest.raises(RuntimeError, match=f"select_rows: {message}"):
        ops.select_rows(torch.randn(4, 8), **given)
    for old, name in zip(written, ("index", "count", "states"), strict=True):
        assert torch.equal(old, given[name])


def test_states_that_lie_across_the_given_ones_are_refused() -> None:
    memory = torch.zeros(6, 8)
    with pytest.raises(RuntimeError, match="states: expected memory apart from hidden, or"):
        ops.select_rows(memory[:5], states=memory[1:])


def test_opcheck(device: torch.device) -> None:
    given = given_rows(5, 9)
    torch.library.opcheck(
        torch.ops.eecore.select_rows.default,
        (
            torch.randn(5, 16, device=device),
            *(given["row"], given["kind"], 1, given["thresholds"], given["accepted"]),
            *(torch.zeros(5).int(), torch.zeros(1).int(), torch.zeros(5, 16)),
        ),
    )


def fuzzed_call(m: Maker) -> Checked:
    active, size, dtype = m.size(20), m.size(40), m.dtype()
    has_row = m.chance()
    rows = active + m.size(4) if has_row else active
    hidden = m.states(active, size, dtype)
    limits = torch.tensor([0.5, 2.0, math.inf])
    given = {
        "hidden": hidden,
        "row": m.placed(m.shuffled(rows)[:active].sort().values.int()) if has_row else None,
        "kind": m.maybe(lambda: m.placed(m.whole(3, rows).int())),
        "wanted": m.one_of(0, 1, 2),
        "thresholds": m.maybe(lambda: m.placed(limits[m.whole(3, rows)])),
        "accepted": m.maybe(lambda: m.flags(rows)),
        "index": m.placed(m.whole(9, active).int()),
        "count": m.placed(m.whole(9, 1).int()),
        "states": hidden if m.chance(0.3) else m.states(active, size, dtype),
    }

    def oracle(before: Arguments) -> dict[str, Tensor]:
        names = ("row", "kind", "wanted", "thresholds", "accepted")
        picked = select_rows(active, **{n: before[n] for n in names})
        index, states = before["index"].clone(), before["states"].clone()
        index[: len(picked)] = picked
        states[: len(picked)] = before["hidden"][picked.long()]
        return {"index": index, "count": torch.tensor([len(picked)]), "states": states}

    return given, compare(oracle)
