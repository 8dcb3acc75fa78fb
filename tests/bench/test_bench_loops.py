"""``python -m bench loops``: on a tiny looped model."""

from __future__ import annotations

import json
from pathlib import Path

from running import RunsBench

from bench.depth import loops
from looped_models import write_looped
from tiny_models import write_byte_tokenizer


def test_it_runs_on_a_tiny_model(run_bench: RunsBench, tmp_path: Path) -> None:
    write_looped(tmp_path / "model", vocab_size=260, eos_token_id=257)
    write_byte_tokenizer(tmp_path / "model")
    record = json.dumps({"input": "light on", "target": "x"}) + "\n"
    (tmp_path / "test.jsonl").write_text(record * 64)
    done = run_bench(
        *("loops", "--model", tmp_path / "model", "--data", tmp_path, "--count", "64"),
        *("--batches", "1", "2", "--rounds", "1", "--json", tmp_path / "loops.json"),
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "loops.json").read_text())
    rows = {row["mode"]: row for row in figures["modes"]}
    assert rows["Full()"]["mean_loops"] == 3
    assert rows["FixedExit(2)"]["mean_loops"] == 1
    assert 1 <= rows["gate 0.6"]["mean_loops"] <= 3
    assert rows["Full()"]["timed"]["2"]["efficiency"] is None
    assert rows["gate 0.6"]["timed"]["2"]["efficiency"] > 0
    assert "| `gate 0.6` | 0.0% |" in loops.table(figures)
