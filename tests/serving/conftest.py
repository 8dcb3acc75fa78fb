"""Servers of small models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import eecore
from servers import LONG, Asker, asker
from tiny_models import write_model


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def intent() -> eecore.Model:
    return eecore.load(dtype="float32", kv_cache_tokens=4096)


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    """A model that generates for longer than any test waits."""
    directory = tmp_path_factory.mktemp("serving") / "endless"
    write_model(directory, max_position_embeddings=2 * LONG)
    return eecore.load(directory, kv_cache_tokens=2 * LONG)


@pytest.fixture(scope="session")
def server(intent: eecore.Model) -> Asker:
    return asker(intent)
