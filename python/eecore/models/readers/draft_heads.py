"""Draft heads of all kinds, which the files in their directories tell apart."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from eecore.config import AnyModelConfig, ModelConfig
from eecore.errors import ModelError
from eecore.files.hub import fetch_draft_head
from eecore.files.readable import is_file
from eecore.models.draft_head import DraftHead
from eecore.models.llama import LlamaModel
from eecore.models.network import Network
from eecore.models.readers.head_file import CONFIG_NAME, load_head
from eecore.values import shown

PUBLISHED = "eecore.heads"
"""The package that reads the heads that others publish, imported when one is opened: a
:class:`PublishedHeads`."""


class PublishedHeads(Protocol):
    """Reads the heads that others publish."""

    def read_settings(self, directory: Path, model: ModelConfig) -> object:
        """The settings of the head in a directory, checked against the config of a model."""

    def load(self, directory: Path, network: LlamaModel) -> DraftHead:
        """The head in a directory."""


def load_draft_head(path: str | Path, network: Network) -> DraftHead:
    """The draft head in a directory, or in a repository, which is fetched.

    A directory with ``head.json`` was made by ``eecore train-exits``; one with ``config.json`` is a
    published head.

    Raises:
        ModelError: there is no head, it is not whole or is for another model, or it cannot be
            fetched. Raised before its tensors are read.
    """
    check_draft_head(path, network.config)
    assert isinstance(network, LlamaModel)
    directory = fetch_draft_head(path)
    if is_file(directory / CONFIG_NAME):
        return load_head(directory, network)
    return _published().load(directory, network)


def check_draft_head(path: str | Path, config: AnyModelConfig) -> None:
    """Raise if a published head's ``config.json`` does not go with a model's config.

    Args:
        path: the head's directory, or its repository, which is fetched.
        config: the config of the model, which need not be loaded.

    Raises:
        ModelError: as for :func:`load_draft_head`.
    """
    if not isinstance(path, (str, Path)):
        raise ModelError(f"draft_head: expected a directory or a repository, got {shown(path)}")
    if not isinstance(config, ModelConfig):
        raise ModelError("draft_head: expected a model without an encoder for a head, got a T5")
    if config.num_loops > 1:
        raise ModelError(
            "draft_head: expected a model without loops for a head, got one that runs its layers "
            f"{config.num_loops} times; SelfSpeculative drafts with its first loop"
        )
    directory = fetch_draft_head(path)
    if not is_file(directory / CONFIG_NAME):
        _published().read_settings(directory, config)


def _published() -> PublishedHeads:
    return cast(PublishedHeads, import_module(PUBLISHED))
