"""Draft heads in files, ``head.json`` and ``head.safetensors``, and the choice of a model's head.

A model gets the head that is named, else the head in its directory, else one shipped with eecore.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from eecore.config import ModelConfig
from eecore.errors import ModelError
from eecore.files.hub import fetch_head
from eecore.files.json_fields import JsonFields
from eecore.files.readable import kind_of, shown_path
from eecore.files.tensors import TensorFile
from eecore.models.llama import NORM, NORM_NAMES, LlamaModel, NormNames
from eecore.models.network import Network, network_digest, norms_digest
from eecore.models.readers.checkpoint import StoredTensors
from eecore.models.recurrent_head import HeadSettings, RecurrentHead
from eecore.values import shown

SHIPPED = Path(__file__).resolve().parents[2] / "data" / "heads"
CONFIG_NAME, WEIGHTS_NAME = "head.json", "head.safetensors"
VERSION = 1
"""The version of a head without attention."""
ATTENDING_VERSION = 2
"""The version of a head that attends to keys of the model."""
KIND = "state and token"
MAX_BLOCKS = 16
MAX_WIDTH = 1 << 20
MAX_ATTENDED = 64
COLUMNS = 32
"""Numbers in a block of 4 bits (``Q4_1``)."""
BLOCK_BYTES = 20
"""Bytes of a block of 4 bits (``Q4_1``)."""


def read_head_settings(path: Path) -> HeadSettings:
    """The settings in the ``head.json`` of a pack's directory.

    Raises:
        ModelError: there is no such file, or it is wrong.
    """
    fields = JsonFields.read(path / CONFIG_NAME, ModelError)
    version = fields.integer("version", VERSION, ATTENDING_VERSION)
    fields.text("kind", one_of=(KIND,))
    model, agreement = _inner(fields, "model"), _inner(fields, "agreement")
    num_layers = model.integer("num_layers", 1)
    taps = fields.integers("taps", 1, num_layers)
    if not taps or taps[-1] != num_layers or list(taps) != sorted(set(taps)):
        raise fields.wrong("taps", f"ascending layers, the last one {num_layers}", list(taps))
    attended: tuple[tuple[int, int], ...] = ()
    queries = 0
    if version == ATTENDING_VERSION:
        attended, queries = _attended(fields, num_layers)
    return HeadSettings(
        digest=model.text("digest"),
        num_layers=num_layers,
        hidden_size=model.integer("hidden_size", 1),
        vocab_size=model.integer("vocab_size", 2),
        weights=fields.text("weights", "?"),
        taps=taps,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        num_blocks=fields.integer("num_blocks", 1, MAX_BLOCKS),
        vocabulary_size=fields.integer("vocabulary_size", 2, model.integer("vocab_size", 2)),
        agreement=agreement.numbers("by_position", 0.0, 1.0),
        attended=attended,
        queries=queries,
    )


def _attended(fields: JsonFields, num_layers: int) -> tuple[tuple[tuple[int, int], ...], int]:
    """The (layer, key head) pairs that a head attends to, and the width of its queries."""
    inner = _inner(fields, "attention")
    layers, heads = inner.integers("layers", 0, num_layers - 1), inner.integers("key_heads", 0)
    if not layers or len(layers) != len(heads) or len(layers) > MAX_ATTENDED:
        raise inner.wrong("layers", f"1..{MAX_ATTENDED}, as many as key_heads", list(layers))
    return tuple(zip(layers, heads, strict=True)), inner.integer("queries", 1, MAX_WIDTH)


def _inner(fields: JsonFields, name: str) -> JsonFields:
    inner = fields.inner(name)
    if inner is None:
        raise fields.wrong(name, "an object", None)
    return inner


class HeadFile:
    """The tensors of a pack, with shapes checked against ``head.json``.

    Matrices are stored as floats, or as uint8 in blocks of 4 bits.

    Raises:
        ModelError: a tensor is missing, truncated or not finite, or has another shape.
    """

    def __init__(self, path: Path, settings: HeadSettings) -> None:
        self.path, self.settings = path, settings
        hidden, inner = settings.hidden_size, settings.intermediate_size
        taps, blocks = len(settings.taps), settings.num_blocks
        shapes = {
            "taps.norm": (taps, hidden),
            "taps.weight": (taps, hidden, hidden),
            "state.norm": (hidden,),
            "state.weight": (hidden, hidden),
            "token.norm": (hidden,),
            "token.weight": (hidden, hidden),
            "mlp.norm": (blocks, hidden),
            "mlp.gate": (blocks, inner, hidden),
            "mlp.up": (blocks, inner, hidden),
            "mlp.down": (blocks, hidden, inner),
            "norm": (hidden,),
        }
        if settings.attended:
            count, queries = len(settings.attended), settings.queries
            shapes |= {
                "attention.norm": (hidden,),
                "attention.query": (count, queries, hidden),
                "attention.output": (count, hidden, queries),
            }
        with TensorFile(path / WEIGHTS_NAME, ModelError) as file:
            for name, shape in shapes.items():
                stored = file.stored_dtype(name)
                if stored == "U8" and not name.endswith("norm") and shape[-1] % COLUMNS == 0:
                    shape = (*shape[:-1], shape[-1] // COLUMNS * BLOCK_BYTES)
                elif stored not in ("F32", "BF16", "F16"):
                    raise file.wrong(name, "a tensor of floats or blocks", stored)
                _check_shape(file, name, shape)
            if file.stored_dtype("vocabulary") not in ("I32", "I64"):
                raise file.wrong("vocabulary", "whole numbers", file.stored_dtype("vocabulary"))
            _check_shape(file, "vocabulary", (settings.vocabulary_size,))
            self.tensors = {name: _as_used(file.tensor(name)) for name in shapes}
            """Tensors by name: floats in float32, blocks as stored."""
            self.vocabulary = file.tensor("vocabulary").long()
            for name, tensor in self.tensors.items():
                if not _scales(tensor).isfinite().all():
                    raise file.wrong(name, "finite numbers", "NaN or infinity among them")
            lowest, highest = int(self.vocabulary.min()), int(self.vocabulary.max())
            if lowest < 0 or highest >= settings.vocab_size:
                raise file.wrong(
                    "vocabulary",
                    f"ids of 0..{settings.vocab_size - 1}",
                    str(lowest if lowest < 0 else highest),
                )
            if (self.vocabulary[1:] <= self.vocabulary[:-1]).any():
                raise file.wrong("vocabulary", "ids in ascending order", "another order")


def _as_used(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.uint8 else tensor.float()


def _scales(tensor: Tensor) -> Tensor:
    """The numbers to check whether a tensor is finite: for blocks their scales and minima."""
    if tensor.dtype != torch.uint8:
        return tensor
    blocks = tensor.reshape(*tensor.shape[:-1], -1, BLOCK_BYTES)
    return blocks[..., :4].contiguous().view(torch.float16)


def _check_shape(file: TensorFile, name: str, shape: tuple[int, ...]) -> None:
    if file.shape(name) != shape:
        raise file.wrong(name, str(list(shape)), str(list(file.shape(name))))


def find_head(
    network: Network, path: Path, exits: str | Path | Literal[False] | None
) -> RecurrentHead | None:
    """The draft head for a model, if there is one.

    Args:
        exits: a pack's directory, or a repository on the hub with a pack; None: ``exits`` in the
            model's directory, ``NAME.exits`` next to a file ``NAME.gguf``, or a pack shipped with
            eecore for this model; False: no head.

    Raises:
        ModelError: ``exits`` is not a pack, or is a pack for another model. A pack that was not
            named is then passed over, with a warning: only speed depends on it.
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
    config = network.config
    sizes = config.num_layers, config.hidden_size, config.vocab_size
    shipped = shipped_pack(sizes, lambda: network_digest(network))
    return None if shipped is None else load_head(shipped, network)


def load_head(path: str | Path, network: LlamaModel) -> RecurrentHead:
    """The draft head in a pack's directory, or in a repository, which is fetched.

    Raises:
        ModelError: there is no pack, it is not whole or is for another model, or it cannot be
            fetched.
    """
    directory = fetch_head(path)
    settings = read_head_settings(directory)
    config, place = network.config, shown_path(directory / CONFIG_NAME)
    for name in ("num_layers", "hidden_size", "vocab_size"):
        if getattr(settings, name) != getattr(config, name):
            raise ModelError(
                f"{place}: model.{name}: expected {getattr(config, name)}, as the model has it,"
                f" got {getattr(settings, name)}"
            )
    if settings.digest != (own := network_digest(network)):
        raise ModelError(
            f"{place}: model.digest: expected {own}, the model's, got {settings.digest}: it was "
            "trained for another model"
        )
    if settings.attended:
        _check_attended(settings, network, place)
    file = HeadFile(directory, settings)
    return RecurrentHead(network, directory, settings, file.tensors, file.vocabulary)


def _check_attended(settings: HeadSettings, network: LlamaModel, place: str) -> None:
    """Raise unless the model has the key heads that a head attends to."""
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
    """The directory of the pack in a model's directory, or next to its file, if there is one."""
    beside = path / "exits" if path.is_dir() else path.with_suffix(".exits")
    return beside if kind_of(beside / CONFIG_NAME) == "a file" else None


def shipped_pack(sizes: tuple[int, int, int], digest: Callable[[], str]) -> Path | None:
    """The directory of the shipped head for a model, if there is one.

    Args:
        sizes: the model's num_layers, hidden_size and vocab_size.
        digest: computes :func:`network_digest`, for a model with the sizes of a shipped head's.
    """
    for file in sorted(SHIPPED.glob(f"*/{CONFIG_NAME}")):
        settings = read_head_settings(file.parent)
        of_head = settings.num_layers, settings.hidden_size, settings.vocab_size
        if of_head == sizes and settings.digest == digest():
            return file.parent
    return None


def stored_pack(stored: StoredTensors, config: ModelConfig) -> Path | None:
    """The directory of the shipped head for a model whose weights are not loaded."""
    names = NORM_NAMES.get(config.architecture, NormNames())

    def digest() -> str:
        norms = names.attention, names.mlp
        if not config.pre_norm:
            norms = names.attention_post, names.mlp_post
        layers = range(config.stack_size)
        stacked = [
            torch.stack([stored.tensor(f"model.layers.{layer}.{name}.weight") for layer in layers])
            for name in norms
        ]
        every = [norm.float() + config.norm_offset for norm in (stored.tensor(NORM), *stacked)]
        return norms_digest(config, *every)

    return shipped_pack((config.num_layers, config.hidden_size, config.vocab_size), digest)
