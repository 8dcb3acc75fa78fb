"""A share of every fuzzer, with fixed seeds; ``make fuzz MINUTES=10`` is for more."""

from __future__ import annotations

import os
import subprocess
import sys

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


SHRINKS = """
import os, traceback
import campaign, eecore, fuzzing, hypothesis, torch
for name in fuzzing.classes():
    child = os.fork()
    if not child:
        try:
            campaign.shrink(name, examples=12)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


@pytest.mark.long
def test_nothing_falls_over_under_hypothesis() -> None:
    """Each class runs in a child of a process that has made the slow imports."""
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
