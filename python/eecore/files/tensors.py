"""Safetensors files: names, shapes and tensors, with errors that name file and tensor.

The library checks header, offsets and sizes against the file before it returns anything; an
incomplete file, no file and another format are one error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from eecore.errors import EecoreError
from eecore.files.readable import regular_file, shown_path
from eecore.values import shown

MAX_MAPPED = 1 << 26
"""Bytes of tensors after which a file is opened again, which gives back the mapped memory of those
that are no longer used."""


class TensorFile:
    """An open safetensors file; a context manager.

    Args:
        error: the class of errors.
        missing: the class of the error for no file, if that is another one.
        what: the expected kind of file, for errors.

    Attributes:
        path: the file's path.
        metadata: the header's metadata.
        names: the tensors' names.
    """

    def __init__(
        self,
        path: Path,
        error: type[EecoreError],
        missing: type[EecoreError] | None = None,
        *,
        what: str | None = None,
    ) -> None:
        from safetensors import SafetensorError

        self.path = regular_file(path, error, missing, what or "a file")
        self._error = error
        self._library_error = SafetensorError
        try:
            self._open()
        except (SafetensorError, OSError) as caught:
            raise error(
                f"{shown_path(path)}: expected {what or 'a whole safetensors file'}, got "
                f"{path.stat().st_size} bytes: {caught}"
            ) from None
        self.metadata: Mapping[str, str] = self._file.metadata() or {}
        self.names = frozenset(self._file.keys())

    def _open(self) -> None:
        from safetensors import safe_open

        opened: Any = safe_open(str(self.path), framework="pt", device="cpu")
        self._file: Any = opened.__enter__()
        self._num_read = 0  # bytes of tensors since then

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, traceback)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header."""
        return tuple(self._slice(name).get_shape())

    def stored_dtype(self, name: str) -> str:
        """A tensor's dtype as the header names it: F32, BF16, I64, ..."""
        return str(self._slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        """The tensor as stored, on the CPU, in the file's mapped memory."""
        try:
            if self._num_read > MAX_MAPPED:
                self._file.__exit__(None, None, None)
                self._open()
            stored: Tensor = self._file.get_tensor(name)
        except (self._library_error, OSError, RuntimeError, TypeError, ValueError) as caught:
            raise self.wrong(name, "a tensor", str(caught)) from None
        self._num_read += stored.nbytes
        return stored

    def wrong(self, name: str, expected: str, got: str) -> EecoreError:
        """The error for a tensor."""
        return self._error(f"{self.path}: {shown_name(name)}: expected {expected}, got {got}")

    def _slice(self, name: str) -> Any:
        if name not in self.names:
            raise self.wrong(name, "a tensor", "none")
        try:
            return self._file.get_slice(name)
        except self._library_error as caught:
            raise self.wrong(name, "a tensor", str(caught)) from None


def shown_name(name: str) -> str:
    """A tensor's name as errors show it."""
    return name if name.isprintable() and len(name) <= 200 else shown(name)
