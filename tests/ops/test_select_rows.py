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
