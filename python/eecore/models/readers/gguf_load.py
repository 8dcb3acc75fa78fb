"""What a GGUF file must be to run as it is, the dtype that suits it, and its tokenizer."""

from __future__ import annotations

import warnings

import torch

from eecore import ops
from eecore.errors import CheckpointError, UnsupportedModelError
from eecore.json_fields import JsonFields
from eecore.models.readers.gguf_checkpoint import GGUFCheckpoint
from eecore.models.readers.gguf_tokenizer import build_tokenizer
from eecore.models.readers.packed_load import field_of
from eecore.models.text.tokenizer import Tokenizer
from eecore.models.text.tokenizer_files import chat_settings

__all__ = ["check_kinds", "gguf_tokenizer", "stored_dtype"]

FLOATS = {"F32": torch.float32, "F16": torch.float32, "BF16": torch.bfloat16}
"""What stored floats run as: float16's only in float32 is nothing lost."""


def check_kinds(checkpoint: GGUFCheckpoint) -> None:
    """Raise unless every tensor is of a type that runs as it is."""
    supported = (*ops.BLOCK_FORMATS, *FLOATS)
    for name, stored in checkpoint.stored_as.items():
        kind = checkpoint.kind(name)
        if kind not in supported:
            raise UnsupportedModelError(
                f"{checkpoint.place}: {stored}: supported are {', '.join(supported)}, got {kind} "
                "(eecore convert may read it)"
            )


def stored_dtype(checkpoint: GGUFCheckpoint, device: torch.device) -> torch.dtype:
    """What the states run in: bfloat16 where the matrices are that, on a GPU blocks too.

    Else float32: a CPU multiplies blocks with 8 bits of either, a GPU bfloat16 several times as
    fast.
    """
    kinds = {checkpoint.kind(name) for name in checkpoint.names if field_of(name) is not None}
    brief = {"BF16"} if device.type == "cpu" else {"BF16", *ops.BLOCK_FORMATS}
    return torch.bfloat16 if kinds <= brief else torch.float32


def gguf_tokenizer(checkpoint: GGUFCheckpoint) -> Tokenizer | None:
    """The file's own; None, with a warning, where it is of a kind that is not read."""
    try:
        backend, settings = build_tokenizer(checkpoint.file, checkpoint.config.vocab_size)
    except UnsupportedModelError as error:
        warnings.warn(f"{error}; the model gets no tokenizer", stacklevel=4)
        return None
    place = str(checkpoint.place)
    chat = chat_settings(JsonFields(settings, place, CheckpointError))
    return Tokenizer.of(backend, chat, place)
