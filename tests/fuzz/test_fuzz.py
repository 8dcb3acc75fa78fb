"""A share of every fuzzer, with fixed seeds; ``make fuzz MINUTES=10`` is for more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import fuzzing


@pytest.mark.parametrize("name", fuzzing.classes())
def test_nothing_falls_over(name: str) -> None:
    share = getattr(fuzzing.module_of(name), "SHARE", fuzzing.SHARE)
    tally = fuzzing.run(name, inputs=share)
    assert not tally.findings, "\n".join(map(str, tally.findings))
    assert tally.inputs == share


@pytest.mark.parametrize("name", fuzzing.classes())
def test_nothing_falls_over_under_hypothesis(name: str) -> None:
    path = os.pathsep.join([str(fuzzing.FOLDER), *filter(None, sys.path)])
    code = f"import campaign; campaign.shrink({name!r}, examples=30)"
    got = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert got.returncode == 0, got.stdout[-4000:] + got.stderr[-8000:]
