"""Two threads on any machine, so that kernels share work."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)
