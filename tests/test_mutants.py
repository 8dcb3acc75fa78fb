"""The faults of ``tests/mutants.py`` can be planted: the text that each replaces exists."""

from __future__ import annotations

import shlex

from cmake_build import ROOT
from mutants import MUTANTS
from mutations import occurrences


def test_the_text_of_every_fault_occurs_once() -> None:
    counts = {f"{m.name} ({m.file})": occurrences(m) for m in MUTANTS}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_the_tests_of_every_fault_are_there() -> None:
    for mutant in MUTANTS:
        paths = [word for word in shlex.split(mutant.tests) if word.startswith("tests/")]
        assert paths, mutant.name
        assert [path for path in paths if not (ROOT / path).exists()] == [], mutant.name


def test_there_are_enough_faults_and_no_two_are_alike() -> None:
    assert len(MUTANTS) >= 60
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.old != mutant.new for mutant in MUTANTS)
