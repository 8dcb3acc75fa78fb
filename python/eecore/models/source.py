"""Which model this is: the identity that a calibration or a classifier is bound to."""

from __future__ import annotations

import hashlib
import re
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from eecore.errors import ModelError
from eecore.files.json_fields import JsonFields
from eecore.files.readable import regular_file

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""The name of a part: the model's name, the part's number from 1 on, and the number of parts."""
SAMPLE, STRIDE = 1 << 14, 1 << 20
"""A fingerprint is of the first bytes, so many, of each stride of a file."""


@dataclass(frozen=True)
class ModelSource:
    """A model directory or GGUF file, and the number formats that it runs in."""

    directory: Path
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``"""
    weights: str | None
    """``int8`` or ``int4``; None: weights in the dtype, or in a quantised model's own bits."""
    fingerprint: str | None = field(default=None, kw_only=True)
    """:func:`fingerprint_of` the files as they were loaded."""

    def exit_agreement(self, exit_layers: range) -> tuple[float, ...] | None:
        """The agreement of each exit layer with the last layer, from :func:`exits_file`; None if
        there is no such file.

        A file that is wrong, or for a model with other layers, is not used, with a warning: only
        speed depends on it.
        """
        try:
            return _agreement(exits_file(self.directory), exit_layers)
        except ModelError as error:
            warnings.warn(f"{error}; it is not used", stacklevel=2)
            return None

    @cached_property
    def is_trained_to_exit(self) -> bool:
        """Whether :func:`exits_file` says that ``eecore train`` trained all exits; read at the
        first use."""
        try:
            fields = JsonFields.read_if_there(exits_file(self.directory), ModelError)
            training = fields.inner("training")
            loss = None if training is None else training.inner("loss")
            return loss is not None and loss.text("kind", "") != "last"
        except ModelError:
            return False

    @cached_property
    def sha256(self) -> str:
        """The digest of the weight files, which are read at the first use."""
        return model_digest(self.directory)


def exits_file(path: Path) -> Path:
    """The file about a model's exits: ``exits.json`` in its directory, ``NAME.exits.json`` next to
    a file ``NAME.gguf``.
    """
    return path / "exits.json" if path.is_dir() else path.with_suffix(".exits.json")


def _agreement(path: Path, exit_layers: range) -> tuple[float, ...] | None:
    """The agreement that ``eecore sweep --write`` measured, else the one measured in training."""
    fields = JsonFields.read_if_there(path, ModelError)
    measured = fields.inner("sweep") or fields.inner("held_out")
    if measured is None:
        return None
    fields.integer("num_layers", exit_layers[-1], exit_layers[-1])
    agreement: tuple[float, ...] = measured.numbers("agreement", 0.0, 1.0)
    if len(agreement) != len(exit_layers):
        raise measured.wrong("agreement", f"{len(exit_layers)} numbers", list(agreement))
    return agreement


def model_digest(directory: Path) -> str:
    """The SHA-256 of a model directory's weight files, in the order of their names.

    For a GGUF file, the SHA-256 of that file, or of all parts if it is the first of several.
    """
    digest = hashlib.sha256()
    for path in weight_files(directory):
        with regular_file(path, ModelError).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def fingerprint_of(directory: Path) -> str:
    """A digest of the files that a text depends on, by samples of them: 12 hexadecimal digits,
    without reading all weights.
    """
    digest = hashlib.sha256()
    settings = [directory / name for name in ("config.json", "tokenizer.json")]
    for path in [*filter(Path.is_file, settings), *weight_files(directory)]:
        with regular_file(path, ModelError).open("rb") as file:
            size = file.seek(0, 2)
            digest.update(f" {size} ".encode())
            for start in range(0, size, STRIDE):
                file.seek(start)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:12]


def weight_files(path: Path) -> list[Path]:
    """The weight files of a model directory by name, or a GGUF file with its other parts."""
    if path.is_dir():
        return sorted(path.glob("model*.safetensors"))
    return list(dict.fromkeys([path, *(part for part in part_files(path) if part.is_file())]))


def part_files(path: Path) -> list[Path]:
    """All parts of the model that a file is a part of, in order; the file alone if its name is not
    a part's."""
    match = PART.fullmatch(path.name)
    if match is None or int(match[3]) == 0:
        return [path]
    count = int(match[3])
    return [path.with_name(f"{match[1]}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
