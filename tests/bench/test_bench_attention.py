"""The benchmark of attention over keys from memory: what it calls and counts. No time is judged."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from bench.harness import turns
from bench.ops import attention as bench_attention
from eecore import ops


def test_a_layer_is_read_when_it_is_its_turn(monkeypatch) -> None:
    layers = bench_attention.Layers((4, 2, 64), torch.bfloat16, 2, 48, 3, in_all=100_000)
    assert layers.bytes == 2 * 2 * 48 * 2 * 64 * 2
    assert len(layers.caches) == 100_000 // layers.bytes
    called = []
    monkeypatch.setattr(ops, "paged_attention", lambda **call: called.append(call["k_cache"]))
    count = len(layers.caches)
    turns.in_turn_and_again(layers.seconds, count, 2)
    keys = [k for k, _ in layers.caches]
    expected = [*keys, *keys, *keys[:1] * turns.AGAIN]
    assert all(a is b for a, b in zip(called, expected, strict=True))


def test_figures_and_table(tmp_path: Path, capsys) -> None:
    file = tmp_path / "figures.json"
    few = ["--rounds", "1", "--bytes", "4096", "--queries", "1", "3", "--json", str(file)]
    bench_attention.main(few)
    rows = json.loads(file.read_text())["rows"]
    expected = len(bench_attention.MODELS) * 2 * len(bench_attention.LENGTHS) * 2
    assert len(rows) == expected
    assert all(row["seconds"] > 0.0 and row["memory"] > 0.0 for row in rows)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == expected + 2
