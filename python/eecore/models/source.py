"""Which model this is: what a guarantee, or a classifier made for it, holds on to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from eecore.errors import ModelError
from eecore.readable import regular_file

__all__ = ["ModelSource", "model_digest"]


@dataclass(frozen=True)
class ModelSource:
    """A model directory or GGUF file, and the numbers that it is run in."""

    directory: Path
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``"""
    weights: str | None
    """``int8``, ``int4``, or None for those of the dtype, or of a model that is quantised."""

    @cached_property
    def sha256(self) -> str:
        """Of the weight files, read when it is first asked for."""
        return model_digest(self.directory)


def model_digest(directory: Path) -> str:
    """The SHA-256 of a model directory's weight files, in the order of their names.

    Of a GGUF file its own.
    """
    digest = hashlib.sha256()
    files = directory.glob("model*.safetensors") if directory.is_dir() else [directory]
    for path in sorted(files):
        with regular_file(path, ModelError).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
