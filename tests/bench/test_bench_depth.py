"""Saved layers: their arithmetic, their tables, and a run. No timing is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from running import RunsBench
from safetensors.torch import load_file

import eecore
from bench.decode.models import make_random_llama
from bench.depth import models as depth_models
from bench.depth import tables as depth_tables
from bench.depth.kernels import Kernels
from bench.depth.measurement import curve_rows
from bench.depth.predictions import Costs, Curve, Line
from tiny_models import write_model
from tiny_t5 import write_t5

TINY = {"hidden_size": 128, "num_hidden_layers": 8, "vocab_size": 256}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 256}


def flat(time: float) -> Curve:
    return Curve({1: time})


def costs(**kernels: Curve) -> Costs:
    """Four layers of 2 ms for one row, 3 ms for two and 4 ms for four, in a step of 1 ms."""
    lines = {1: Line(1.0, 2.0), 2: Line(1.0, 3.0), 4: Line(1.0, 4.0)}
    nothing = dict.fromkeys(("head", "state", "classifier", "fill"), flat(0.0))
    return Costs(4, lines, {**nothing, **kernels})


# Arithmetic


def test_a_line_goes_through_full_depth_and_the_cut_models() -> None:
    line = Line.through({3: 4.0, 6: 7.0, 12: 13.0})
    assert line.at(4.5) == pytest.approx(5.5)


def test_a_curve_goes_on_straight_and_takes_nothing_for_no_rows() -> None:
    curve = Curve({8: 10.0, 1: 3.0, 16: 12.0})
    assert [curve.at(rows) for rows in (0, 1, 4.5, 16, 20)] == pytest.approx([0, 3, 6.5, 12, 13])


def test_a_cut_model_takes_what_its_mean_depth_says() -> None:
    steps = [[4, 2], [2, 4]]
    assert costs().cut(steps, lambda _: 0.5) == pytest.approx(1 + 3 * 3 + 0.5)


def test_layers_are_paid_for_the_rows_that_are_there() -> None:
    steps = [[4, 2], [1, 1]]  # two layers for two rows and two for one; one layer for two
    expected = (1 + 2 * 3 + 2 * 2 + 1 + 3) / 2
    assert costs().present(steps, lambda _: 0.0) == pytest.approx(expected)


def test_a_softmax_check_is_the_head_of_those_that_leave_by_it() -> None:
    extra = costs(head=Curve({1: 10.0, 2: 11.0, 4: 13.0})).exits((1, 2), "softmax")
    assert extra([2, 2, 2, 2]) == pytest.approx(13.0)  # the first check; the second is the head
    assert extra([1, 1, 4, 4]) == pytest.approx(13.0 + 11.0 + 11.0 - 13.0)
    assert extra([4, 4, 4, 4]) == pytest.approx(13.0 + 13.0)


def test_other_checks_and_filling_come_on_top() -> None:
    made = costs(state=flat(0.5), head=flat(9.0), fill=Curve({1: 1.0, 2: 1.5}))
    extra = made.exits((2,), "state")
    assert extra([2, 4]) == pytest.approx(0.5 + 2 * 1.0)
    assert extra([2, 2]) == pytest.approx(0.5 + 2 * 1.5)


def test_a_round_of_speculation_is_its_passes() -> None:
    made = costs(head=Curve({1: 1.0, 4: 2.0}))
    draft = 1 + 2 * 2
    verification = draft + 2 * 4 + (2.0 - 1.0)  # the last draft below, all four above
    assert made.round_of_speculation(1, 2, 3) == pytest.approx(3 * draft + verification)


def test_rows_are_measured_up_to_those_that_a_verification_has() -> None:
    assert curve_rows(72) == [1, 2, 4, 8, 16, 32, 64]


# Models and ops


def test_forced_exits_are_taken_where_they_are_asked_for(tmp_path: Path) -> None:
    subject = depth_models.tiny(tmp_path)
    model = eecore.load(subject.directory, device="cpu", kv_cache_tokens=512)
    prompts = subject.tokens(model, 3, 8)
    forced = [mode for mode in subject.modes if isinstance(mode.policy, eecore.ConfidentExit)]
    assert len(forced) == 2 * 3 * 2
    for mode in forced:
        outputs = eecore.generate(model, prompts, exit=mode.policy, max_tokens=4, ignore_eos=True)
        layer = {"L/4": 2, "L/2": 4}[mode.name[-3:]]
        assert {e for output in outputs for e in output.exit_layers[1:]} == {layer}, mode.name


def test_a_damped_model_differs_in_what_late_layers_add_alone(tmp_path: Path) -> None:
    directory = make_random_llama(tmp_path / "model", **TINY, **HEADS)
    before = load_file(directory / "model.safetensors")
    after = load_file(depth_models.damped(directory, 6) / "model.safetensors")
    damped = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    late = {name for name in before if "layers.6." in name or "layers.7." in name}
    assert damped == {name for name in late if "o_proj" in name or "down_proj" in name}


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_the_ops_of_a_model_run_alone(kind: str, weights: str, tmp_path: Path) -> None:
    write = write_model if kind == "llama" else write_t5
    config = eecore.load(write(tmp_path / "model"), device="cpu", kv_cache_tokens=64).config
    kernels = Kernels(config, weights, 64)
    kernels.round([1, 64])
    assert kernels.num_bytes > 0
    rows = {name: set(times) for name, times in kernels.milliseconds.items()}
    assert rows == {key: {1, 64} for key in ("layers", "head", "state", "classifier", "fill")}


# A run


def test_the_benchmark_runs_on_a_tiny_model_and_shows_what_it_measured(
    run_bench: RunsBench, tmp_path: Path
) -> None:
    file = tmp_path / "depth.json"
    done = run_bench(
        *("depth", "--models", "tiny", "--weights", "float32", "int8", "--batches", "1", "4"),
        *("--threads", "1", "--rounds", "1", "--steps", "2", "--json", file),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert done.stdout.strip().endswith(depth_tables.full(result))
    assert len(result["modes"]) == 2 * 2 * (3 + 12 + 1)
    for row in result["modes"]:
        is_confident = row["mode"].startswith(("softmax", "state", "classifier"))
        has_prediction = is_confident or row["mode"].startswith("Self")
        assert (row["of_cut"] is not None) == has_prediction
        parted = is_confident and "each" in row["mode"] and row["batch"] > 1
        assert (row["of_present"] is not None) == parted
    assert {row["mix"] for row in result["mixes"]} == {
        *("alone", "prompt", "sampled", "four policies")
    }
    assert "| tiny | int8 |" in depth_tables.short(result)


def test_a_caption_says_where_weights_come_from() -> None:
    rows = [{"model": "a", "weights": "int8", "bytes": 9e6, "from_cache": True}]
    rows.append({"model": "b", "weights": "float32", "bytes": 538e6, "from_cache": False})
    assert depth_tables.sources({"weights": rows}) == (
        "By the rate at which so many bytes are read: weights from a cache: a int8 (9 MB); "
        "from memory: b float32 (538 MB)."
    )
