"""Small models, each written and loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import eecore
from devices import load
from reference_decoding import ReferenceModel
from tiny_models import scale_layers, write_model


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Matrices this small are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers whose early exits rarely agree with the whole model."""
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_directory: Path) -> eecore.Model:
    return load(tiny_directory, kv_cache_tokens=2048)


@pytest.fixture(scope="session")
def reference(tiny_directory: Path) -> ReferenceModel:
    return ReferenceModel(tiny_directory)


@pytest.fixture(scope="session")
def agreeing_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers, of which the last three change little: drafts are often accepted."""
    directory = write_model(tmp_path_factory.mktemp("agreeing"), seed=3, num_hidden_layers=5)
    scale_layers(directory, {2: 0.2, 3: 0.1, 4: 0.2})
    return directory


@pytest.fixture(scope="session")
def agreeing(agreeing_directory: Path) -> eecore.Model:
    return load(agreeing_directory, kv_cache_tokens=2048)
