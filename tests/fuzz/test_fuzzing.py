"""The fuzzing harness: each failure is one finding, and the inputs after it are tried."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

import pytest

import campaign
import fuzzing
import mutate

MODULE = """
import ctypes, os, time

LIMIT_S = 5

def one(random):
    number = random.randrange(10**9)
    if number == {crash}:
        ctypes.string_at(0)
    if number == {hang}:
        time.sleep(100)
    if number == {leaves}:
        os._exit(0)
    assert number != {wrong}, "it is wrong"
    if number == {foreign}:
        raise KeyError("not ours")
    return number % 2 == 0
"""


def drawn(seed: int) -> int:
    return Random(seed).randrange(10**9)


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "fuzz_example.py").write_text(
        MODULE.format(
            crash=drawn(3), hang=drawn(5), leaves=drawn(6), wrong=drawn(7), foreign=drawn(8)
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fuzz_example", raising=False)
    return "example"


def test_every_kind_of_finding_has_its_seed(name: str) -> None:
    tally = fuzzing.run(name, inputs=12)
    found = {(finding.seed, finding.kind) for finding in tally.findings}
    assert found == {(3, "crash"), (5, "hang"), (6, "crash"), (7, "wrong"), (8, "foreign")}
    assert tally.inputs == 12
    served = sum(drawn(seed) % 2 == 0 for seed in range(12) if seed not in (3, 5, 6, 7, 8))
    assert tally.counts["served"] == served
    assert "it is wrong" in next(str(f) for f in tally.findings if f.kind == "wrong")
    assert "KeyError: 'not ours'" in next(str(f) for f in tally.findings if f.kind == "foreign")


def test_figures_add_up(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    for _ in range(2):
        campaign.add_row(path, "ops", {"inputs": 3, "seconds": 0.5})
    assert json.loads(path.read_text()) == {"ops": {"inputs": 6, "seconds": 1.0}}


def test_mutations_come_from_the_seed_alone_and_leave_the_original() -> None:
    value = {"a": [1, 2.5, "x"], "b": {"c": None}}
    before = json.dumps(value)
    for seed in range(300):
        first, second = (mutate.mutated_json(Random(seed), value) for _ in range(2))
        assert repr(first) == repr(second)
        data = b"some bytes of a file"
        assert mutate.mutated_bytes(Random(seed), data) == mutate.mutated_bytes(Random(seed), data)
    assert json.dumps(value) == before
    assert len({repr(mutate.mutated_json(Random(seed), value)) for seed in range(300)}) > 100
