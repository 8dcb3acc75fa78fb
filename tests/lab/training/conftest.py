"""Tiny transformers models, and data to train them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tiny_training
from eecore.lab.training import TokenData

MakeModel = Callable[..., Any]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    """Random transformers models by family, four layers of width 16; the same seed, the same."""
    return tiny_training.make_model


@pytest.fixture(scope="session")
def pairs() -> TokenData:
    """Forty pairs of tokens 3..39: the target is the input backwards, then token 2."""
    return tiny_training.make_pairs()
