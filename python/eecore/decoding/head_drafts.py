"""The end of a round with a draft head: what it drafts for the next round, in the same program.

The head starts from the states of the row that gave the round's last token, which are at hand then,
so that nothing of it is kept on the device. The host gets the drafts, and gives to the next round
those that are worth verifying, as it does with drafts that were looked up.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import Any

import torch
from torch import Tensor

from eecore import ops
from eecore.decoding.control import Control
from eecore.decoding.memory import Cells, Field
from eecore.decoding.step import Step
from eecore.models import KVCache, LlamaModel, SeenKeys
from eecore.planning.proposal import MAX_AHEAD, Ahead
from eecore.planning.row import Row

__all__ = ["HeadDrafting", "drafted_ahead", "head_drafting_fields", "head_results", "new_round"]


def head_drafting_fields(num_rows: int) -> dict[str, Field]:
    """What the host says of a round's drafting."""
    return {
        "ahead": (torch.int64, (num_rows,)),
        "num_ahead": (torch.int32, (1,)),
        "ahead_thresholds": (torch.float32, (MAX_AHEAD, num_rows)),
    }


def head_results(num_rows: int) -> dict[str, Field]:
    """What comes of it."""
    return {
        "ahead_tokens": (torch.int64, (num_rows, MAX_AHEAD + 1)),
        "num_ahead_drafted": (torch.int64, (num_rows,)),
        "ahead_probabilities": (torch.float32, (num_rows, MAX_AHEAD)),
    }


def new_round(step: Step, given: dict[str, Tensor], width: int, **own: Any) -> ops.DraftRound:
    """A round's memory of a program's own, beside what host and device exchange.

    Args:
        step: the program.
        given: its fields: every round of it is behind the same text.
        width: tokens of a row at most, drafts and the one before them.
        own: the other fields of :class:`eecore.ops.DraftRound`, of this round alone.
    """
    num_rows, zeros = step.sizes.num_rows, step.zeros
    made: dict[str, Any] = {"states": None, **own}
    return ops.DraftRound(
        token_ids=given["token_ids"],
        start=given["start"],
        tokens_left=given["tokens_left"],
        page_table=given["page_table"],
        stop_tokens=given["stop_tokens"],
        first_position=zeros(num_rows),
        left=zeros(num_rows),
        round_slots=zeros(num_rows, width),
        most=zeros(num_rows),
        done=zeros(num_rows, dtype=torch.bool),
        all_done=zeros(1, dtype=torch.bool),
        **made,
    )


class HeadDrafting:
    """Its calls, over memory of a program's own.

    Args:
        step: the program.
        model: its model, with a draft head.
        given: the program's fields, those of :func:`head_drafting_fields` among them.
        results: those of :func:`head_results`.
        ended: where the program's rounds end.
        kv: its cache.
    """

    def __init__(
        self,
        step: Step,
        model: LlamaModel,
        given: dict[str, Tensor],
        results: dict[str, Tensor],
        ended: ops.EndedRound,
        kv: KVCache,
    ) -> None:
        num_rows, zeros = step.sizes.num_rows, step.zeros
        assert model.draft_head is not None
        self._model, self._head = model, model.draft_head
        self._ended, self._page_size = ended, kv.page_size
        self.last_row = zeros(num_rows)
        """int64 [num_rows]: the row of the verification whose states it starts from."""
        self._begun = [
            zeros(num_rows, model.config.hidden_size, dtype=model.dtype)
            for _ in self._head.settings.taps
        ]
        self._sources = torch.arange(num_rows, dtype=torch.int32, device=model.device)
        self._round = new_round(
            step,
            given,
            MAX_AHEAD + 1,
            max_drafts=given["ahead"],
            thresholds=given["ahead_thresholds"][0],
            tokens=results["ahead_tokens"],
            confidences=results["ahead_probabilities"],
            num_drafted=results["num_ahead_drafted"],
        )
        self.drafted = ops.DraftedAhead(
            self._round.tokens, self._round.confidences, self._round.num_drafted
        )
        """Of the program's last run; rows that go on behind it are given these."""
        self._thresholds = given["ahead_thresholds"]
        # Its rows are left in front as drafting ends, and the round itself drafts nothing.
        self._active, batch = step.active_rows(
            row=zeros(num_rows, dtype=torch.int32),
            positions=zeros(num_rows),
            slot_mapping=zeros(num_rows),
            seq_lens=zeros(num_rows, dtype=torch.int32),
            num_active=given["num_ahead"],
            token_ids=zeros(num_rows),
        )
        self._drafted = ops.HeadRows(
            zeros(num_rows),
            zeros(num_rows, dtype=torch.float32),
            zeros(num_rows, dtype=torch.float32),
        )

        self._seen: SeenKeys | None = None
        if self._head.attends:
            self._seen = SeenKeys(
                kv=kv,
                page_table=self._active.page_table,
                seq_lens=self._active.seq_lens,
                positions=self._active.positions,
                no_keys=model.no_keys(num_rows),
                starts=batch.query_start_loc,
            )

    def run(self, states: Ordered[Tensor], control: Control, num_rows: Tensor) -> None:
        """Draft behind the ended rounds.

        Args:
            states: after the layers of the head's taps, of all rows that were verified.
            control: of the program.
            num_rows: int32 [1].
        """
        with control.rows(num_rows):
            begun = [
                ops.embed_tokens(self.last_row, state, out=out)
                for state, out in zip(states, self._begun, strict=True)
            ]
            state = self._head.begin(begun)
            condition = control.condition(self._round.all_done)
            ops.begin_round(
                self._round,
                self._active,
                self._page_size,
                ended=self._ended,
                sources=self._sources,
                condition=condition,
                own_key=False,
            )
            if control.compacts:
                ops.compact_rows(self._round.done, self._active, state)
        control.unless(self._round.all_done, lambda: self._draft(0, state, control), condition)

    def _draft(self, step: int, state: Tensor, control: Control) -> None:
        """One more token of every row that drafts, and what is behind it."""
        active, made = self._active, self._round
        made = made._replace(thresholds=self._thresholds[step])
        goes_on = step + 1 < MAX_AHEAD
        condition = control.condition(made.all_done) if goes_on else None
        with control.rows(active.num_active):
            assert active.token_ids is not None
            state = self._head.step(state, self._model.embed(active.token_ids), self._seen)
            ops.place_head(
                None,
                self._drafted,
                as_probability=True,
                vocabulary=self._head.tokens,
                measure=self._head.measure,
                hidden=state,
            )
            ops.append_drafts(
                *(None, self._drafted.token, self._drafted.confidence, step, made, active),
                condition=condition,
                own_key=False,
            )
            if control.compacts:
                ops.compact_rows(made.done, active, state)
        if goes_on:
            control.unless(made.all_done, lambda: self._draft(step + 1, state, control), condition)


def drafted_ahead(row: Row, i: int, emitted: list[int], got: Cells) -> Ahead | None:
    """What the head drafted for the i-th row, behind the tokens that it got."""
    count = got["num_ahead_drafted"][i]
    if not row.ahead or not count or not emitted:
        return None
    tokens, probabilities = got["ahead_tokens"], got["ahead_probabilities"]
    if tokens[i, 0] != emitted[-1]:  # the text ends before it
        return None
    return Ahead(
        row.work.sequence.num_tokens + len(emitted),
        emitted[-1],
        [tokens[i, k] for k in range(1, count + 1)],
        [probabilities[i, k] for k in range(count)],
    )
