"""Checks of files named on a command line, before anything heavy is loaded."""

from __future__ import annotations

import os
from pathlib import Path

from eecore.console.failures import UsageError
from eecore.readable import kind_of, shown_path

__all__ = ["beside", "check_out"]


def check_out(flag: str, path: Path | None, *, is_stem: bool = False) -> None:
    """Raise a usage error unless a file can be written at a path.

    Args:
        flag: the option that names it.
        path: the file; None for none.
        is_stem: whether the path is the beginning of file names.
    """
    if path is None:
        return
    folder = path.absolute().parent
    kind = kind_of(folder)
    if kind != "a directory":
        raise UsageError(f"{flag}: {shown_path(folder)}: expected a directory, got {kind}")
    if not os.access(folder, os.W_OK) and not path.exists():
        raise UsageError(f"{flag}: {shown_path(folder)}: expected a directory to write to")
    kind = "a directory" if path.name in ("", "..") else kind_of(path)
    if kind == "a directory" and not (is_stem and path.name not in ("", "..")):
        raise UsageError(f"{flag}: {shown_path(path)}: expected a file, got a directory")


def beside(out: Path, suffix: str) -> Path:
    """NAME.suffix for ``--out NAME``, which may have dots."""
    return out.with_name(f"{out.name}.{suffix}")
