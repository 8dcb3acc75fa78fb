"""Memory that host and device exchange."""

from __future__ import annotations

import pytest
import torch

from eecore.decoding.memory import TwinMemory, numbers_of

INT64, INT32 = torch.int64, torch.int32


def test_columns_are_written_whole_and_nothing_beside_them() -> None:
    fields = {"before": INT32, "flags": torch.bool, "first": INT64, "last": INT32, "after": INT64}
    memory = TwinMemory(torch.device("cpu"), {n: (dtype, (3,)) for n, dtype in fields.items()})
    side = memory.host()
    side.write(**{name: [5, 5, 5] for name in fields if name != "flags"})
    side.write_whole(flags=[1, 0, 1], first=(-1, 2, 1 << 40), last=range(3))
    assert {name: cells.tolist() for name, cells in side.cells.items()} == {
        "before": [5, 5, 5],
        "flags": [True, False, True],
        "first": [-1, 2, 1 << 40],
        "last": [0, 1, 2],
        "after": [5, 5, 5],
    }
    with pytest.raises(AssertionError, match="neighbours"):
        side.write_whole(before=[1, 2, 3], first=[1, 2, 3])


def test_a_page_table_is_written_again_after_a_run_has_changed_it() -> None:
    memory = TwinMemory(torch.device("cpu"), {"table": (INT32, (2, 4))})
    side = memory.host()
    for pages in [[3, 1]], [[3, 1, 2], [4]], [[3], [4]]:
        side.write_pages("table", pages)
        for i, own in enumerate(pages):
            assert numbers_of(side.cells, "table", i)[: len(own)] == own
        memory.device["table"].fill_(-7)
    assert numbers_of(side.cells, "other", 0) == []
