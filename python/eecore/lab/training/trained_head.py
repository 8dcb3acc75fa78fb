"""A head that is there already, as what another one begins with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eecore.errors import TrainingError
from eecore.json_fields import JsonFields
from eecore.lab.training.draft_head import DraftHead, HeadSizes
from eecore.lab.training.head_keys import Attended
from eecore.models.readers.head_file import CONFIG_NAME, WEIGHTS_NAME, HeadFile, read_head_settings

__all__ = ["TrainedHead", "read_head"]


@dataclass(frozen=True, eq=False)
class TrainedHead:
    """The weights of a pack, and what its ``head.json`` says of its training."""

    file: HeadFile
    training: dict[str, Any]
    sha256: str
    """Of the file of weights."""

    @property
    def vocabulary(self) -> Tensor:
        """int64 [vocabulary_size]"""
        return self.file.vocabulary

    @torch.no_grad()
    def put_into(self, head: DraftHead) -> None:
        """Its weights into a head of the same sizes, but for attention that only that one has."""
        for name, stored in head.tensor_names.items():
            if stored in self.file.tensors:
                head.get_parameter(name).copy_(self.file.tensors[stored])

    @property
    def attends(self) -> bool:
        return bool(self.file.settings.attended)


def read_head(
    directory: Path,
    model: str,
    taps: tuple[int, ...],
    sizes: HeadSizes,
    vocabulary: int | None = None,
    attended: Attended = (),
) -> TrainedHead:
    """The head in a directory, which must be of this model, taps and sizes.

    And of this size of vocabulary, where one is given. It attends to the same keys, or to none.

    Raises:
        ModelError: there is none, or it is not whole.
        TrainingError: it is another.
    """
    settings = read_head_settings(directory)
    expected: dict[str, Any] = {
        "digest": model,
        "taps": list(taps),
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_blocks": sizes.num_blocks,
    }
    if vocabulary is not None:
        expected["vocabulary_size"] = vocabulary
    path = directory / CONFIG_NAME
    for name, value in expected.items():
        got = list(settings.taps) if name == "taps" else getattr(settings, name)
        if got != value:
            raise TrainingError(f"{path}: {name}: expected {value}, as this run has, got {got}")
    if settings.attended not in ((), attended):
        raise TrainingError(
            f"{path}: attention: expected the key heads {list(attended)}, as this run has, or none,"
            f" got {list(settings.attended)}"
        )
    training = JsonFields.read(path, TrainingError).inner("training")
    file = HeadFile(directory, settings)
    digest = hashlib.sha256((directory / WEIGHTS_NAME).read_bytes()).hexdigest()
    return TrainedHead(file, {} if training is None else training.values, digest)
