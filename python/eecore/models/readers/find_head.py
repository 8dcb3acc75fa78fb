"""Which draft head a model gets: the one that is named, the one beside it, or one that ships."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

from eecore.errors import ModelError
from eecore.models.draft_head import DraftHead
from eecore.models.llama import LlamaModel
from eecore.models.network import Network
from eecore.models.network_digest import network_digest
from eecore.models.readers.head_file import CONFIG_NAME, HeadSettings
from eecore.readable import kind_of
from eecore.values import shown

__all__ = ["find_head", "pack_beside"]

SHIPPED = Path(__file__).resolve().parents[2] / "data" / "heads"


def find_head(
    network: Network, path: Path, exits: str | Path | Literal[False] | None
) -> DraftHead | None:
    """The draft head for a model, if there is one.

    Args:
        network: the model.
        path: of its directory or file.
        exits: a pack's directory; None: ``exits`` in the model's directory, ``NAME.exits`` beside a
            file ``NAME.gguf``, or a pack that ships with eecore for this model; False: none.

    Raises:
        ModelError: the pack that is named is none, or one of another model. One that is found is
            passed over then, with a warning: nothing but speed hangs on it.
    """
    if exits is False:
        return None
    if exits is not None:
        if not isinstance(exits, (str, Path)):
            raise ModelError(f"exits: expected a pack's directory or False, got {shown(exits)}")
        if not isinstance(network, LlamaModel):
            raise ModelError("exits: expected a model without an encoder for a pack, got a T5")
        return DraftHead.load(exits, network)
    if not isinstance(network, LlamaModel):
        return None
    beside = pack_beside(path)
    if beside is not None:
        try:
            return DraftHead.load(beside, network)
        except ModelError as error:
            warnings.warn(f"{error}; it is not used", stacklevel=3)
            return None
    return _shipped(network)


def pack_beside(path: Path) -> Path | None:
    """The pack's directory beside a model's directory or file, where there is one."""
    beside = path / "exits" if path.is_dir() else path.with_suffix(".exits")
    return beside if kind_of(beside / CONFIG_NAME) == "a file" else None


def _shipped(network: LlamaModel) -> DraftHead | None:
    """The first of those that ship which is for this model."""
    packs = sorted(SHIPPED.glob(f"*/{CONFIG_NAME}"))
    if not packs:
        return None
    digest = network_digest(network)
    for file in packs:
        if HeadSettings.read(file.parent).digest == digest:
            return DraftHead.load(file.parent, network)
    return None
