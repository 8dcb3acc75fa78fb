"""The benchmarks of exit modes and of prompts: turns and figures. No timing is judged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import eecore
from bench.decode import prefill
from bench.exits import modes
from bench.exits.modes import FULL, PEER, Made
from bench.harness.turns import TimedCall
from tiny_models import random_prompts, write_model


def output(drafted: int, accepted: int, exit_layers: list[int]) -> SimpleNamespace:
    stats = SimpleNamespace(drafted=drafted, accepted=accepted)
    return SimpleNamespace(stats=stats, exit_layers=exit_layers)


def test_a_row_is_held_against_full_depth_and_transformers() -> None:
    drafts = Made([1, 2], output(4, 3, [2, 4]))  # type: ignore[arg-type]
    turns = {
        FULL: [TimedCall(2.0, [Made([1, 2])]), TimedCall(4.0, [Made([1, 2])])],
        "drafts": [TimedCall(1.0, [drafts]), TimedCall(1.0, [drafts])],
        PEER: [TimedCall(8.0, [Made([1, 3])]), TimedCall(8.0, [Made([1, 3])])],
    }
    row = modes.row_of("drafts", turns)
    assert (row["tokens_per_s_best"], row["tokens_per_s_median"]) == (2.0, 2.0)
    assert (row["ratio_to_full"], row["ratio_to_transformers"]) == (3.0, 8.0)
    assert (row["mean_exit_layer"], row["draft_acceptance"]) == (3.0, 0.75)
    assert row["same_tokens_as_full"]
    peer = modes.row_of(PEER, turns)
    assert not peer["same_tokens_as_full"]
    assert peer["mean_exit_layer"] is peer["draft_acceptance"] is None


def test_transformers_gives_the_tokens_of_full_depth(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    model = eecore.load(directory, device="cpu", dtype="float32", kv_cache_tokens=256)
    own = eecore.generate(model, random_prompts(6, 5), max_tokens=5, ignore_eos=True)
    runs = {
        FULL: lambda prompt: Made(
            eecore.generate(model, prompt, max_tokens=5, ignore_eos=True)[0].token_ids
        ),
        PEER: modes.transformers_mode(directory, "float32", 5),
    }
    turns = modes.measure(runs, random_prompts(6, 5), 2)
    for its in turns.values():
        assert len(its) == 2
        assert [made.tokens for made in its[-1].made] == [each.token_ids for each in own]


def test_first_tokens_are_the_same_and_counted_in_operations(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    runs = prefill.runs_of(directory, 20)
    (prompt,) = random_prompts(20)
    ours = runs["float32"](prompt).made[0].token_ids
    assert ours == runs["transformers float32"](prompt).made[0]
    runs["llama.cpp int4"] = lambda _: TimedCall(1e3, None)
    rows = prefill.rows_of(runs, prompt, 1, 1000)
    assert [row["name"] for row in rows] == list(runs)
    for row in rows:
        assert row["tokens"] == 20
        assert row["gflops"] == pytest.approx(2 * 1000 * 20 / row["best_s"] / 1e9)
        assert ("ratio_to_transformers" in row) == (row["name"] in prefill.TRANSFORMERS_BITS)
        assert ("ratio_to_llama_cpp" in row) == (row["name"] == "int4")
