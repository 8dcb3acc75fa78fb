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


SHRINKS = """
import campaign, fuzzing
for name in fuzzing.classes():
    print(name, flush=True)
    campaign.shrink(name, examples=12)
print("all")
"""


def test_nothing_falls_over_under_hypothesis() -> None:
    """In one process, whose start takes longer than the examples; it says which it was at."""
    path = os.pathsep.join([str(fuzzing.FOLDER), *filter(None, sys.path)])
    got = subprocess.run(
        [sys.executable, "-c", SHRINKS],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert got.returncode == 0, got.stdout[-4000:] + got.stderr[-8000:]
    assert got.stdout.endswith("all\n")
