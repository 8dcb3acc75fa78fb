"""The benchmark of drafts beside other engines: its turns, its counting. No timing is judged."""

from __future__ import annotations

from pathlib import Path

import pytest

import eecore
from bench.decode.parses import Parse
from bench.exits import draft_peers as bench_draft_peers
from bench.exits.draft_peers import Row
from bench.harness.processes import EngineError
from bench.harness.prompts import KINDS
from tiny_models import random_prompts, write_model

ROOT = Path(__file__).resolve().parents[1]


def made_of(tokens: list[int]) -> Row:
    return Row("float32", "some", lambda _: Parse(tokens, 3.0, 1.0, 1))


def test_decoding_alone_counts() -> None:
    first, other = made_of([1, 2, 3, 4, 5]), made_of([1, 2, 3])
    prompts = {kind: [[1], [2]] for kind in KINDS}
    assert bench_draft_peers.take_turns([first, other], prompts) == [first, other]
    figures = first.figures()
    assert figures["tokens_per_s"] == dict.fromkeys(KINDS, 4 / 2)
    assert figures["overall"] == 2.0
    assert figures["same_as_full"] == 1.0
    assert other.figures()["same_as_full"] == 0.0


def test_who_fails_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(_: list[int]) -> Parse:
        raise EngineError("out of luck")

    rows = [made_of([1, 2]), Row("float32", "theirs", fails), made_of([1, 2])]
    prompts = {kind: [[1], [2]] for kind in KINDS}
    bench_draft_peers.warm_up(rows, prompts)
    assert bench_draft_peers.take_turns(rows, prompts) == [rows[0], rows[2]]
    assert "theirs: out of luck" in capsys.readouterr().err


def test_our_modes_give_the_tokens_of_full_depth(tmp_path: Path) -> None:
    model = eecore.load(write_model(tmp_path), device="cpu", kv_cache_tokens=1024)
    rows = [
        row for row in bench_draft_peers.our_rows("float32", model, 12) if "Head" not in row.engine
    ]
    prompts = {kind: random_prompts(6, 5) for kind in KINDS}
    done = bench_draft_peers.take_turns(rows, prompts)
    assert [row.engine for row in done] == [
        f"eecore `{n}()`" for n in ("Full", "PromptLookup", "Auto")
    ]
    assert all(row.figures()["same_as_full"] == 1.0 for row in done)
