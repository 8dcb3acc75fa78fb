"""A share of every fuzzer, with fixed seeds; ``make fuzz MINUTES=10`` is for more."""

from __future__ import annotations

import pytest

import fuzzing
import tiers


@pytest.mark.parametrize("name", fuzzing.classes())
def test_nothing_falls_over(name: str, request: pytest.FixtureRequest) -> None:
    share = getattr(fuzzing.module_of(name), "SHARE", fuzzing.SHARE)
    if not tiers.runs_all(request.config):
        share = share // 8 + 1
    tally = fuzzing.run(name, inputs=share)
    assert not tally.findings, "\n".join(map(str, tally.findings))
    assert tally.inputs == share
