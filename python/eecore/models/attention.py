"""What attention must know about the rows of one call, other than their hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eecore.models.prompt_attention import Chunks

# Keys per split of a long context. With a fixed size and the skinny ops, a row's result is bit for
# bit the same whichever rows run with it: verification then repeats full decoding exactly.
KEYS_PER_SPLIT = 512
# The same on a GPU, where one warp of a block works on a split.
CUDA_KEYS_PER_SPLIT = 128


def keys_per_split(device: torch.device) -> int:
    """The fixed split size of a device."""
    return KEYS_PER_SPLIT if device.type == "cpu" else CUDA_KEYS_PER_SPLIT


@dataclass(frozen=True)
class CrossBatch:
    """The encoder's keys and values that the sequences of a call attend to, without a mask."""

    page_table: Tensor
    """int32 [num_seqs, max_pages_per_input]"""
    seq_lens: Tensor
    """int32 [num_seqs], tokens of each sequence's input."""


@dataclass(frozen=True)
class AttentionBatch:
    """Ragged rows of several sequences: each sequence's rows are its last positions.

    Row i of the n rows of sequence s sits at position ``seq_lens[s] - n + i``; its key and value go
    to slot ``slot_mapping`` before it attends. One row per sequence is decoding, a few are
    verification, many are a chunk of a prompt.
    """

    positions: Tensor
    """int64 [num_tokens], for the rotary embedding."""
    slot_mapping: Tensor
    """int64 [num_tokens]; -1 writes nothing."""
    page_table: Tensor
    """int32 [num_seqs, max_pages_per_seq]"""
    seq_lens: Tensor
    """int32 [num_seqs], keys in the cache once this call has written its own."""
    query_start_loc: Tensor
    """int32 [num_seqs + 1], from 0 to num_tokens."""
    cross: CrossBatch | None = None
    """The encoder's keys and values; None for a decoder without an encoder."""
    causal: bool = True
    """False: a row sees all keys of its sequence, also at later positions."""
    chunks: Chunks | None = None
    """The chunks' lengths, known to the host, if every sequence has a chunk of a prompt."""
    states: Tensor | None = None
    """int32 [num_seqs, 2], see :func:`eecore.ops.gated_delta`; None for a model without states."""


Texts = tuple[Tensor, Tensor, Tensor]
"""``states``, ``seq_lens`` and ``query_start_loc`` of rows, see :class:`AttentionBatch`."""


class LayerFlags:
    """Sets of layers as the ops take them: bool [num_layers] tensors, each made once."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._made: dict[frozenset[int], Tensor] = {}

    def of(self, layers: frozenset[int]) -> Tensor | None:
        """The flags of a set of layers; None for no layers."""
        if not layers:
            return None
        if layers not in self._made:
            flags = np.array([i in layers for i in range(self._num_layers)])
            self._made[layers] = torch.from_numpy(flags)  # a tape may be recording
        return self._made[layers]
