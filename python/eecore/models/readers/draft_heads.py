"""Draft heads of all kinds, by what their directories say of themselves."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eecore.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError
from eecore.hub import PICKLES, fetch_draft_head, name_of
from eecore.models.draft_head import DraftHead
from eecore.models.keyed_head import KeyedHead
from eecore.models.llama import LlamaModel
from eecore.models.network import Network
from eecore.models.readers.block_file import BLOCK_KINDS, load_block_head
from eecore.models.readers.config_fields import ConfigFields
from eecore.models.readers.eagle_file import load_eagle
from eecore.models.readers.head_file import CONFIG_NAME, load_head
from eecore.models.readers.mtp_file import MTP_ARCHITECTURES, load_mtp
from eecore.readable import is_file, kind_of, shown_path
from eecore.values import shown

__all__ = ["load_draft_head", "read_head_kind"]

Reader = Callable[[Path, ConfigFields, LlamaModel], KeyedHead]
READERS: dict[str, Reader] = {
    "eagle3": load_eagle,
    "dflash": load_block_head,
    "dspark": load_block_head,
    "mtp": load_mtp,
}
"""What reads the heads of a kind, by its ``speculators_model_type``."""
PUBLIC = "RedHatAI/*-speculator.eagle3, AngelSlim/*_eagle3, lmsys/SGLang-EAGLE3-*"
"""Repositories of heads in safetensors, for those who have a pickle."""


def load_draft_head(path: str | Path, network: Network) -> DraftHead | KeyedHead:
    """The draft head of a directory, or of a repository's, which is fetched.

    A directory with ``head.json`` is one that ``eecore train-exits`` made, one with ``config.json``
    a head as people publish them.

    Raises:
        ModelError: it is no head, not whole, or for another model, or cannot be fetched. Raised
            before its tensors are read.
    """
    if not isinstance(path, (str, Path)):
        raise ModelError(f"draft_head: expected a directory or a repository, got {shown(path)}")
    if not isinstance(network, LlamaModel):
        raise ModelError("draft_head: expected a model without an encoder for a head, got a T5")
    directory = fetch_draft_head(path)
    if is_file(directory / CONFIG_NAME):
        return load_head(directory, network)
    kind, fields = read_head_kind(directory)
    head = READERS[kind](directory, fields, network)
    _warn_of_another(head, network)
    return head


def read_head_kind(directory: Path) -> tuple[str, ConfigFields]:
    """The kind of a published head, of :data:`READERS`, and its ``config.json``.

    Raises:
        ModelError: it is no such head, of a kind that eecore does not read, or a pickle.
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
    """What a ``config.json`` is the head of."""
    names: tuple[str, ...] = fields.texts("architectures", ())
    kind: Any = fields.text("speculators_model_type", None)
    if kind is None and ("draft_vocab_size" in fields or "eagle_config" in fields):
        kind = "eagle3"
    if kind is None and any(name.endswith("Eagle3") for name in names):
        kind = "eagle3"
    if kind is None and names and names[0] in BLOCK_KINDS:
        kind = BLOCK_KINDS[names[0]].kind.lower()
    if kind is None and names and names[0] in MTP_ARCHITECTURES:
        kind = "mtp"
    if kind in READERS:
        return str(kind)
    if kind is None:
        raise fields.error(
            f"{fields.where}: expected that of a draft head ({', '.join(READERS)}), got one of "
            f"{shown(list(names))}"
        )
    raise UnsupportedModelError(
        f"{fields.where}: speculators_model_type: supported are {', '.join(READERS)}, got "
        f"{shown(kind)}"
    )


def _warn_of_another(head: KeyedHead, network: LlamaModel) -> None:
    """Warn where a head names another model than the one at hand."""
    source = network.source
    if not head.verifier or source is None:
        return
    name = name_of(source.directory)
    if head.verifier.split("/")[-1].lower() != name.split("/")[-1].lower():
        warnings.warn(
            f"{shown_path(head.path)}: expected a head for {name}, got one for {head.verifier}: "
            "few of its drafts may be accepted, the output is the same",
            stacklevel=4,
        )
