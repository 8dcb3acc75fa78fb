"""The benchmark of attention over long contexts: its calls and counts. No timing is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.ops import attention as bench_attention
from eecore import ops


def test_a_layer_is_read_when_it_is_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = bench_attention.Layers((4, 2, 64), "float8", 2, 48, 3, in_all=100_000)
    assert layers.bytes == 2 * 2 * 48 * 2 * 64
    assert len(layers.caches) == 100_000 // layers.bytes
    called = []
    monkeypatch.setattr(ops, "paged_attention", lambda **call: called.append(call["k_cache"]))
    layers.all_in_turn(layers.attend)
    assert all(a is b for a, (b, _) in zip(called, layers.caches, strict=True))


@pytest.mark.parametrize("num_queries", [1, 48])
def test_sdpa_computes_the_same(num_queries: int) -> None:
    layers = bench_attention.Layers((4, 2, 64), "float32", 2, 48, num_queries, in_all=1)
    layers.call["page_table"] = torch.arange(2 * 3, dtype=torch.int32).view(2, 3)
    torch.testing.assert_close(layers.sdpa(0), layers.attend(0), rtol=1e-4, atol=1e-5)


def test_figures_and_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_attention, "LENGTHS", ((2, 32),))
    file = tmp_path / "figures.json"
    few = ["--rounds", "1", "--bytes", "4096", "--queries", "1", "3", "--prompts", "32"]
    bench_attention.main([*few, "--json", str(file)])
    figures = json.loads(file.read_text())
    rows, shared = figures["rows"], figures["shared"]
    models = len(bench_attention.MODELS)
    assert len(rows) == models * (3 * 2 + 2)
    assert all(row["seconds"] > 0.0 and row["memory"] > 0.0 for row in rows)
    assert [row["num_queries"] for row in rows if row["sdpa"] is not None] == [
        1,
        32,
        1,
        32,
    ] * models
    assert [row["num_seqs"] for row in shared] == [2] * models
    assert all(row["own"] > 0.0 and row["shared"] > 0.0 for row in shared)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == len(rows) + len(shared) + 3 * 2
