"""Libraries that training needs beyond inference, imported at their first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from eecore.errors import TrainingError


def library(name: str, extra: str = "lab") -> Any:
    """The module of that name; a TrainingError says which extra installs it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise TrainingError(
            f"training: expected the package {name.partition('.')[0]}, got: {error} "
            f"(pip install '.[{extra}]' in a clone of eecore)"
        ) from None


def tensorboard_writer() -> Any:
    """TensorBoard's class of writers; a TrainingError says what to install for it."""
    library("tensorboard", "tensorboard")
    return library("torch.utils.tensorboard", "tensorboard").SummaryWriter


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Switches off transformers' progress bars, which would break into a command's lines."""
    logging = library("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
