"""The benchmark of Auto beside fixed drafts: its rows. No timing is judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.exits import auto as bench_auto
from eecore.lab.evaluation.sweep import Sweep, SweepCell

ROOT = Path(__file__).resolve().parents[1]


def test_a_row_names_the_best_of_the_grid() -> None:
    speeds = {(1, 3): 0.9, (2, 3): 1.8, (2, 6): 1.6}
    cells = tuple(SweepCell(e, d, 0.5, 10.0, speed) for (e, d), speed in speeds.items())
    row = bench_auto.row_of("int8", 8, Sweep(12, 100.0, cells, 1.7))
    assert row["best"] == [2, 3]
    assert (row["best_speedup"], row["median_speedup"], row["auto_speedup"]) == (1.8, 1.6, 1.7)


@pytest.mark.parametrize("weights", bench_auto.KINDS)
def test_the_models_are_those_that_rows_name(weights: str) -> None:
    source = bench_auto.load(weights).network.source
    assert source is not None
    assert (source.weights or source.dtype) == weights
