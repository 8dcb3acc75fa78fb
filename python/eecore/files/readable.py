"""Safe reading of other people's files: only regular files, and no more than a bounded size."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from eecore.errors import EecoreError
from eecore.values import shown

KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
CHUNK = 1 << 20
NOTHING = (errno.ENOENT, errno.ENOTDIR)
MEASURES_FOLDER = "measures"


def path_of(path: str | os.PathLike[str], error: type[EecoreError]) -> Path:
    """A user's path, with ``~`` expanded.

    Raises:
        EecoreError: of class ``error``: it is no path, or there is no such home.
    """
    try:
        return Path(path).expanduser()
    except (TypeError, RuntimeError, ValueError):
        raise error(f"path: expected that of a file or directory, got {shown(path)}") from None


def kind_of(path: Path) -> str:
    """The kind of what is at a path, links followed: "a file", "a directory", "nothing", ..., or
    why it cannot be known.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return "nothing" if error.errno in NOTHING else f"an error: {error.strerror}"
    except ValueError:  # a NUL, or letters that no file system has
        return "a name that no file can have"
    return KINDS.get(stat.S_IFMT(mode), "something else")


def contents_of(path: Path) -> str:
    """What is at a path, for the error that says what was expected: "a model" where a directory has
    a config.json of one, else what it is and where that belongs.
    """
    kind = kind_of(path)
    if kind == "a file":
        if is_file(path.parent / "head.json"):
            return f"a file of a draft head, {shown_path(path.parent)}"
        if is_file(path.parent / "config.json"):
            return f"a file of a model, {shown_path(path.parent)}"
    if kind != "a directory":
        return kind
    if is_file(path / "head.json"):
        return "a draft head (head.json), which --exits takes, with the model that it drafts for"
    if not is_file(path / "config.json"):
        return _without_config(path)
    return "a model"


def _without_config(directory: Path) -> str:
    """What a directory is that has no config.json."""
    names = sorted(file.name for file in directory.glob("*.gguf"))
    if names:
        return f"a directory of GGUF files: name one, such as {shown_path(directory / names[0])}"
    inner = next((file.parent for file in directory.glob("*/config.json")), None)
    hint = "" if inner is None else f"; {shown_path(inner)} has one"
    return f"a directory without config.json{hint}"


def is_file(path: Path) -> bool:
    """Whether there is a readable regular file."""
    return kind_of(path) == "a file"


def beside_model(directory: Path, name: str | Path) -> Path:
    """The place of a file that belongs to a model: in the folder ``measures`` of its directory if
    it is there, otherwise in the directory itself.

    Classifiers have the folder because other engines load every safetensors file in the directory
    itself as weights of the model.
    """
    within = directory / MEASURES_FOLDER / name
    return within if is_file(within) else directory / name


def regular_file(
    path: Path,
    error: type[EecoreError],
    missing: type[EecoreError] | None = None,
    what: str = "a file",
) -> Path:
    """The path of a regular file: no directory, pipe or device.

    Raises:
        EecoreError: of class ``missing``, where it is given, when nothing is there; otherwise of
            class ``error``.
    """
    kind = kind_of(path)
    if kind == "a file":
        return path
    raise (missing if missing and kind == "nothing" else error)(
        f"{shown_path(path)}: expected {what}, got {kind}"
    )


def shown_path(path: Path) -> str:
    """A path as errors show it: printable, and no longer than a file name can be."""
    text = str(path)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 4096 else f"{text[:100]}..."


def read_bytes(
    path: Path,
    most: int,
    error: type[EecoreError],
    missing: type[EecoreError] | None = None,
) -> bytes:
    """The content of a file of at most ``most`` bytes; errors as in :func:`regular_file`."""
    regular_file(path, error, missing)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(size + 1) if size <= most else b""
            while max(size, len(content)) <= most and (more := file.read(CHUNK)):
                content += more  # the file does not know its size
    except OSError as caught:
        raise error(f"{shown_path(path)}: {caught.strerror}") from None
    if (got := max(size, len(content))) > most:
        raise error(f"{shown_path(path)}: expected at most {most} bytes, got {got}")
    return content
