"""The work of a server before its first request."""

from __future__ import annotations

from pathlib import Path

import pytest

import eecore
from eecore.serving.warm_up import warm_up
from servers import asker, assert_idle
from tiny_models import write_model
from workloads import until

BODIES = [
    {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 8},
    {"prompt": "Once upon a time", "max_tokens": 8},
]


@pytest.fixture
def fresh(tmp_path: Path) -> eecore.Model:
    """A model whose engine has done nothing yet."""
    return eecore.load(write_model(tmp_path / "fresh"), kv_cache_tokens=2048)


def test_later_requests_record_nothing(fresh: eecore.Model) -> None:
    server = asker(fresh)
    engine = fresh.shared_engine().engine
    warm_up(server.service.served)
    assert_idle(server.service)
    recorded = len(engine.captures)
    assert recorded > 0
    assert engine.knows_full_depth(1)
    assert until(lambda: engine.num_cached_pages == 0)
    for path, body in zip(("/v1/chat/completions", "/v1/completions"), BODIES, strict=True):
        assert server.post(path, {**body, "exit": "full"}).status_code == 200
    assert len(engine.captures) == recorded
    answer = server.post("/v1/chat/completions", BODIES[0]).json()
    assert answer["usage"]["eecore"]["full_depth_tokens_per_s"] > 0


def test_it_ends_when_its_time_is_up(fresh: eecore.Model) -> None:
    server = asker(fresh)
    warm_up(server.service.served, 0.0)
    assert_idle(server.service)
    assert server.post("/v1/completions", BODIES[1]).status_code == 200


def test_a_model_without_a_tokenizer_is_warmed_by_tokens(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    model = eecore.load(directory, kv_cache_tokens=2048)
    warm_up(asker(model).service.served)
    assert model.shared_engine().engine.captures
