"""Confident exits of a T5: arithmetic, order, what is refused, and a run. No timing is judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from running import RunsBench

import eecore
from bench.calm import calm as bench_calm
from bench.calm import engines as calm_engines
from bench.calm import tables as calm_tables
from bench.calm.engines import Engine, Prompts, TimedBatch
from bench.calm.worker import until
from bench.harness import results
from bench.harness.processes import EngineError, Process
from tiny_models import random_prompts, write_model
from tiny_t5 import write_t5

RECORDS = [{"input": text, "target": "[on]"} for text in ("lamp on", "a", "what time is it")]


def ran(name: str, *rounds: list[TimedBatch]) -> Engine:
    return Engine(name, lambda _: TimedBatch(1.0, []), list(rounds))


def test_figures_take_ratios_batch_by_batch() -> None:
    own = ran("eecore", [TimedBatch(1.0, [[1, 2], [3, 4]]), TimedBatch(10.0, [[5]])])
    peer = ran("theirs", [TimedBatch(2.0, [[1, 2], [3, 9]]), TimedBatch(40.0, [[5, 6]])])
    row = calm_engines.figures(peer, own, 2)
    assert row["eecore_is"] == pytest.approx((2.0 + 2.0) / 2)
    assert row["tokens_per_s_best"] == pytest.approx(6 / 42)
    assert row["tokens"] == 6
    assert row["same_tokens"] == pytest.approx(1 / 3)
    assert calm_engines.figures(own, own, 2)["same_tokens"] == 1.0


def test_engines_take_turns_batch_by_batch_after_a_warm_up_that_does_not_count() -> None:
    turns: list[tuple[str, int]] = []

    def engine(name: str) -> Engine:
        def generate(prompts: Prompts) -> TimedBatch:
            turns.append((name, len(prompts)))
            return TimedBatch(0.1, [[1] for _ in prompts])

        return Engine(name, generate)

    engines = [engine("a"), engine("b")]
    for size in (2, 3):  # the second size starts anew
        calm_engines.measure(engines, random_prompts(3, 3, 3), size, 2, {})
        assert [len(batches) for batches in engines[0].rounds] == [3 - size + 1] * 2
    assert turns[:6] == [("a", 2), ("b", 2), ("a", 2), ("b", 2), ("a", 1), ("b", 1)]


def test_a_peer_that_fails_on_the_way_is_left_out_with_the_reason() -> None:
    calls = 0

    def fails_later(prompts: Prompts) -> TimedBatch:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise EngineError("out of memory")
        return TimedBatch(0.1, [[1] for _ in prompts])

    own = Engine("eecore", lambda prompts: TimedBatch(0.1, [[1] for _ in prompts]))
    engines, left_out = [own, Engine("theirs", fails_later)], {}
    calm_engines.measure(engines, random_prompts(3, 3, 3), 1, 1, left_out)
    assert left_out == {"theirs": "out of memory"}
    assert engines == [own]


def test_the_end_token_is_the_last() -> None:
    assert until([5, 1, 0, 0], end=1) == [5, 1]
    assert until([5, 6], end=1) == [5, 6]


def test_the_page_names_the_lowest_share_of_the_ideal() -> None:
    def row(technique: str, share: float | None) -> dict[str, Any]:
        return {
            "technique": technique,
            "batch": "all",
            "batch_size": 8,
            "settings": None if technique == "full" else {},
            "throughput": {"share_of_ideal": share, "share_of_cut": None},
            "latency": None,
        }

    rows = [row("full", 0.1), row("softmax", 0.9), row("state", 0.87), row("classifier", None)]
    assert calm_tables.shares({"evaluation": {"rows": rows}}) == (
        "- throughput, lowest share of the ideal: 87% (state, all, 8 a batch)"
    )


# Runs


def test_it_runs_on_a_tiny_t5_and_writes_nothing_when_dry(
    run_bench: RunsBench, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    model = write_t5(tmp_path / "calm-tiny")
    words = ["calm", model, "--data", data, "--batch-size", 2, "--rounds", 1, "--max-tokens", 4]
    done = run_bench(*words, "--thresholds", "softmax=0.1", "--skip-peers", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# Confident exit: calm-tiny\n")
    assert "| static-half |" in done.stdout
    assert "lowest share of the ideal" in done.stdout
    with pytest.raises(SystemExit, match="--thresholds: expected each of"):
        bench_calm.main([*map(str, words[1:]), "--thresholds", "entropy=1", "--skip-peers"])


def test_it_writes_its_numbers_and_of_them_a_page_and_two_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    model = write_t5(tmp_path / "calm-tiny")
    kept = tmp_path / "results"
    kept.mkdir()
    monkeypatch.setattr(results, "RESULTS", kept)
    monkeypatch.setattr(calm_tables, "PAGES", tmp_path / "pages")
    words = [str(model), "--data", str(data), "--batch-size", "2", "--rounds", "1"]
    bench_calm.main([*words, "--max-tokens", "3", "--skip-peers"])
    assert [path.name for path in kept.iterdir()] == ["calm-tiny.json"]
    names = {path.name for path in (tmp_path / "pages").iterdir()}
    assert names == {f"calm-tiny{end}" for end in (".md", "-throughput.svg", "-latency.svg")}
    stored = json.loads((kept / "calm-tiny.json").read_text())
    assert stored["evaluation"]["num_layers"] == 4


def test_peers_need_an_encoder(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected an encoder-decoder model, got llama"):
        bench_calm.check_peers(write_model(tmp_path))


def test_transformers_gives_the_tokens_of_full_depth(tmp_path: Path) -> None:
    directory = write_t5(tmp_path)
    prompts = random_prompts(7, 3, 12)
    model = eecore.load(directory, device="cpu", kv_cache_tokens=256)
    outputs = eecore.generate(model, prompts, max_tokens=9)
    ended = outputs[0].token_ids[2]  # so that a sequence ends before the others
    config = json.loads((directory / "config.json").read_text()) | {"eos_token_id": ended}
    (directory / "config.json").write_text(json.dumps(config))
    model = eecore.load(directory, device="cpu", kv_cache_tokens=256)
    expected = [output.token_ids for output in eecore.generate(model, prompts, max_tokens=9)]
    assert len({len(tokens) for tokens in expected}) > 1
    command = [sys.executable, "-m", calm_engines.WORKER, "transformers", directory, "f32", "1"]
    process = Process(command, 1)
    try:
        assert process.answer(300)["version"]
        process.send({"prompts": prompts, "tokens": 9})
        assert process.answer(300)["tokens"] == expected
    finally:
        process.close()
