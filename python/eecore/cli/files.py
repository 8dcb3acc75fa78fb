"""Files named on a command line: checked and read before anything heavy is loaded."""

from __future__ import annotations

from pathlib import Path

from eecore.cli.failures import UsageError
from eecore.errors import RequestError

__all__ = ["check_parent", "read_text"]


def check_parent(flag: str, path: Path | None) -> None:
    """Raise a usage error unless the file to be written has a directory to go to."""
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"{flag}: {path.absolute().parent}: expected a directory, got nothing")


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, or a RequestError that says why not."""
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: expected UTF-8 text, got {error}") from None
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None
