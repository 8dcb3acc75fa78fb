"""What the readers of published draft heads share."""

from __future__ import annotations

import torch
from torch import Tensor

from eecore.errors import CheckpointError
from eecore.files.readable import shown_path
from eecore.models.llama import LlamaModel
from eecore.models.readers.checkpoint import Checkpoint, StoredTensors, check_shape
from eecore.models.readers.config_fields import ConfigFields
from eecore.models.readers.stored_weights import StoredForms
from eecore.models.weights import INT8_BLOCK_DEVICES, CodedForms, Coding, NewWeights


def verifier_of(fields: ConfigFields) -> str:
    """The name of the model that a head was trained for; empty if the file does not say."""
    settings = fields.inner("speculators_config")
    verifier = None if settings is None else settings.inner("verifier")
    return "" if verifier is None else str(verifier.text("name_or_path", ""))


def check_size(fields: ConfigFields, name: str, got: int, expected: int) -> None:
    """Raise unless a size is the model's."""
    if got != expected:
        raise fields.wrong(name, f"{expected}, as the model has it", got)


def check_shapes(files: StoredTensors, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise unless tensors of floats are there in their shapes."""
    for name, shape in shapes.items():
        if name not in files.names:
            raise CheckpointError(f"{shown_path(files.place)}: expected tensor {name}, got none")
        check_shape(files, name, shape)


def draft_tokens(files: Checkpoint, size: int, vocab_size: int) -> Tensor:
    """int64 [size]: the model's token of each row of a head's LM head, from ``d2t``."""
    if "d2t" not in files and size == vocab_size:
        return torch.arange(size)
    if "d2t" not in files:
        raise CheckpointError(
            f"{shown_path(files.place)}: expected tensor d2t, the model's token of each of {size} "
            "drafts, got none"
        )
    place, kind, shape = files.path_of("d2t"), files.stored_dtype("d2t"), files.shape("d2t")
    if shape != (size,) or kind not in ("I64", "I32"):
        raise CheckpointError(
            f"{place}: d2t: expected whole numbers [draft_vocab_size={size}], got {kind} "
            f"{list(shape)}"
        )
    tokens = torch.arange(size) + files.tensor("d2t").long()
    wrong = (tokens < 0) | (tokens >= vocab_size)
    if wrong.any():
        at = int(wrong.nonzero()[0, 0])
        raise CheckpointError(
            f"{place}: d2t: expected tokens of 0..{vocab_size - 1}, got {int(tokens[at])} for "
            f"draft {at}"
        )
    return tokens


def new_weights(files: StoredTensors, network: LlamaModel) -> tuple[NewWeights, StoredForms]:
    """New weights of a head, and what fills them. Matrices have the blocks of the file; those that
    are floats there are quantised like the model's.
    """
    coding: Coding | None = None
    if network.weights.qkv.is_quantised:
        source = network.source
        coding = "int8" if source is not None and source.weights == "int8" else "int4"
    coded = CodedForms(coding, int8_blocks=network.device.type in INT8_BLOCK_DEVICES)
    forms = StoredForms(files, coded)
    return NewWeights(network.device, network.dtype, forms), forms
