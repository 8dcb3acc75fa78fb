"""A trained head as the starting point of another one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eecore.errors import TrainingError
from eecore.files.json_fields import JsonFields
from eecore.lab.training.draft_head import DraftHead, HeadSizes
from eecore.lab.training.head_keys import Attended
from eecore.models.readers.head_file import CONFIG_NAME, WEIGHTS_NAME, HeadFile, read_head_settings
from eecore.models.recurrent_head import head_floats


@dataclass(frozen=True, eq=False)
class TrainedHead:
    """The weights of a head, and the facts of its training in ``head.json``."""

    file: HeadFile
    training: dict[str, Any]
    sha256: str
    """The digest of the file of weights."""

    @property
    def vocabulary(self) -> Tensor:
        """int64 [vocabulary_size]"""
        return self.file.vocabulary

    @torch.no_grad()
    def put_into(self, head: DraftHead) -> None:
        """Copy the weights into a head of the same sizes; attention that only that head has
        stays.
        """
        for name, stored in head.tensor_names.items():
            if stored in self.file.tensors:
                head.get_parameter(name).copy_(head_floats(self.file.tensors[stored]))

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
    """The head in a directory, which must match the model, taps and sizes.

    It must also match the size of the vocabulary, where one is given, and attend to the same keys
    or to none.

    Raises:
        ModelError: there is no head, or it is incomplete.
        TrainingError: it does not match.
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
