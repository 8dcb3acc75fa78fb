"""The benchmark of checks: its policies. No timing is judged."""

from __future__ import annotations

from pathlib import Path

import pytest

import eecore
from bench.exits import checks as bench_checks
from head_packs import write_pack
from tiny_models import random_prompts, write_model

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    directory = write_model(tmp_path_factory.mktemp("checked"))
    pack = write_pack(directory / "exits", eecore.load(directory, device="cpu"), vocabulary_size=37)
    return eecore.load(directory, device="cpu", kv_cache_tokens=512, exits=pack)


def test_everybody_leaves_at_half(model: eecore.Model) -> None:
    steps = bench_checks.measure(model, random_prompts(5, 3), 6, 1)
    assert set(steps) == set(bench_checks.policies(4))
    assert all(seconds > 0.0 for seconds in steps.values())


def test_checks_before_it() -> None:
    points = {
        name: policy.exit_points
        for name, policy in bench_checks.policies(30).items()
        if isinstance(policy, eecore.ConfidentExit)
    }
    assert points["cut, one"] == (15,)
    assert points["softmax, third"] == (3, 6, 9, 12, 15)
    assert points["state, every"] == tuple(range(1, 16))


def test_an_exit_elsewhere_ends_the_run(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_checks, "policies", lambda _: {"fixed": eecore.FixedExit(1)})
    with pytest.raises(SystemExit, match=r"fixed: expected exits at 2, got \[1\]"):
        bench_checks.measure(model, random_prompts(5), 4, 1)
