"""The benchmark of heads: its rounds. No time is judged."""

from __future__ import annotations

from pathlib import Path

import pytest

import eecore
from bench.exits import heads as bench_heads
from eecore.models import load_draft_head
from tiny_models import random_prompts, write_model


@pytest.mark.parametrize("kind", bench_heads.HEADS[1:])
def test_a_round_of_noise_is_counted_as_a_token(kind: str, tmp_path: Path) -> None:
    model = eecore.load(
        write_model(tmp_path / "model"), device="cpu", exits=False, kv_cache_tokens=512
    )
    head = bench_heads.write_head(tmp_path / "head", kind, model)
    model.network.draft_head = load_draft_head(head, model.network)
    assert model.network.draft_head.kind == kind
    shares = bench_heads.measure(model, random_prompts(5, 3), 6, 1)
    assert set(shares) == {"drafted", "verified"}
    assert all(share > -1.0 for share in shares.values())
