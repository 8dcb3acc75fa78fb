"""The benchmark of products: which weights it reads and what it counts. No time is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.harness import turns
from bench.ops import products
from eecore import ops


def test_a_layer_is_read_when_it_is_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = products.Layers("Q4_0", in_all=4_000_000)
    count = len(layers.matrices)
    assert count == 4_000_000 // layers.bytes > 1
    layers.take_rows(3)
    called = []

    def remember(x: torch.Tensor, weight: torch.Tensor, **_: object) -> None:
        called.append((len(x), weight.data_ptr()))

    monkeypatch.setattr(ops, "skinny_linear", remember)
    turns.in_turn_and_again(layers.seconds, count, 2)
    every = [(3, matrix.weight.data_ptr()) for matrix in layers.matrices]
    assert called == [*every, *every, *every[:1] * turns.AGAIN]


@pytest.mark.parametrize("weights", [*ops.BLOCK_FORMATS, "bfloat16", "float32"])
def test_random_weights_give_finite_products(weights: str) -> None:
    matrix = products.random_weight(weights)
    dtype = torch.bfloat16 if weights == "bfloat16" else torch.float32
    x = torch.ones(1, products.FEATURES, dtype=dtype)
    out = ops.skinny_linear(x, matrix.weight, weight_table=matrix.table)
    assert out.isfinite().all()
    assert out.count_nonzero() > products.FEATURES // 2


def test_figures_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    few = ["--rounds", "1", "--bytes", "1", "--rows", "1", "3", "--weights", "Q8_0", "float32"]
    products.main([*few, "--json", str(file)])
    figures = json.loads(file.read_text())
    rows = figures["rows"]
    assert figures["memory"] > 0.0
    assert [(r["weights"], r["num_rows"]) for r in rows] == [
        ("Q8_0", 1),
        ("Q8_0", 3),
        ("float32", 1),
        ("float32", 3),
    ]
    assert all(row["seconds"] > 0.0 and row["again"] > 0.0 for row in rows)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 4 + 2
