"""Which draft head a model gets: the one that is named, the one beside it, or one that ships."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

from eecore.errors import ModelError
from eecore.models.draft_head import DraftHead, HeadSettings
from eecore.models.llama import LlamaModel
from eecore.models.network import Network, network_digest
from eecore.models.readers.head_file import CONFIG_NAME, HeadFile, read_head_settings
from eecore.readable import kind_of, path_of, shown_path
from eecore.values import shown

__all__ = ["find_head", "load_head", "pack_beside"]

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
        return load_head(exits, network)
    if not isinstance(network, LlamaModel):
        return None
    beside = pack_beside(path)
    if beside is not None:
        try:
            return load_head(beside, network)
        except ModelError as error:
            warnings.warn(f"{error}; it is not used", stacklevel=3)
            return None
    return _shipped(network)


def load_head(path: str | Path, network: LlamaModel) -> DraftHead:
    """The draft head of a pack's directory.

    Raises:
        ModelError: it is no pack, not whole, or of another model.
    """
    directory = path_of(path, ModelError)
    settings = read_head_settings(directory)
    config, place = network.config, shown_path(directory / CONFIG_NAME)
    for name in ("num_layers", "hidden_size", "vocab_size"):
        if getattr(settings, name) != getattr(config, name):
            raise ModelError(
                f"{place}: model.{name}: expected {getattr(config, name)}, as the model has it,"
                f" got {getattr(settings, name)}"
            )
    digest = network_digest(network)
    if settings.digest != digest:
        raise ModelError(
            f"{place}: model.digest: expected {digest}, the model's, got {settings.digest}: it "
            "was trained for another model"
        )
    if settings.attended:
        _check_attended(settings, network, place)
    file = HeadFile(directory, settings)
    return DraftHead(network, directory, settings, file.tensors, file.vocabulary)


def _check_attended(settings: HeadSettings, network: LlamaModel, place: str) -> None:
    """That the model has what a head attends to.

    Raises:
        ModelError: it has not.
    """
    config = network.config
    queries = config.num_q_heads // config.num_kv_heads * config.head_dim
    if settings.queries != queries:
        raise ModelError(
            f"{place}: attention.queries: expected {queries}, as the model's key heads have, got "
            f"{settings.queries}"
        )
    for layer, key_head in settings.attended:
        if key_head >= config.num_kv_heads:
            raise ModelError(
                f"{place}: attention.key_heads: expected 0..{config.num_kv_heads - 1}, got "
                f"{key_head}"
            )
        if config.layer_windows[layer]:
            raise ModelError(
                f"{place}: attention.layers: expected layers that attend to whole texts, got "
                f"{layer}, which sees {config.layer_windows[layer]} tokens"
            )


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
        if read_head_settings(file.parent).digest == digest:
            return load_head(file.parent, network)
    return None
