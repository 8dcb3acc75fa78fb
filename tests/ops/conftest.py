"""Two threads, however many the machine has: what kernels hand out has somebody to take it."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)
