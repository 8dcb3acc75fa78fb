"""The end of a round with a head that drafts a block: all of the next round's drafts in one pass.

The blocks of all rows have one size, so that one draft of all rows is a slice of the tensors of
blocks: row r has the places from ``r * block_size`` to the next row's. A row that may have fewer
drafts has no slots at its last places, whose results are not read.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eecore import ops
from eecore.decoding.control import Control
from eecore.decoding.head_drafts import (
    AheadDrafting,
    EndedRounds,
    new_round,
    new_verification,
)
from eecore.decoding.sampling import DRAWS_DRAFT
from eecore.decoding.step import Step
from eecore.models import AttentionBatch

if TYPE_CHECKING:
    from eecore.heads.block import BlockHead

MAX_ROWS_OF_LOGITS = 64
"""Maximum number of places whose logits are computed at once; with more places, the logits are
computed one draft at a time.
"""


class BlockDrafting(AheadDrafting):
    """The calls of a block head.

    Args:
        head: the block head of the program's model.
        rounds: the program's rounds; the model's cache has pages for the head's layers.
    """

    def __init__(self, head: BlockHead, rounds: EndedRounds) -> None:
        super().__init__(rounds, head.num_at_once)
        step, given, kv = rounds.step, rounds.given, rounds.kv
        assert kv.of_head is not None
        rows, size, zeros = step.sizes.num_rows, head.settings.block_size, step.zeros
        self._head, self._kv = head, kv.of_head
        self._num_rows, self._size = rows, size
        device = rounds.results["ahead_tokens"].device
        masks = torch.full((rows, size - 1), head.settings.mask_token, device=device)
        self._block = new_round(
            step,
            given,
            size,
            max_drafts=given["ahead"],
            thresholds=given["ahead_thresholds"][0],
            tokens=zeros(rows, size),
            confidences=zeros(rows, size - 1, dtype=torch.float32),
            num_drafted=zeros(rows),
            drafts=masks,
            num_given=torch.full((rows,), size - 1, device=device),
        )
        # The same blocks with all their places, also where a row has fewer drafts.
        self._whole = self._block._replace(
            num_drafted=torch.full((rows,), size - 1, device=device), most=zeros(rows)
        )
        self._places = new_verification(step, size)
        self._lens = zeros(rows, dtype=torch.int32)
        self._block_batch = AttentionBatch(
            self._places.positions,
            self._places.slot_mapping,
            given["page_table"],
            self._lens,
            self._places.query_start_loc,
            causal=False,
        )
        # Tokens and confidences of places, and then by row.
        self._said = _said(step, size, rows)
        order = torch.arange(rows * size, dtype=torch.int32, device=device)
        self._order = (order % size * rows + order // size).contiguous()
        self._flat = ops.HeadRows(*(part.view(-1) for part in self._said))
        self.last_row = None
        if not head.is_sequential:
            return
        self._sampling = _greedy(rows, device)
        # One draft of each row, as a token of the head's vocabulary and of the model's.
        self._chosen, self._mapped = (
            ops.HeadRows(*(part[0] for part in _said(step, 1, rows))) for _ in range(2)
        )
        self._logsumexp, self._zeros = (zeros(rows, dtype=torch.float32) for _ in range(2))
        hidden = head.config.hidden_size
        # The normed state of a draft, then the row of the token before it.
        self._seen = zeros(rows, hidden + head.settings.markov_rank, dtype=head.dtype)
        self._rows = torch.arange(rows, device=device)
        self._states = zeros(rows * size, hidden, dtype=head.dtype)
        self._nothing = torch.zeros_like(self._states)

    def within(self, ahead: int, slots: int) -> int:
        slots -= 1  # for its block, which begins after the last verified position
        if not ahead or slots <= 1:
            return -1
        return self._head.num_at_once if slots >= self._size else slots - 1

    def run(self, states: Ordered[Tensor], control: Control, num_rows: Tensor) -> None:  # noqa: ARG002 (drafts start from keys)
        head, places = self._head, self._places
        begin_round = partial(ops.begin_round, ended=self._ended, sources=self._sources)
        with control.rows(num_rows):
            begin_round(self._block, self._active, self._page_size)
            ops.begin_verification(self._block, places._replace(seq_lens=self._lens))
            ops.begin_verification(self._whole, places)
            begin_round(self._round, self._active, self._page_size, own_key=False)
        with control.rows(places.num_tokens, num_rows):
            hidden, logits = head.block(places.token_ids, self._kv, self._block_batch), None
            if not head.is_sequential:
                ops.place_head(
                    None,
                    self._flat,
                    index=self._order,
                    as_probability=True,
                    vocabulary=head.tokens,
                    measure=head.measure,
                    hidden=hidden,
                )
            else:
                head.normed(hidden, self._nothing, self._states)
                many = self._num_rows * self._size > MAX_ROWS_OF_LOGITS
                logits = None if many else head.logits(hidden)
        self._draft(0, hidden, logits, control, num_rows)

    def _draft(
        self, draft: int, hidden: Tensor, logits: Tensor | None, control: Control, num_rows: Tensor
    ) -> None:
        """Append one draft to every row, then the drafts after it."""
        head, made = self._head, self._round._replace(thresholds=self._thresholds[draft])
        place = draft + head.first_place
        with control.rows(num_rows):
            token, confidence = self._said.token[place], self._said.confidence[place]
            if head.is_sequential:
                token, confidence = self._corrected(place, hidden, logits)
            ops.append_drafts(None, token, confidence, draft, made, self._active, own_key=False)
        if draft + 1 < head.num_at_once:
            control.unless(
                made.all_done, lambda: self._draft(draft + 1, hidden, logits, control, num_rows)
            )

    def _corrected(
        self, place: int, hidden: Tensor, logits: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """A draft of each row by the token before it, and the chance that it is accepted."""
        head, size, width, chosen = self._head, self._size, self._states.shape[1], self._chosen
        assert self._active.token_ids is not None
        if logits is None:
            row_logits = head.logits(hidden.view(-1, size, width)[:, place])
        else:
            row_logits = logits.view(-1, size, logits.shape[1])[:, place]
        if head.confidence is not None:
            state = self._states.view(-1, size, width)[:, place]
            ops.embed_tokens(self._rows, state, out=self._seen[:, :width])
        if head.markov is not None:
            row = self._seen[:, width:]
            row_logits = head.markov.corrected(row_logits, self._active.token_ids, row)
        ops.sample_tokens(
            row_logits,
            self._sampling,
            ops.SampledRows(*chosen, self._logsumexp),
            purpose=DRAWS_DRAFT,
            positions=self._active.positions,
            as_probability=True,
        )
        if head.tokens is not None:
            token, confidence, logprob = chosen
            found = ops.SoftmaxConfidence(confidence, token, self._zeros, logprob)
            chosen = self._mapped
            ops.place_head(found, chosen, as_probability=True, vocabulary=head.tokens)
        if head.confidence is None:
            return chosen.token, chosen.confidence
        seen = width + head.settings.markov_rank * head.settings.confidence_sees_token
        return chosen.token, head.confidence(self._seen[:, :seen])


def _said(step: Step, *shape: int) -> ops.HeadRows:
    """Memory for tokens and confidences."""
    floats = (step.zeros(*shape, dtype=torch.float32) for _ in range(2))
    return ops.HeadRows(step.zeros(*shape), *floats)


def _greedy(num_rows: int, device: torch.device) -> ops.SamplingRows:
    """Settings that take the most probable token of each row."""

    def numbers(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    return ops.SamplingRows(
        temperature=numbers(0.0),
        top_k=numbers(0, torch.int32),
        top_p=numbers(1.0),
        min_p=numbers(0.0),
        repetition_penalty=numbers(1.0),
        seed=numbers(0, torch.int64),
        seen=torch.full((num_rows, 1), -1, device=device),
    )
