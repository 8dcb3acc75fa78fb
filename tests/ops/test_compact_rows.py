"""compact_rows: rows that stay move up with all their fields; nothing else moves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases import BATCH_SIZES
from eecore import ops
from random_calls import EXACT, Arguments, Checked, Maker, assert_close


def compact_rows(done: Tensor, active: ops.ActiveRows) -> Tensor:
    """The indices of the rows that stay; see eecore.ops.compact_rows."""
    return (~done[active.row.long()]).nonzero().flatten()


def active_rows(num_active: int, num_rows: int, *, everything: bool = True) -> ops.ActiveRows:
    """Active rows whose tables are views of wider ones."""
    generator = torch.Generator().manual_seed(num_active)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(0, 1 << 20, shape, generator=generator)

    row = torch.randperm(num_rows, generator=generator)[:num_active].sort().values
    return ops.ActiveRows(
        row=row.int(),
        positions=whole(num_active),
        slot_mapping=whole(num_active),
        seq_lens=whole(num_active).int(),
        page_table=whole(num_active, 9).int()[:, 1:6],
        num_active=torch.tensor([-7], dtype=torch.int32),
        token_ids=whole(num_active) if everything else None,
        cross_page_table=whole(num_active, 4).int()[:, :3] if everything else None,
        cross_seq_lens=whole(num_active).int() if everything else None,
    )


@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_active", BATCH_SIZES)
def test_matches_the_reference(
    num_active: int, share: float, everything: bool, device: torch.device
) -> None:
    active = active_rows(num_active, num_active + 3, everything=everything)
    generator = torch.Generator().manual_seed(3)
    done = torch.rand(num_active + 3, generator=generator) < share
    hidden = torch.randn(num_active, 36, device=device)[:, 1:34] if everything else None
    given = [None if tensor is None else tensor.clone() for tensor in (*active, hidden)]
    stay = compact_rows(done, active)

    ops.compact_rows(done, active, hidden)
    assert active.num_active.item() == len(stay)
    for name, old, new in zip((*active._fields, "hidden"), given, (*active, hidden), strict=True):
        if name != "num_active" and old is not None and new is not None:
            assert torch.equal(new[: len(stay)], old[stay]), name
            if share == 0:
                assert torch.equal(new, old), name


def fuzzed_call(m: Maker) -> Checked:
    active = m.size(20)
    rows = active + m.size(4)
    pages, cross_pages = m.size(6), m.size(4)
    given = {
        "done": m.flags(rows, share=m.one_of(0.0, 0.5, 1.0)),
        "row": m.placed(m.shuffled(rows)[:active].sort().values.int()),
        "positions": m.placed(m.whole(99, active)),
        "slot_mapping": m.placed(m.whole(99, active)),
        "seq_lens": m.placed(m.whole(99, active).int()),
        "page_table": m.placed(m.whole(99, active, pages).int(), 1),
        "num_active": m.placed(m.whole(9, 1).int()),
        "token_ids": m.maybe(lambda: m.placed(m.whole(99, active))),
        "cross_page_table": m.maybe(lambda: m.placed(m.whole(99, active, cross_pages).int(), 1)),
        "cross_seq_lens": m.maybe(lambda: m.placed(m.whole(99, active).int())),
        "hidden": m.maybe(lambda: m.states(active, m.size(30), m.dtype())),
    }

    def check(before: Arguments, after: Arguments) -> None:
        stay = (~before["done"][before["row"].long()]).nonzero().flatten()
        assert after["num_active"].item() == len(stay)
        for name in given.keys() - {"done", "num_active"}:
            if before[name] is not None:
                assert_close(after[name][: len(stay)], before[name][stay], EXACT, name)

    return given, check
