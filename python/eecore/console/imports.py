"""Imports of a command without garbage collections, which find nothing among new modules."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["kept"]


@contextmanager
def kept() -> Iterator[None]:
    """What is imported within stays, so that the garbage collector never looks at it.

    torch alone makes so many objects that collections take a fifth of its import.
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if was_enabled:
            gc.enable()
