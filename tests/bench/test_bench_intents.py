"""The intent model's modes: arithmetic, order, what is refused, and a run. No timing is judged."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from running import RunsBench

import eecore
from bench.decode.one_by_one import Decode
from bench.decode.parses import Parse, PeerMode
from bench.harness import exits
from bench.harness.processes import EngineError, Process
from bench.intents import figures as intent_figures
from bench.intents import intents as bench_intents
from bench.intents import modes as intent_modes
from bench.intents import tables as intent_tables
from bench.intents.figures import Mode
from eecore.calibration_file import Calibration
from tiny_models import random_prompts, shape, write_model

RECORDS = [
    {"input": "lamp on", "target": "[on [lamp]]"},
    {"input": "what time is it", "target": "[time]"},
]


def parse(tokens: int, seconds: float, first_seconds: float = 0.0, **rest: Any) -> Parse:
    return Parse(list(range(tokens)), seconds, first_seconds, **{"first_tokens": 1, **rest})


def mode_of(group: str, *chunks: list[Parse], name: str | None = None) -> Mode:
    return Mode(name or group, group, lambda _: [], list(chunks))


# Arithmetic


def test_speeds_count_the_prompt_in_and_decoding_leaves_the_first_step_out() -> None:
    parses = [parse(10, 1.0, 0.4), parse(5, 0.5, 0.3, first_tokens=3)]
    assert intent_figures.ms_per_token(parses) == pytest.approx(1e3 * 1.5 / 15)
    assert intent_figures.decode_ms_per_token(parses) == pytest.approx(1e3 * 0.8 / 11)


def test_a_speed_up_is_the_median_over_chunks_of_milliseconds_per_token() -> None:
    full = mode_of("full", [parse(10, 1.0)], [parse(10, 1.0)], [parse(10, 10.0)])
    # Twice as fast, then 4 times with half the tokens in an eighth of the time, then once.
    fixed = mode_of("fixed", [parse(10, 0.5)], [parse(5, 0.125)], [parse(10, 10.0)])
    ratio = intent_figures.speed_up(fixed, full, intent_figures.ms_per_token)
    assert ratio is not None
    assert ratio["median"] == pytest.approx(2.0)
    assert ratio["total"] == pytest.approx((12.0 / 30) / (10.625 / 25))


def test_a_mode_that_is_done_after_its_first_step_has_no_decoding_speed() -> None:
    full = mode_of("full", [parse(3, 1.0, 0.5)], [parse(1, 0.2, 0.2)])
    at_once = mode_of("assisted", [parse(3, 0.3, 0.3, first_tokens=3)], [parse(1, 0.1, 0.1)])
    row = intent_figures.figures(at_once, [full, at_once])
    assert row["decode_ms_per_token"] is None
    assert row["decode_speed_to_transformers"] is None
    assert row["ms_per_token"] == pytest.approx(100.0)


def test_figures_compare_with_the_own_full_depth_and_the_fastest_mode_of_each_peer() -> None:
    modes = [
        mode_of("full", [parse(4, 1.0, depth=48)]),
        mode_of("speculative", [parse(4, 0.5, drafted=8, accepted=6, depth=21)]),
        mode_of("transformers", [parse(4, 4.0)]),
        mode_of("assisted", [parse(4, 2.0)], name="fast"),
        mode_of("assisted", [parse(4, 8.0)], name="slow"),
        mode_of("economize", [parse(3, 3.0)]),
    ]
    own, peer = (intent_figures.figures(mode, modes) for mode in (modes[1], modes[4]))
    assert own["acceptance"] == pytest.approx(0.75)
    assert own["mean_exit_layer"] == pytest.approx(5.25)
    assert own["speed_to_full"] == pytest.approx({"median": 2.0, "total": 2.0})
    assert own["speed_to_transformers"]["median"] == pytest.approx(4.0)
    assert own["speed_to_economize"]["median"] == pytest.approx(8.0)
    assert peer["speed_to_full"]["median"] == pytest.approx(0.5)
    assert peer["mean_exit_layer"] is None
    assert intent_figures.figures(modes[5], modes)["same_as_transformers"] == 0.0


def test_without_peers_there_is_nothing_to_compare_with() -> None:
    full = mode_of("full", [parse(4, 1.0)])
    row = intent_figures.figures(full, [full])
    assert row["speed_to_transformers"] is None
    assert row["same_as_transformers"] is None
    assert row["acceptance"] is None


def test_reuse_is_a_share_of_the_time_of_the_same_mode_without_it() -> None:
    modes = [
        mode_of("full", [parse(4, 9.0)]),
        mode_of("speculative", [parse(5, 0.9, 0.1)], [parse(5, 0.9, 0.1)], name="(3, 6)"),
        mode_of("without reuse", [parse(5, 1.0, 0.1)], [parse(5, 1.0, 0.1)]),
        mode_of("speculative", [parse(5, 1.0)], [parse(5, 1.0)], name="(4, 6)"),
        mode_of("without reuse", [parse(5, 0.8)], [parse(5, 1.0)]),
    ]
    saves, costs = intent_figures.reuse(modes)
    assert [saves["name"], costs["name"]] == ["(3, 6)", "(4, 6)"]
    assert saves["saved"]["median"] == pytest.approx(0.1)
    assert saves["decode_saved"]["median"] == pytest.approx(1 - 0.8 / 0.9)
    assert saves["ms_without"] == pytest.approx(200.0)
    assert costs["saved"]["median"] < 0 < costs["ms_per_token"]


# Order and failures


def test_modes_take_turns_chunk_by_chunk_after_a_warm_up_that_does_not_count() -> None:
    turns: list[tuple[str, int]] = []

    def decode(name: str) -> Decode:
        def some(prompts: Sequence[list[int]]) -> list[Parse]:
            turns.append((name, len(prompts)))
            return [parse(2, 0.1) for _ in prompts]

        return some

    modes = [Mode(name, "full", decode(name)) for name in ("a", "b")]
    left_out = bench_intents.measure(modes, random_prompts(*[3] * 5), rounds=2, chunk_size=4)
    assert left_out == {}
    one_round = [("a", 4), ("b", 4), ("a", 1), ("b", 1)]
    assert turns == [("a", 3), ("b", 3), *one_round, *one_round]
    assert [len(chunk) for chunk in modes[0].chunks] == [4, 1, 4, 1]


def test_a_peer_that_fails_on_the_way_is_left_out_with_the_reason() -> None:
    calls = 0

    def fails_later(prompts: Sequence[list[int]]) -> list[Parse]:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise EngineError("out of memory")
        return [parse(2, 0.1) for _ in prompts]

    modes = [
        Mode("ours", "full", lambda prompts: [parse(2, 0.1) for _ in prompts]),
        Mode("theirs", "economize", fails_later),
    ]
    left_out = bench_intents.measure(modes, random_prompts(3, 3, 3), rounds=1, chunk_size=1)
    assert left_out == {"theirs": "out of memory"}
    assert [mode.name for mode in modes] == ["ours"]
    assert len(modes[0].chunks) == 3


def test_other_tokens_than_those_of_full_depth_are_a_broken_promise() -> None:
    full = mode_of("full", [parse(4, 1.0)], [parse(5, 1.0)])
    same = mode_of("speculative", [parse(4, 1.0)], [parse(5, 1.0)])
    other = mode_of("without reuse", [parse(4, 1.0)], [parse(6, 1.0)])
    allowed = mode_of("fixed", [parse(3, 1.0)], [parse(5, 1.0)])
    assert bench_intents.broken_promises([full, same, allowed]) == []
    int8 = [mode_of("int8 full", [parse(7, 1.0)]), mode_of("int8 speculative", [parse(7, 1.0)])]
    assert bench_intents.broken_promises([full, same, *int8]) == []  # held to its own full depth
    [message] = bench_intents.broken_promises([full, same, other, allowed])
    expected = "without reuse: expected the tokens of Full(), got different ones for 1 of 2"
    assert message.startswith(expected)


def test_a_broken_promise_ends_the_script_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_intents, "run", lambda _: (a_result(), ["(3, 6): other tokens"]))
    with pytest.raises(SystemExit, match="other tokens"):
        bench_intents.main(["--json", str(tmp_path / "intents.json")])
    assert list(tmp_path.iterdir()) == []


# What it needs


def a_calibration(measure: Any, classifier: eecore.ExitClassifier | None = None) -> Calibration:
    return Calibration(
        threshold=0.55,
        measure=measure,
        delta=0.02,
        epsilon=0.05,
        loss="textual",
        similarity="exact",
        num_prompts=500,
        max_tokens=96,
        decay_tau=0.0,
        exit_points=None,
        min_exit_layer=1,
        model_sha256="0" * 64,
        dtype="float32",
        weights=None,
        classifier_sha256=None if classifier is None else classifier.sha256,
        grid=(1.0, 0.55),
        steps=(),
    )


def test_a_missing_calibration_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    a_calibration("softmax").save(tmp_path / "calibration-softmax.json")
    with pytest.raises(SystemExit, match=r"(?s)calibration-state\.json.*eecore calibrate.*state"):
        exits.calibrated_policies(tmp_path)
    a_calibration("state").save(tmp_path / "calibration-state.json")
    with pytest.raises(SystemExit, match=r"(?s)classifier\.safetensors.*eecore train-classifier"):
        exits.calibrated_policies(tmp_path)


def test_calibrations_are_read_with_the_classifier_beside_them(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"weight1": torch.ones(2, 64)}, tmp_path / "classifier.safetensors")
    classifier = eecore.ExitClassifier.load(tmp_path / "classifier.safetensors")
    for measure in exits.MEASURES:
        own = classifier if measure == "classifier" else None
        a_calibration(measure, own).save(tmp_path / f"calibration-{measure}.json")
    policies = exits.calibrated_policies(tmp_path)
    assert {measure: policy.measure for measure, policy in policies.items()} == {
        measure: measure for measure in exits.MEASURES
    }
    assert all(policy.threshold == 0.55 for policy in policies.values())


def test_pairs_to_speculate_with_may_have_a_threshold() -> None:
    assert intent_modes.speculation("3,6") == eecore.SelfSpeculative(3, 6)
    assert intent_modes.speculation("3,6,0.5") == eecore.SelfSpeculative(3, 6, 0.5)
    assert intent_modes.default_speculations(12) == [
        eecore.SelfSpeculative(2, 6),
        eecore.SelfSpeculative(3, 6),
        eecore.SelfSpeculative(3, 8),
    ]
    for num_layers in (2, 4, 30):
        for policy in intent_modes.default_speculations(num_layers):
            policy.check(shape(num_layers, 64))


# Runs


def write_records(folder: Path) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (folder / "test.jsonl").write_text(lines)


def test_it_runs_on_a_tiny_model_and_writes_nothing_when_dry(
    run_bench: RunsBench, tmp_path: Path
) -> None:
    write_records(tmp_path)
    done = run_bench(
        *("intents", "--model", write_model(tmp_path / "model", "llama"), "--data", tmp_path),
        *("--count", "2", "--chunk", "1", "--fixed", "2", "--speculate", "1,3", "2,2,0.1"),
        *("--skip-calibrated", "--skip-peers", "--dry-run"),
    )
    assert done.returncode == 0, done.stderr
    full = done.stdout.partition("drafts accepted")[2]  # after the short table
    rows = [line for line in full.splitlines() if line.startswith("| `")]
    names = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    speculative = ["`SelfSpeculative(1, 3)`", "`SelfSpeculative(2, 2, 0.1)`"]
    int8 = [f"{name}, int8 weights" for name in speculative]
    first = ["`Full()`", "`FixedExit(2)`", *speculative, "`Full()`, int8 weights", *int8]
    assert names == [*first, *speculative, *int8]  # and what reuse saves
    assert all(row.endswith("| 100.0% |") for row in (rows[0], *rows[2:4]))


def test_the_peers_decode_as_full_depth_does_and_say_what_failed(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "llama")
    [prompt] = random_prompts(7)
    model = eecore.load(directory, device="cpu", kv_cache_tokens=256)
    expected = eecore.generate(model, prompt, max_tokens=12)[0].token_ids
    worker = [sys.executable, "-m", "bench.decode.peer_worker"]
    process = Process([*worker, directory, "float32", "1"], 1)
    try:
        assert process.answer(300)["versions"]["transformers"]
        for mode in (PeerMode("full"), PeerMode("assisted", 2, 3)):
            request = {"mode": dataclasses.asdict(mode), "prompts": [prompt], "max_tokens": 12}
            process.send(request)
            [made] = process.answer(300)["parses"]
            assert made["tokens"] == expected
            assert 1 <= made["first_tokens"] <= mode.num_drafts + 1
            assert 0 < made["first_seconds"] <= made["seconds"]
        process.send({**request, "mode": dataclasses.asdict(PeerMode("calm", threshold=2.0))})
        assert "Error" in process.answer(300)["error"]
    finally:
        process.close()


def test_the_short_table_shows_the_fastest_of_each_kind() -> None:
    result = a_result()
    table = intent_tables.short(result)
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[0] for row in rows] == ["| whole", "| quick", "| theirs"]
    assert "| quick | 90.0% | 1.00 | 2.00x | 4.00x |" in rows
    full = intent_tables.full(result)
    assert "economize 0.3.2" in full
    assert "- left out: economize: no network" in full


def a_result() -> dict[str, Any]:
    def chunk(seconds: float) -> list[Parse]:
        return [parse(10, seconds, depth=30)]

    modes = [
        mode_of("full", chunk(0.02), name="whole"),
        mode_of("speculative", chunk(0.03), name="dull"),
        mode_of("without reuse", chunk(0.03)),
        mode_of("speculative", chunk(0.01), name="quick"),
        mode_of("without reuse", chunk(0.011)),
        mode_of("transformers", chunk(0.04), name="theirs"),
    ]
    rows = [
        {
            "name": mode.name,
            "group": mode.group,
            "exact_match": 0.9,
            **intent_figures.figures(mode, modes),
        }
        for mode in modes
    ]
    return {
        "cpu": "a processor",
        "cpu_capability": "avx2",
        "threads": 1,
        "torch": "2",
        "peers": {
            "versions": {"transformers": "5", "economize": "0.3.2"},
            "dtype": "float32",
            "ms_per_token_tried": {"float32": {"theirs": 4.0}, "bfloat16": {"theirs": 5.0}},
        },
        "left_out": {"economize": "no network"},
        "model_sha256": "0" * 64,
        "num_layers": 4,
        "weights": "Its weights come from memory.",
        "dtype": "float32",
        "utterances": 1,
        "prompt_tokens": 9,
        "rounds": 1,
        "chunk": 1,
        "contracts": {},
        "modes": rows,
        "reuse": intent_figures.reuse(modes),
    }
