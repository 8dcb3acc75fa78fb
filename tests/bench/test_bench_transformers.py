"""The benchmark inside transformers: its groups, its check. No timing is judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import eecore
from bench.integrations import transformers as bench_transformers

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(eecore.default_model(), dtype=torch.float32)


@pytest.mark.parametrize("batch", [1, 2])
def test_all_modes_are_measured(
    model: PreTrainedModel, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_transformers, "LONGEST_PARSE", 6)
    groups = bench_transformers.groups_of(PROMPTS, batch, 2)
    rows = bench_transformers.measure(model, groups, batch, 1, 2)
    assert [row["mode"] for row in rows] == list(bench_transformers.modes(batch))
    assert rows[0]["speedup"] == 1.0
    assert all(row["tokens_per_s"] > 0.0 for row in rows)


def test_groups_are_padded_on_the_left() -> None:
    first, second = bench_transformers.groups_of(PROMPTS, 2, 0)
    assert first["input_ids"].tolist() == [[5, 6, 7], [0, 8, 9]]
    assert first["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    assert second["input_ids"].shape == (1, 4)


def test_other_tokens_than_transformers_end_the_run(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    early: dict[str, Any] = {"custom_generate": eecore.generate_for_transformers, "exit": "fixed:1"}
    monkeypatch.setattr(bench_transformers, "modes", lambda _: {"transformers": {}, "b": early})
    monkeypatch.setattr(bench_transformers, "LONGEST_PARSE", 6)
    groups = bench_transformers.groups_of(PROMPTS[:1], 1, 2)
    with pytest.raises(SystemExit, match="b: expected the tokens of transformers"):
        bench_transformers.measure(model, groups, 1, 1, 2)
