"""The layers' work of prompts' chunks as a program, which a GPU captures by size.

Tokens, sequences and pages are rounded up to a few sizes. All else is data: positions, slots,
lengths and page tables. Rows of padding belong to a sequence without keys and write to no page, so
they change no other row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eecore.config import AnyModelConfig
from eecore.decoding.control import Control
from eecore.decoding.memory import (
    Array,
    Field,
    HostSide,
    TwinMemory,
    cross_batch,
    cross_fields,
    power_of_two,
)
from eecore.decoding.step import tapped_layers
from eecore.models import AttentionBatch, KVCache, Network

# The smallest number of tokens, sequences or pages that a program has memory for.
MIN_SIZE = 8
# Tokens up to which sizes are powers of two: on a GPU the weights' bytes are the limit of products
# with fewer rows, so that padding costs little. Beyond, there are four sizes for each power of two.
MAX_CHEAP_TOKENS = 256
# Tokens of the largest program, which limits the number of sizes.
MAX_TOKENS = 2048
# Multiply-adds of a layer for which a GPU needs as long as the host for the layer's calls: 0.2 ms
# at the 390e12 a second of an H100. With more of them a graph saves nothing, and padding costs.
MAX_LAYER_WORK = 80_000_000_000
# Multiply-adds of products that a GPU does in the time of one of eecore's attention: on an H100 the
# attention of prompts reaches a fifth of the rate of products.
ATTENTION_COST = 5


@dataclass(frozen=True)
class ChunkRows:
    """Ragged rows of a pass, as arrays of the host; see :class:`eecore.models.AttentionBatch`."""

    positions: Array
    slots: Array
    page_table: Array
    lens: Array
    """The number of keys of each sequence, those of its rows included."""
    starts: Array
    """The first row of each sequence, then the number of rows."""
    cross: tuple[Array, Array] | None
    """The page table and lengths of the encoded inputs; None without an encoder."""
    states: Array | None = None
    """The states of the sequences; None without any."""


@dataclass(frozen=True)
class ChunkKind:
    """The key of a program: its calls, and the sizes of its memory."""

    depth: int
    """Layers that all rows run through."""
    taps: tuple[int, ...]
    """Layers after which a draft head takes the states of all rows."""
    num_tokens: int
    num_seqs: int
    """Sequences, the last of which has the rows of padding."""
    num_pages: int
    num_input_pages: int


def chunk_kind(
    config: AnyModelConfig, rows: ChunkRows, depth: int, taps: tuple[int, ...]
) -> ChunkKind | None:
    """The program for these rows, sizes rounded up; None where the GPU is the limit of a pass or
    where there are too many rows.
    """
    num_tokens = rounded_tokens(len(rows.positions))
    queries = np.diff(rows.starts)
    scores = 2 * config.q_size * float((queries * (rows.lens - queries / 2)).sum())
    weights = config.hidden_size * (2 * (config.q_size + config.kv_size))
    weights += config.hidden_size * 3 * config.intermediate_size
    work = num_tokens * weights + ATTENTION_COST * scores
    if num_tokens > MAX_TOKENS or work > MAX_LAYER_WORK:
        return None
    input_pages = 0 if rows.cross is None else _coarsely(rows.cross[0].shape[1])
    num_seqs, num_pages = rows.page_table.shape
    seqs, pages = _coarsely(num_seqs + 1), _coarsely(num_pages)
    return ChunkKind(depth, taps, num_tokens, seqs, pages, input_pages)


def rounded_tokens(count: int) -> int:
    """The size of a program for as many tokens."""
    step = power_of_two(max(count, MIN_SIZE))
    if step > MAX_CHEAP_TOKENS:
        step //= 8
    return -(-count // step) * step


def _coarsely(count: int) -> int:
    """The smallest of 8, 32, 128, ... that is not below ``count``."""
    return 1 << ((power_of_two(max(count, MIN_SIZE)).bit_length() - 1) | 1)


class ChunkPass:
    """Passes of up to ``kind.num_tokens`` rows over memory at fixed addresses.

    Attributes:
        num_bytes: bytes of the program's own memory, on host and device.
        has_run: whether the program has run at least once.
        hidden: the states of the last run, [num_tokens, hidden_size].
        tapped: the states after each tap, likewise.
    """

    has_run = False
    hidden: Tensor
    tapped: list[Tensor]
    _host: HostSide

    def __init__(self, model: Network, kv: KVCache, kind: ChunkKind) -> None:
        self.kind = kind
        self._model, self._kv = model, kv
        row, seqs = (kind.num_tokens,), kind.num_seqs
        fields: dict[str, Field] = {
            "token_ids": (torch.int64, row),
            "positions": (torch.int64, row),
            "slots": (torch.int64, row),
            "page_table": (torch.int32, (seqs, kind.num_pages)),
            "lens": (torch.int32, (seqs,)),
            "starts": (torch.int32, (seqs + 1,)),
            **cross_fields(seqs, kind.num_input_pages),
        }
        self._given = TwinMemory(model.device, fields)
        self.num_bytes = self._given.num_bytes
        given = self._given.device
        self._batch = AttentionBatch(
            positions=given["positions"],
            slot_mapping=given["slots"],
            page_table=given["page_table"],
            seq_lens=given["lens"],
            query_start_loc=given["starts"],
            cross=cross_batch(given),
        )

    def load(self, token_ids: Array, rows: ChunkRows) -> None:
        """Load the rows of the next run, followed by padding."""
        self._host = self._given.host()
        columns = {
            "token_ids": (token_ids, 0),
            "positions": (rows.positions, 0),
            "slots": (rows.slots, -1),
            "lens": (rows.lens, 0),
            "starts": (rows.starts, len(token_ids)),
        }
        if rows.cross is not None:
            columns["input_lens"] = rows.cross[1], 0
        arrays = self._host.arrays
        for name, (values, padding) in columns.items():
            arrays[name][: len(values)] = values
            arrays[name][len(values) :] = padding
        arrays["starts"][-1] = self.kind.num_tokens
        self._write_table("page_table", rows.page_table)
        if rows.cross is not None:
            self._write_table("input_page_table", rows.cross[0])
        self.send()

    def _write_table(self, name: str, table: Array) -> None:
        """Write a page table; entries that no key uses are never read."""
        num_rows, num_pages = table.shape
        self._host.arrays[name][:num_rows, :num_pages] = table

    def send(self) -> None:
        """Send what was loaded to the device."""
        self._given.send(self._host)

    def run(self, control: Control) -> None:  # noqa: ARG002 (all calls are made)
        """Run all rows, from the embeddings to the states after the last layer."""
        kind, model = self.kind, self._model
        hidden = model.embed(self._given.device["token_ids"])
        self.hidden, self.tapped = tapped_layers(
            model, 0, kind.depth, kind.taps, hidden, self._kv, self._batch
        )
