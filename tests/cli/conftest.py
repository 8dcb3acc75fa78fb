"""Models for the command line, and files for it to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import LONG
from tiny_models import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("cli") / "tiny"))


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that generates for longer than any test waits."""
    directory = tmp_path_factory.mktemp("cli") / "endless"
    return str(write_model(directory, max_position_embeddings=4 * LONG))


@pytest.fixture
def lines(tmp_path: Path) -> Callable[[str, str], str]:
    """Writes a file of that name and returns its path."""

    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write
