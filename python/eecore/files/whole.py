"""Files that are written whole or not at all: into a temporary file, which is then renamed.

When writing ends early, by a full disk or Ctrl-C, the old file stays, and nothing else. The new
content reaches the disk before the rename (fsync), so that a machine that loses power has the old
file or the new one; which of the two is not promised.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Files here cannot be replaced: they are given the bytes.
DEVICES = ("/dev/", "/proc/")


def write_text(path: str | Path, text: str) -> None:
    """Replace a file by UTF-8 text; a character that UTF-8 cannot express becomes ``\\udc80``."""
    with replacing(path) as partial:
        partial.write_bytes(text.encode("utf-8", "backslashreplace"))


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path to write to, with the suffix of ``path``; at the end it replaces ``path``.

    An existing file's mode is kept, and links are followed. Devices and pipes get the bytes at the
    end, and stay what they are: a library that writes files may rename, too.

    Raises:
        OSError: the message names ``path``, which is unchanged.
    """
    if _is_device(path):
        with _given_to_device(path) as partial:
            yield partial
        return
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    target = Path(os.path.realpath(path))
    partial = _beside(target, target.suffix)
    try:
        with _named(path, partial):
            mode = _create(partial, target)
            yield partial
            _flush(partial)
            if mode is not None:
                partial.chmod(mode)
            os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def appearing(directory: str | Path) -> Iterator[Path]:
    """A directory to fill; at the end it replaces ``directory``, which is new or empty.

    Missing parent folders are made, and removed again on failure.

    Raises:
        OSError: the message names ``directory``, which is unchanged.
    """
    target = Path(os.path.realpath(directory))
    partial = _beside(target, "")
    missing: list[Path] = []
    try:
        with _named(directory, partial):
            missing += [each for each in target.parents if not each.exists()]
            if missing:
                target.parent.mkdir(parents=True, exist_ok=True)
            partial.mkdir()
            yield partial
            for path in partial.rglob("*"):
                if path.is_file():
                    _flush(path)
            if target.exists():
                partial.chmod(stat.S_IMODE(target.stat().st_mode))
            os.replace(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in missing:  # the deepest first
            with suppress(OSError):  # something is there, or it was never made
                folder.rmdir()
        raise


@contextmanager
def filling(directory: Path) -> Iterator[Path]:
    """A folder in ``directory``; at the end its files are moved into that, one by one.

    Raises:
        OSError: the message names ``directory``; its files are unchanged unless moving has begun.
    """
    partial = _beside(directory / "files", "")
    try:
        with _named(directory, partial):
            partial.mkdir()
            yield partial
            whole = sorted(path for path in partial.rglob("*") if path.is_file())
            for path in whole:
                _flush(path)
            for path in whole:
                place = directory / path.relative_to(partial)
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _given_to_device(path: str | Path) -> Iterator[Path]:
    """A file whose bytes a device or a pipe gets at the end."""
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    with tempfile.TemporaryDirectory() as folder:
        partial = Path(folder) / f"written{Path(path).suffix[-16:]}"
        partial.touch()
        with _named(path, partial):
            yield partial
            with partial.open("rb") as file, open(path, "wb") as device:
                shutil.copyfileobj(file, device)


def _is_device(path: str | Path) -> bool:
    if os.path.abspath(path).startswith(DEVICES):
        return True
    try:
        return not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path)
    except OSError:  # there is no file yet
        return False


def _beside(target: Path, suffix: str) -> Path:
    """An unused, hidden name; short, since the target's may be as long as names can be."""
    return target.with_name(f".{secrets.token_hex(8)}{suffix[-16:]}")


def _create(partial: Path, target: Path) -> int | None:
    """Create an empty file with the mode of the file that it will replace, if there is one."""
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    return stat.S_IMODE(target.stat().st_mode) if target.exists() else None


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _named(path: str | Path, partial: Path) -> Iterator[None]:
    """OSErrors that name the path asked for, where they would name the temporary file."""
    try:
        yield
    except OSError as error:
        ours = error.filename is None or str(error.filename).startswith(str(partial))
        if not ours or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
