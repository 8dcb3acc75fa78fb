"""Learn then Test on thoughts: against plain computations, its guarantee, and files of thoughts."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eecore import RequestError
from eecore.calibration.procedure import hoeffding_bentkus
from eecore.calibration.thoughts import (
    GRID,
    Trajectory,
    calibrated_stop,
    ended,
    loss_of,
    read_trajectories,
)
from eecore.thought_stop import Probe, ThoughtStop

RULE = ThoughtStop(math.inf, agreeing=2)


def trajectory(*probes: tuple[str, float], full: str = "18", is_right: bool = True) -> Trajectory:
    """A thought of 64 tokens more than its probes, which are 64 tokens apart."""
    own = tuple(Probe(64 * i, *each) for i, each in enumerate(probes, 1))
    return Trajectory("q", 64 * (len(probes) + 1), full, own, is_right)


def random_trajectory(chance: random.Random) -> Trajectory:
    """A thought whose answers settle, with a confidence that says little."""
    settles, probes = chance.randrange(12), []
    for i in range(chance.randrange(12)):
        is_settled = i >= settles or chance.random() < 0.1
        answer = "18" if is_settled else chance.choice(["", "3", "3", "3", "4"])
        probes.append((answer, round(chance.uniform(0.2 + 0.5 * is_settled, 1.0), 2)))
    return trajectory(*probes, is_right=chance.random() < 0.7)


def first_end(thought: Trajectory, threshold: float, agreeing: int) -> tuple[int, str]:
    """The end of a thought, by plain comparisons of single probes."""
    run, before = 0, ""
    for probe in thought.probes:
        run = run + 1 if probe.answer == before else 1
        before = probe.answer
        is_sure = 1.0 - probe.confidence <= run * (1.0 - threshold)
        if probe.answer != "" and run >= agreeing and is_sure:
            return probe.num_tokens, probe.answer
    return thought.full_tokens, thought.full_answer


@pytest.mark.parametrize("agreeing", [1, 2, 3])
@pytest.mark.parametrize("loss", ["different", "lost"])
def test_the_threshold_is_that_of_a_plain_computation(agreeing: int, loss: Any) -> None:
    chance = random.Random(agreeing)
    thoughts = [random_trajectory(chance) for _ in range(200)]
    rule = replace(RULE, agreeing=agreeing)
    found, steps = calibrated_stop(thoughts, rule, max_loss=0.1, confidence=0.8, loss=loss)
    expected, tried = math.inf, 0
    for threshold in GRID:
        ends = [first_end(thought, threshold, agreeing) for thought in thoughts]
        wrong = sum(
            answer != thought.full_answer and (thought.is_right or loss == "different")
            for thought, (_, answer) in zip(thoughts, ends, strict=True)
        )
        assert steps[tried].mean_loss == pytest.approx(wrong / 200)
        tried += 1
        if hoeffding_bentkus(wrong / 200, 200, 0.1) > 1.0 - 0.8:
            break
        expected = threshold
    assert len(steps) == tried
    assert found == replace(rule, threshold=expected)
    assert 0.0 < found.threshold < 1.0
    for thought in thoughts:
        end = ended(thought, found)
        assert (end.num_tokens, end.answer) == first_end(thought, found.threshold, agreeing)


def test_the_bound_holds_over_many_sets() -> None:
    """A thought has one probe, of a confidence c from 0 to 1, and its answer is wrong with
    probability 1 - c: with a threshold t the expected loss is (1 - t)^2 / 2.
    """
    chance, num_sets, max_loss, confidence = random.Random(0), 100, 0.1, 0.8
    exceeded = early = 0
    for _ in range(num_sets):
        sure = [chance.random() for _ in range(150)]
        thoughts = [trajectory(("18" if chance.random() < c else "3", c)) for c in sure]
        rule = replace(RULE, agreeing=1)
        found, _ = calibrated_stop(thoughts, rule, max_loss=max_loss, confidence=confidence)
        exceeded += (1.0 - found.threshold) ** 2 / 2 > max_loss
        early += found.threshold < 0.8
    tolerated = 1.0 - confidence
    assert exceeded / num_sets <= tolerated + 3.0 * math.sqrt(tolerated * confidence / num_sets)
    assert early / num_sets > 0.9  # not merely because no thought ends early


def test_no_thought_ends_where_no_threshold_keeps_the_promise() -> None:
    wrong = [trajectory(("3", 1.0), ("3", 1.0))] * 50
    found, steps = calibrated_stop(wrong, RULE, max_loss=0.1)
    assert found.records
    assert [step.passed for step in steps] == [False]
    assert ended(wrong[0], found).reason is None


def test_hopeless_ends_are_losses_too() -> None:
    lost = [trajectory(("", 0.0), ("", 0.0))] * 50
    rule = replace(RULE, hopeless=0.5)
    assert ended(lost[0], replace(rule, threshold=1.0), budget=256).reason == "hopeless"
    assert calibrated_stop(lost, rule, max_loss=0.1, budget=256)[0].records
    assert not calibrated_stop(lost, rule, max_loss=0.1, budget=1024)[0].records


def test_ends_and_losses() -> None:
    thought, stop = trajectory(("3", 0.9), ("3", 0.7), ("18", 0.9)), replace(RULE, threshold=0.7)
    end = ended(thought, stop)
    assert end == (128, "3", 2, "confident")
    assert loss_of(thought, end, "different") == loss_of(thought, end, "lost") == 1.0
    wrong = replace(thought, is_right=False)
    assert loss_of(wrong, end, "different") == 1.0
    assert loss_of(wrong, end, "lost") == 0.0
    end = ended(thought, replace(RULE, threshold=0.86))  # two probes may leave a doubt of 0.28
    assert end == (256, "18", 3, None)
    assert loss_of(thought, end, "different") == 0.0
    assert ended(trajectory(), stop) == (64, "18", 0, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_loss": 0.0}, "max_loss: expected a number between 0 and 1, got 0.0"),
        ({"confidence": 1.0}, "confidence: expected a number between 0 and 1, got 1.0"),
        ({"confidence": math.nan}, "confidence: expected a number between 0 and 1, got nan"),
        ({"loss": "risk"}, "loss: expected different or lost, got 'risk'"),
        ({"loss": "lost"}, "where it is not known: 'q'"),
        ({}, "expected at least 114 prompts"),
    ],
)
def test_settings_that_cannot_be_used(settings: dict[str, Any], message: str) -> None:
    thoughts = [replace(trajectory(), is_right=None)] * 113
    with pytest.raises(RequestError, match=message):
        calibrated_stop(thoughts, RULE, **{"max_loss": 0.02, **settings})


LINE: dict[str, Any] = {
    "id": "a",
    "full_tokens": 100,
    "full_answer": "**18.00**",
    "is_right": None,
    "probes": [{"num_tokens": 48, "answer": "18.", "confidence": 0.5}],
}


def test_trajectories_are_read(tmp_path: Path) -> None:
    path = tmp_path / "thoughts.jsonl"
    plain = {name: value for name, value in LINE.items() if name != "is_right"}
    path.write_text("\n\n".join(map(json.dumps, ({**LINE, "is_right": True}, plain))))
    first, second = read_trajectories(path)
    assert first == Trajectory("a", 100, "18", (Probe(48, "18", 0.5),), True)
    assert second == replace(first, is_right=None)


def test_thoughts_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "thoughts.jsonl"

    def refused(message: str, **fields: Any) -> None:
        path.write_text(f"{json.dumps(LINE)}\n{json.dumps({**LINE, **fields})}\n")
        with pytest.raises(RequestError, match=rf"thoughts\.jsonl:2: {message}"):
            read_trajectories(path)

    def refused_probes(message: str, *changes: dict[str, Any]) -> None:
        refused(message, probes=[{**LINE["probes"][0], **change} for change in changes])

    refused("expected the fields .*, got", text="")
    refused("id: expected a string, got 3", id=3)
    refused("full_tokens: expected an integer.*, got 0", full_tokens=0)
    refused("full_answer: expected a string, got None", full_answer=None)
    refused("is_right: expected true or false, got 1", is_right=1)
    refused("probes: expected a list of objects", probes=[48])
    refused_probes(r"probes\[0\]\.confidence: expected a number.*, got 1.5", {"confidence": 1.5})
    refused_probes(r"probes\[0\]\.confidence: expected a number.*got nan", {"confidence": math.nan})
    refused_probes(r"probes\[0\]\.num_tokens: expected an integer.*got 101", {"num_tokens": 101})
    refused_probes(r"probes\[1\]\.num_tokens: expected an integer.*, got 48", {}, {})
    refused_probes(r"probes\[0\]\.answer: expected a string, got None", {"answer": None})
    path.write_text("\n")
    with pytest.raises(RequestError, match="expected at least one trajectory, got none"):
        read_trajectories(path)
    with pytest.raises(RequestError, match="No such file"):
        read_trajectories(tmp_path / "none.jsonl")
