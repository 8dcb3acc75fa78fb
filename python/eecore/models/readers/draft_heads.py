"""Draft heads of all kinds, which the files in their directories tell apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from eecore.config import AnyModelConfig, ModelConfig
from eecore.errors import ModelError
from eecore.files.hub import fetch_draft_head
from eecore.files.readable import is_file
from eecore.models.draft_head import DraftHead
from eecore.models.llama import LlamaModel
from eecore.models.readers.head_file import CONFIG_NAME, load_head
from eecore.values import shown

PUBLISHED = "eecore.heads"
"""The package that reads the heads that others publish, imported when one is opened: a
:class:`PublishedHeads`."""


class FoundHead(Protocol):
    """A head before its tensors are read."""

    def load(self, network: LlamaModel) -> DraftHead:
        """The head."""


class PublishedHeads(Protocol):
    """Reads the heads that others publish."""

    def find(self, directory: Path, model: ModelConfig) -> FoundHead:
        """The head in a directory, checked against the config of a model."""


def find_draft_head(path: str | Path, config: AnyModelConfig) -> Callable[[LlamaModel], DraftHead]:
    """What loads the draft head in a directory, or in a repository, which is fetched.

    A directory with ``head.json`` was made by ``eecore train-exits``; one with ``config.json`` is a
    published head, whose settings are checked at once.

    Args:
        config: the config of the model, which need not be loaded.

    Raises:
        ModelError: there is no head, it is for another model, or it cannot be fetched; when it is
            loaded, it is not whole. Raised before its tensors are read.
    """
    if not isinstance(path, (str, Path)):
        raise ModelError(f"draft_head: expected a directory or a repository, got {shown(path)}")
    model = drafting_config(config)
    directory = fetch_draft_head(path)
    if is_file(directory / CONFIG_NAME):
        return partial(load_head, directory)
    return cast(PublishedHeads, import_module(PUBLISHED)).find(directory, model).load


def drafting_config(config: AnyModelConfig) -> ModelConfig:
    """The config of a model that a draft head may be for; a ModelError if it is of another."""
    if not isinstance(config, ModelConfig):
        raise ModelError("draft_head: expected a model without an encoder for a head, got a T5")
    if config.num_loops > 1:
        raise ModelError(
            "draft_head: expected a model without loops for a head, got one that runs its layers "
            f"{config.num_loops} times; SelfSpeculative drafts with its first loop"
        )
    return config
