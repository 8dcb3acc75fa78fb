"""Thoughts replayed: what rules save and lose, and an oracle that knows settled answers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench.harness.results import Report
from bench.quality import think
from eecore.calibration.thoughts import Trajectory
from eecore.thought_stop import Probe


def thought(settles: int, count: int, full: str = "18") -> Trajectory:
    """A thought with probes every 48 tokens, whose answer is the last one from a probe on."""
    answers = [full if i >= settles else f"{i}" for i in range(count)]
    probes = tuple(Probe(48 * (i + 1), each, 0.9) for i, each in enumerate(answers))
    return Trajectory("q", 48 * (count + 1), full, probes)


def test_the_oracle_ends_where_the_answer_has_settled() -> None:
    assert think.settled(thought(2, 5))[:3] == (144, "18", 3)
    assert think.settled(thought(5, 5))[:3] == (288, "18", 5)
    assert think.settled(thought(0, 0))[:3] == (48, "18", 0)


def test_rules_are_calibrated_on_one_part_and_tested_on_the_other() -> None:
    chance = random.Random(0)
    thoughts = [thought(chance.randrange(3), 8) for _ in range(500)]
    replay = think.Replay(thoughts, 2)
    for calibrate, test in replay.splits:
        assert sorted(calibrate + test) == list(range(500))
        assert len(calibrate) == 250
    families = {family.name: family for family in think.families(thoughts)}
    # Three probes agree after two more than the one at which the answer has settled.
    row = replay.calibrated_row(families["at least 3 agreeing"], "different", 0.02)
    assert (row["lost"], row["held"], row["level"]) == (0.0, 1.0, 0.0)
    kept = [sum(think.settled(thoughts[i]).num_tokens + 96 for i in t) for _, t in replay.splits]
    assert row["saved"] == pytest.approx(1.0 - sum(kept) / (2 * 250 * 48 * 9))
    alone = replay.calibrated_row(families["agreement alone"], "different", 0.02)
    assert (alone["level"], alone["lost"]) == (2, 0.0)  # one probe is wrong in two of three
    one = replay.calibrated_row(families["at least 1 agreeing"], "different", 0.02)
    assert (one["level"], one["saved"]) == (0.91, alone["saved"])  # two need less confidence


def test_a_file_of_thoughts_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = {"num_tokens": 48, "answer": "18", "confidence": 0.9}
    line = {"id": "a", "full_tokens": 96, "full_answer": "18", "probes": [probe]}
    path = tmp_path / "thoughts.jsonl"
    path.write_text(f"{json.dumps(line)}\n" * 400)
    written = tmp_path / "figures.json"
    monkeypatch.setattr(think, "REPORTS", (Report("think", {"think": think.markdown}),))
    think.main(["--trajectories", str(path), "--splits", "2", "--json", str(written)])
    figures = json.loads(written.read_text())
    assert (figures["num_thoughts"], figures["calibrated"]) == (400, 200)
    rows = {(row["rule"], row["bound"]): row for row in figures["rows"]}
    assert rows["at least 1 agreeing", 0.02]["saved"] == 0.5
    assert rows["at least 2 agreeing", 0.02]["saved"] == 0.0
    assert rows["oracle", None]["saved"] == 0.5
    assert {row["loss"] for row in figures["rows"]} == {"different"}
    assert "| at least 1 agreeing | different | 2% | 50.0% |" in capsys.readouterr().out
