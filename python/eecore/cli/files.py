"""Files named on a command line: checks before anything heavy is loaded, and files of a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from eecore.cli.failures import UsageError
from eecore.errors import ExitError
from eecore.files.readable import beside_model, is_file, kind_of, shown_path
from eecore.values import shown

if TYPE_CHECKING:
    from eecore.exits import ExitClassifier


def check_out(flag: str, path: Path | None, *, is_stem: bool = False) -> None:
    """Raise a usage error unless a file can be written at a path.

    Args:
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


def in_model(path: Path, directory: Path | None) -> Path:
    """The path of a file, which may be given by its name in the model's directory."""
    if directory is None or kind_of(path) != "nothing":
        return path
    found = beside_model(directory, path)
    return found if is_file(found) else path


def load_classifier(path: Path, directory: Path | None) -> ExitClassifier:
    """The classifier in a file named on the command line.

    Raises:
        ExitError: it cannot be read, or names another model than the directory's.
    """
    from eecore import exits

    path = in_model(path, directory)
    loaded = exits.ExitClassifier.load(path)
    if directory is not None:
        _check_made_for(path, directory)
    return loaded


def _check_made_for(classifier: Path, directory: Path) -> None:
    """Raise an ExitError where a classifier names another model."""
    from eecore.files.tensors import TensorFile
    from eecore.models import model_digest

    with TensorFile(classifier, ExitError) as file:
        made_for = file.metadata.get("model_sha256")
    if made_for is not None and made_for != (digest := model_digest(directory)):
        raise ExitError(
            f"{classifier}: made for another model: expected model_sha256 {digest[:12]}, that of "
            f"{directory}, got {shown(made_for[:12])}"
        )
