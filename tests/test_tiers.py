"""Every value that the short suite leaves out is tried in another case."""

from __future__ import annotations

import itertools

import pytest

import tiers


@pytest.mark.parametrize("strength", [1, 2])
@pytest.mark.parametrize("sizes", [(), (1,), (4,), (2, 3), (5, 3, 2), (4, 4, 3, 2)], ids=str)
def test_every_combination_of_values_is_in_a_chosen_row(
    sizes: tuple[int, ...], strength: int
) -> None:
    rows = list(itertools.product(*map(range, sizes)))
    chosen = [rows[i] for i in tiers.covering(rows, strength)]
    for columns in itertools.combinations(range(len(sizes)), min(strength, len(sizes))):
        wanted = {tuple(row[i] for i in columns) for row in rows}
        assert {tuple(row[i] for i in columns) for row in chosen} == wanted
    assert len(chosen) == len(set(chosen))
    if len(sizes) > strength:
        assert len(chosen) < len(rows)
