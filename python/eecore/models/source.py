"""Which model this is: what a guarantee, or a classifier made for it, holds on to."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from eecore.errors import ModelError
from eecore.json_fields import JsonFields
from eecore.models.gguf_file import part_files
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

    def exit_agreement(self, num_layers: int) -> tuple[float, ...] | None:
        """Of each exit layer with the last one, as the model's ``exits.json`` says; None without.

        A file that says anything else, or of a model with other layers, is passed over with a
        warning: nothing but speed hangs on it.
        """
        if not self.directory.is_dir():
            return None
        try:
            return _agreement(self.directory / "exits.json", num_layers)
        except ModelError as error:
            warnings.warn(f"{error}; it is not used", stacklevel=2)
            return None

    @cached_property
    def sha256(self) -> str:
        """Of the weight files, read when it is first asked for."""
        return model_digest(self.directory)


def _agreement(path: Path, num_layers: int) -> tuple[float, ...] | None:
    fields = JsonFields.read_if_there(path, ModelError)
    held_out = fields.inner("held_out")
    if held_out is None:
        return None
    fields.integer("num_layers", num_layers, num_layers)
    agreement: tuple[float, ...] = held_out.numbers("agreement", 0.0, 1.0)
    if len(agreement) != num_layers:
        raise held_out.wrong("agreement", f"{num_layers} numbers", list(agreement))
    return agreement


def model_digest(directory: Path) -> str:
    """The SHA-256 of a model directory's weight files, in the order of their names.

    For a GGUF file it is its own, that of all its parts where it is the first of several.
    """
    digest = hashlib.sha256()
    if directory.is_dir():
        files = sorted(directory.glob("model*.safetensors"))
    else:
        files = [directory, *(part for part in part_files(directory) if part.is_file())]
    for path in dict.fromkeys(files):
        with regular_file(path, ModelError).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
