"""Draft heads of all kinds, which the files in their directories tell apart."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from eecore.config import AnyModelConfig, ModelConfig
from eecore.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError
from eecore.files.hub import PICKLES, fetch_draft_head, name_of
from eecore.files.readable import is_file, kind_of, shown_path
from eecore.models.draft_head import DraftHead
from eecore.models.keyed_head import KeyedHead
from eecore.models.llama import LlamaModel
from eecore.models.network import Network
from eecore.models.readers.block_file import (
    BLOCK_KINDS,
    load_block_head,
    read_block_settings,
)
from eecore.models.readers.config_fields import ConfigFields
from eecore.models.readers.eagle_file import load_eagle, read_eagle_settings
from eecore.models.readers.head_file import CONFIG_NAME, load_head
from eecore.models.readers.mtp_file import MTP_ARCHITECTURES, load_mtp, read_mtp_settings
from eecore.values import shown


class PublishedSettings(Protocol):
    """The settings in a published head's ``config.json``."""

    @property
    def kind(self) -> str: ...
    @property
    def taps(self) -> tuple[int, ...]: ...
    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def verifier(self) -> str: ...


class PublishedKind(NamedTuple):
    """The functions that read heads of one kind."""

    settings: Callable[[ConfigFields, ModelConfig], PublishedSettings]
    """Reads ``config.json``, and checks it against the config of the model."""
    load: Callable[[Path, ConfigFields, LlamaModel], KeyedHead]
    """Reads the head in a directory."""


KINDS = {
    "eagle3": PublishedKind(read_eagle_settings, load_eagle),
    "dflash": PublishedKind(read_block_settings, load_block_head),
    "dspark": PublishedKind(read_block_settings, load_block_head),
    "mimo": PublishedKind(read_mtp_settings, load_mtp),
}
"""The kinds of published heads, by their ``speculators_model_type`` where they have one."""
UNREAD = {
    "PEagleDraftModel": "P-EAGLE",
    "peagle": "P-EAGLE",
    "DominoDraftModel": "Domino",
    "domino": "Domino",
}
"""Kinds of heads that are not read although their files look like those of other kinds, by
architecture, speculators_model_type or projector_type."""
PUBLIC = "RedHatAI/*-speculator.eagle3, AngelSlim/*_eagle3, lmsys/SGLang-EAGLE3-*"
"""Repositories of heads in safetensors, which an error about a pickle recommends."""


def load_draft_head(path: str | Path, network: Network) -> DraftHead | KeyedHead:
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
    kind, fields = read_head_kind(directory)
    head = KINDS[kind].load(directory, fields, network)
    _warn_of_another(head, network)
    return head


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
        kind, fields = read_head_kind(directory)
        KINDS[kind].settings(fields, config)


def published_facts(directory: Path, config: AnyModelConfig) -> dict[str, Any]:
    """Facts about a published head for a model: kind, taps, tokens, bytes, verifier.

    Raises:
        ModelError: as for :func:`load_draft_head`.
    """
    check_draft_head(directory, config)
    assert isinstance(config, ModelConfig)
    kind, fields = read_head_kind(directory)
    settings = KINDS[kind].settings(fields, config)
    files = directory.glob("*.safetensors")
    return {
        "path": str(directory),
        "kind": settings.kind,
        "taps": list(settings.taps),
        "vocabulary_size": settings.draft_vocab_size,
        "bytes_on_disk": sum(file.stat().st_size for file in files),
        "verifier": settings.verifier or None,
    }


def read_head_kind(directory: Path) -> tuple[str, ConfigFields]:
    """The kind of a published head, one of :data:`KINDS`, and its ``config.json``.

    Raises:
        ModelError: there is no such head, eecore does not read its kind, or it is a pickle.
    """
    if (found := kind_of(directory)) != "a directory":
        raise ModelNotFoundError(
            f"{shown_path(directory)}: expected the directory of a draft head (head.json, or "
            f"config.json and safetensors), got {found}"
        )
    fields = ConfigFields.read(directory / "config.json", CheckpointError, ModelNotFoundError)
    kind = _kind(fields)
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLES)
    if pickles and not list(directory.glob("*.safetensors")):
        raise ModelError(
            f"{shown_path(directory)}: expected model.safetensors, got {pickles[0]}, a pickle, "
            f"which eecore does not open: heads in safetensors are {PUBLIC}"
        )
    return kind, fields


def _kind(fields: ConfigFields) -> str:
    """The kind of head that a ``config.json`` describes."""
    names: tuple[str, ...] = fields.texts("architectures", ())
    kind: Any = fields.text("speculators_model_type", None)
    block = fields.inner("dflash_config")
    projector = "" if block is None else block.text("projector_type", "")
    for name in (kind, projector, *names):
        if name in UNREAD:
            raise UnsupportedModelError(
                f"{fields.where}: supported draft heads are EAGLE-3, DFlash, DSpark, MiMo's MTP "
                f"layers and those that eecore train-exits made, got {UNREAD[name]}"
            )
    if kind is None and ("draft_vocab_size" in fields or "eagle_config" in fields):
        kind = "eagle3"
    if kind is None and any(name.endswith("Eagle3") for name in names):
        kind = "eagle3"
    if kind is None and names and names[0] in BLOCK_KINDS:
        kind = BLOCK_KINDS[names[0]].kind.lower()
    if kind is None and names and names[0] in MTP_ARCHITECTURES:
        kind = "mimo"
    if kind in KINDS:
        return str(kind)
    if kind is None:
        raise fields.error(
            f"{fields.where}: expected the config of a draft head ({', '.join(KINDS)}), got one of "
            f"{shown(list(names))}"
        )
    raise UnsupportedModelError(
        f"{fields.where}: speculators_model_type: supported are {', '.join(KINDS)}, got "
        f"{shown(kind)}"
    )


def names_another(verifier: str | None, path: Path) -> bool:
    """Whether the model that a head names is not the model at a path."""
    if not verifier:
        return False
    return verifier.split("/")[-1].lower() != name_of(path).split("/")[-1].lower()


def _warn_of_another(head: KeyedHead, network: LlamaModel) -> None:
    """Warn if a head names another model than ``network``."""
    source = network.source
    if source is not None and names_another(head.verifier, source.directory):
        warnings.warn(
            f"{shown_path(head.path)}: expected a head for {name_of(source.directory)}, got one "
            f"for {head.verifier}: few of its drafts may be accepted, the output is the same",
            stacklevel=4,
        )
