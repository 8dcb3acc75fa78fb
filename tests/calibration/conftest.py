"""A tiny model to calibrate."""

from __future__ import annotations

from pathlib import Path

import pytest

import eecore
from tiny_models import write_model


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("evaluated"))


@pytest.fixture(scope="session")
def model(directory: Path) -> eecore.Model:
    return eecore.load(directory, device="cpu", kv_cache_tokens=2048)
