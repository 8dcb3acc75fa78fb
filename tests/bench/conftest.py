"""Fixtures of the benchmarks' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import running

from bench.harness.places import README, RESULTS, RESULTS_PAGE


@pytest.fixture
def run_bench() -> Iterator[running.RunsBench]:
    """Runs ``python -m bench`` with some arguments; committed files must not change."""
    kept = [README, RESULTS_PAGE, *RESULTS.iterdir()]
    before = {path: path.read_bytes() for path in kept}
    yield running.run
    assert set(RESULTS.iterdir()) == set(kept) - {README, RESULTS_PAGE}
    assert before == {path: path.read_bytes() for path in kept}
