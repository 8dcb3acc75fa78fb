"""The tokens that a draft head chooses among: its own, and tokens of the current texts.

A head has rows of the LM head for the tokens that its model uses most. Other tokens of a text, from
names and rare words, mostly occur again in the answer: they get spare rows, which they take over
from tokens of earlier texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from threading import Lock

import torch
from torch import Tensor

from eecore import ops
from eecore.ops import Matrix

FORMAT = "Q5_1"
"""The block format of a head's own rows."""
SPARE_FORMAT = "Q8_0"
"""The block format of spare rows, which is quantised faster: requests wait for it."""
NUM_SPARE = 512
"""Rows for tokens of texts; they raise the cost of a head of 8,192 tokens by an eleventh."""
PANEL = 16
"""Rows that are packed together."""
PART = 64 * PANEL
"""Rows that are floats at a time while a head's own rows are packed."""


class HeadVocabulary:
    """Rows of an LM head, packed for products on the CPU, some of which change.

    Spare rows are reused in turn: new tokens replace the tokens that were added first. At first
    spare rows hold the first tokens that are not the head's own, so that no token has two rows.

    Args:
        lm_head: the model's LM head; not changed.
        own: int64 [num_own], the tokens that always have a row.
        num_spare: spare rows, at most.

    Attributes:
        tokens: int64 [num_rows], the token of each row; tokens of spare rows change.
        rows: the rows of the LM head, [num_rows, hidden_size].
    """

    def __init__(self, lm_head: Matrix, own: Tensor, num_spare: int) -> None:
        self._lm_head, self._num_own = lm_head, len(own)
        table = lm_head.table
        vocab_size = len(lm_head.weight if table is None else table)
        self._has_row = bytearray(vocab_size)
        for token in own.tolist():
            self._has_row[token] = 1
        others = (token for token in range(vocab_size) if not self._has_row[token])
        self._spare = list(islice(others, num_spare))
        self._next = 0
        self._lock = Lock()  # engines in several threads may share a model
        for token in self._spare:
            self._has_row[token] = 1
        self.tokens = torch.cat((own, torch.tensor(self._spare, dtype=torch.int64)))
        self._numbers = self.tokens.numpy()  # the same memory; numpy sets single elements faster
        hidden_size = matrix_rows(lm_head, own[:1]).shape[1]
        self._begin = ops.packed_bytes(FORMAT, len(own), hidden_size)
        self._panel_bytes = ops.packed_bytes(SPARE_FORMAT, PANEL, hidden_size)
        size = self._begin + ops.packed_bytes(SPARE_FORMAT, len(self._spare), hidden_size)
        packed = torch.empty(size, dtype=torch.uint8)
        self._table = torch.empty(len(self.tokens), dtype=torch.int64)
        self.rows = Matrix(packed, table=self._table)
        offset = 0
        for begin in range(0, len(own), PART):
            part = own[begin : begin + PART]
            self._pack(self._quantised(part, FORMAT), FORMAT, offset, begin)
            offset += ops.packed_bytes(FORMAT, len(part), hidden_size)
        self._blocks = torch.empty(0, 0, dtype=torch.uint8)
        if self._spare:
            self._blocks = self._quantised(self._spare, SPARE_FORMAT)
            self._pack_spare(0, len(self._spare))

    def take(self, token_ids: Sequence[int]) -> None:
        """Give each token a row, or as many of them as there are spare rows."""
        has_row = self._has_row
        if self._spare and not all(map(has_row.__getitem__, token_ids)):
            with self._lock:
                self._put(list(dict.fromkeys(token_ids)))

    def _put(self, token_ids: list[int]) -> None:
        """Give new tokens the spare rows of the tokens added first, unless asked for again."""
        spare, has_row = self._spare, self._has_row
        new = [token for token in token_ids if not has_row[token]]
        if not new:  # another thread was here
            return
        kept = set(token_ids) if len(new) < len(spare) else frozenset[int]()
        places = []
        for token in new[-len(spare) :]:
            for _ in spare:
                place, self._next = self._next, (self._next + 1) % len(spare)
                if spare[place] not in kept:
                    break
            has_row[spare[place]], has_row[token] = 0, 1
            spare[place] = self._numbers[self._num_own + place] = token
            places.append(place)
        self._blocks.numpy()[places] = self._quantised(
            [spare[place] for place in places], SPARE_FORMAT
        ).numpy()
        for panel in sorted({place // PANEL for place in places}):
            self._pack_spare(panel * PANEL, (panel + 1) * PANEL)

    def _pack_spare(self, begin: int, end: int) -> None:
        """Pack spare rows, from the first row of a panel on."""
        offset = self._begin + begin // PANEL * self._panel_bytes
        self._pack(self._blocks[begin:end], SPARE_FORMAT, offset, self._num_own + begin)

    def _pack(self, blocks: Tensor, format: str, offset: int, first: int) -> None:
        """Pack blocks from a byte on, as the rows from ``first`` on."""
        table = self._table[first : first + len(blocks)]
        ops.pack_weight(blocks, format, offset=offset, packed=self.rows.weight, table=table)

    def _quantised(self, tokens: Tensor | Sequence[int], format: str) -> Tensor:
        """The tokens' rows of the LM head, in blocks of a format."""
        index = torch.as_tensor(tokens, dtype=torch.int64)
        rows = matrix_rows(self._lm_head, index).float().contiguous()
        return ops.quantise_weight(rows, format)


def matrix_rows(matrix: Matrix, index: Tensor) -> Tensor:
    """[n, in_features] in floats: rows of a matrix of one layer, by their numbers, int64 [n]."""
    if matrix.table is not None:
        rows = ops.unpack_weight(matrix.weight.cpu(), matrix.table[index].cpu())
        return rows.to(matrix.weight.device)
    rows = matrix.weight[index]
    return rows if matrix.scale is None else rows.float() * matrix.scale[index, None]
