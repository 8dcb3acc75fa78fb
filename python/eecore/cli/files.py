"""Files named on a command line: checked before anything heavy is loaded."""

from __future__ import annotations

from pathlib import Path

from eecore.cli.failures import UsageError

__all__ = ["beside", "check_parent"]


def check_parent(flag: str, path: Path | None) -> None:
    """Raise a usage error unless the file to be written has a directory to go to."""
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"{flag}: {path.absolute().parent}: expected a directory, got nothing")


def beside(out: Path, suffix: str) -> Path:
    """NAME.suffix for ``--out NAME``, which may have dots."""
    return out.with_name(f"{out.name}.{suffix}")
