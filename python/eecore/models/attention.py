"""What attention must know about the rows of one call, besides their hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """Ragged rows of several sequences: each sequence's rows are its last positions.

    Row i of the n rows of sequence s sits at position ``seq_lens[s] - n + i``; its key and value go
    to slot ``slot_mapping`` before it attends. One row per
    sequence is decoding, a few are verification, many are a chunk of a prompt.
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
