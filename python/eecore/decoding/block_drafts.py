"""The end of a round with a head that drafts a block: all of the next round's drafts in one pass.

The blocks of all rows are of one size, so that what is about a draft is a slice of what is about
blocks: row r has places ``r * block_size`` up to the next one's. A row that may have fewer drafts
has no slots at its last places, and nobody looks at what comes of these.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from functools import partial

import torch
from torch import Tensor

from eecore import ops
from eecore.decoding.control import Control
from eecore.decoding.head_drafts import new_round, new_verification
from eecore.decoding.sampling import DRAWS_DRAFT
from eecore.decoding.step import Step
from eecore.models import AttentionBatch, BlockHead, KVCache

__all__ = ["BlockDrafting"]

MAX_ROWS_OF_LOGITS = 64
"""Places of blocks whose logits are kept in memory at once; of more those of one draft are."""


class BlockDrafting:
    """The calls of a block head, over memory of a program's own.

    Args:
        step: the program.
        head: of its model.
        given: the program's fields, those of :func:`head_drafting_fields` among them.
        results: those of :func:`head_results`.
        ended: where the program's rounds end.
        kv: the model's cache, with pages for the head's layers.
    """

    last_row: Tensor | None = None
    """Drafts start from keys alone, not from a state of the verification."""

    def __init__(
        self,
        step: Step,
        head: BlockHead,
        given: dict[str, Tensor],
        results: dict[str, Tensor],
        ended: ops.EndedRound,
        kv: KVCache,
    ) -> None:
        assert kv.of_head is not None
        rows, size, zeros = step.sizes.num_rows, head.settings.block_size, step.zeros
        self._head, self._kv, self._ended = head, kv.of_head, ended
        self._page_size, self._num_rows, self._size = kv.page_size, rows, size
        device, settings = results["ahead_tokens"].device, head.settings
        self._sources = torch.arange(rows, dtype=torch.int32, device=device)
        self._round = new_round(
            step,
            given,
            settings.num_drafts + 1,
            max_drafts=given["ahead"],
            thresholds=given["ahead_thresholds"][0],
            tokens=results["ahead_tokens"],
            confidences=results["ahead_probabilities"],
            num_drafted=results["num_ahead_drafted"],
        )
        self.drafted = ops.DraftedAhead(
            self._round.tokens, self._round.confidences, self._round.num_drafted
        )
        """Results of the program's last run, for rows that go on after it."""
        self._thresholds = given["ahead_thresholds"]
        fields = {
            "row": zeros(rows, dtype=torch.int32),
            "positions": zeros(rows),
            "slot_mapping": zeros(rows),
            "seq_lens": zeros(rows, dtype=torch.int32),
            "num_active": given["num_ahead"],
            "token_ids": zeros(rows),
        }
        self._active, _ = step.active_rows(**fields)
        masks = torch.full((rows, size - 1), settings.mask_token, device=device)
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
        # The same with no place left out.
        self._whole = self._block._replace(
            num_drafted=torch.full((rows,), size - 1, device=device), most=zeros(rows)
        )
        self._places = new_verification(step, size)
        self._lens = zeros(rows, dtype=torch.int32)
        self._batch = AttentionBatch(
            self._places.positions,
            self._places.slot_mapping,
            given["page_table"],
            self._lens,
            self._places.query_start_loc,
            causal=False,
        )
        # What the LM head says of places, those of one draft of all rows together.
        self._said = ops.HeadRows(
            zeros(size, rows), *(zeros(size, rows, dtype=torch.float32) for _ in range(2))
        )
        order = torch.arange(rows * size, dtype=torch.int32, device=device)
        self._order = (order % size * rows + order // size).contiguous()
        self._flat = ops.HeadRows(*(part.view(-1) for part in self._said))
        self._sampling = _greedy(rows, device)
        # Of one draft of each row, before and after it is a token of the model.
        self._chosen, self._mapped = (
            ops.HeadRows(zeros(rows), *(zeros(rows, dtype=torch.float32) for _ in range(2)))
            for _ in range(2)
        )
        self._logsumexp, self._zeros = (zeros(rows, dtype=torch.float32) for _ in range(2))
        hidden, rank = settings.config.hidden_size, settings.markov_rank
        self._numbers = torch.arange(rows, device=device)
        self._seen = zeros(rows, hidden + rank, dtype=head.dtype)
        self._states = zeros(rows * size, hidden, dtype=head.dtype)
        self._nothing = torch.zeros_like(self._states)

    def num_drafts(self, num_slots: int) -> int:
        """Drafts of a row that has so many slots for its block; -1 for none."""
        if num_slots >= self._size:
            return self._head.num_drafts
        return num_slots - 1 if num_slots > 1 else -1

    def run(self, states: Ordered[Tensor], control: Control, num_rows: Tensor) -> None:  # noqa: ARG002
        """Draft behind the ended rounds.

        Args:
            states: not looked at: the head has its keys of them.
            control: of the program.
            num_rows: int32 [1].
        """
        head, places = self._head, self._places
        begin_round = partial(ops.begin_round, ended=self._ended, sources=self._sources)
        with control.rows(num_rows):
            begin_round(self._block, self._active, self._page_size)
            ops.begin_verification(self._block, places._replace(seq_lens=self._lens))
            ops.begin_verification(self._whole, places)
            begin_round(self._round, self._active, self._page_size, own_key=False)
        with control.rows(places.num_tokens, num_rows):
            hidden = head.block(places.token_ids, self._kv, self._batch)
            if head.markov is None and head.confidence is None:
                ops.place_head(
                    None,
                    self._flat,
                    index=self._order,
                    as_probability=True,
                    vocabulary=head.tokens,
                    measure=head.measure,
                    hidden=hidden,
                )
                logits = None
            else:
                head.normed(hidden, self._nothing, self._states)
                many = self._num_rows * self._size > MAX_ROWS_OF_LOGITS
                logits = None if many else head.logits(hidden)
        self._draft(0, hidden, logits, control, num_rows)

    def _draft(
        self, draft: int, hidden: Tensor, logits: Tensor | None, control: Control, num_rows: Tensor
    ) -> None:
        """Take over a draft of every row, and those after it."""
        head, made = self._head, self._round._replace(thresholds=self._thresholds[draft])
        place = draft + (not head.settings.from_last)
        with control.rows(num_rows):
            token, confidence = self._said.token[place], self._said.confidence[place]
            if head.markov is not None or head.confidence is not None:
                token, confidence = self._corrected(place, hidden, logits)
            ops.append_drafts(None, token, confidence, draft, made, self._active, own_key=False)
        if draft + 1 < head.settings.num_drafts:
            control.unless(
                made.all_done, lambda: self._draft(draft + 1, hidden, logits, control, num_rows)
            )

    def _corrected(
        self, place: int, hidden: Tensor, logits: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """A draft of each row, by the token before it, and how likely it is to be accepted."""
        head, size, width = self._head, self._size, self._states.shape[1]
        assert self._active.token_ids is not None
        chosen, rows = self._chosen, self._seen[:, width:]
        if logits is None:
            its = head.logits(hidden.view(-1, size, width)[:, place])
        else:
            its = logits.view(-1, size, logits.shape[1])[:, place]
        if head.markov is not None:
            head.row_before(self._active.token_ids, rows)
            its = head.corrected(its, rows)
        ops.sample_tokens(
            its,
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
        state = self._states.view(-1, size, width)[:, place]
        ops.embed_tokens(self._numbers, state, out=self._seen[:, :width])
        seen = self._seen if head.settings.confidence_sees_token else self._seen[:, :width]
        return chosen.token, head.confidence(seen)


def _greedy(num_rows: int, device: torch.device) -> ops.SamplingRows:
    """The most probable token of each row."""

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
