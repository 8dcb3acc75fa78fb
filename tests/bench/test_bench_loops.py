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
    (tmp_path / "test.jsonl").write_text(record * 16)
    done = run_bench(
        *("loops", "--model", tmp_path / "model", "--data", tmp_path, "--count", "16"),
        *("--beside", tmp_path / "model"),
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
    assert rows["gate 0.5, one loop kept"]["mean_loops"] <= 3
    beside = {row["mode"]: row for row in figures["beside"]}
    assert beside["Full()"]["mean_layers"] == 6
    assert "| `gate 0.6` | 0.0% |" in loops.table(figures)


def row(mode: str, exact_match: float, ms: float) -> dict[str, object]:
    timed = {"1": {"token_ms": ms, "speed_up": 1.0, "efficiency": None}}
    depth = {"mean_loops": 1.0, "mean_layers": 4.0}
    return {"mode": mode, "exact_match": exact_match, **depth, "timed": timed}


def test_modes_stand_beside_the_fastest_that_is_as_good() -> None:
    about = {"utterances": 1, "dtype": "float32", "threads": 1, "batches": [1]}
    about |= {"cpu": "a CPU", "cpu_capability": "avx2"}
    modes = [row("best", 0.99, 2.0), row("good", 0.9, 1.0)]
    beside = [row("slow", 0.9, 3.0), row("fast", 0.9, 1.5), row("poor", 0.5, 0.5)]
    made = loops.table({**about, "modes": modes, "beside": beside})
    assert "| `best` | 99.0% | 1.00 | 2.000 | 1.00x |  |  |" in made
    assert "| `good` | 90.0% | 1.00 | 1.000 | 1.00x |  | 1.50x |" in made
    assert "| `fast` | 90.0% | 4.00 | 1.500 |" in made
    assert "slow" not in made
    assert "eside" not in loops.table({**about, "modes": modes})
