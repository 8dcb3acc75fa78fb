"""What training needs beyond inference, imported when first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from eecore.errors import TrainingError

__all__ = ["library"]


def library(name: str) -> Any:
    """The module of that name; a TrainingError says which extra has it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise TrainingError(
            f"training: expected the package {name.partition('.')[0]}, got: {error} "
            "(pip install 'eecore[train]')"
        ) from None
