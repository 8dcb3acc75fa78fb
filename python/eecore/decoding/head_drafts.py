"""The end of a round with a draft head: the head's drafts for the next round, in the same program.

The head starts from the states of the row that gave the round's last token. They are in memory at
that time, so that no state is kept on the device. The host gets the drafts, and gives the next
round the ones that are worth verifying, as it does with drafts that were looked up. A round that is
launched before the host has them takes them from the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Ordered
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eecore import ops
from eecore.decoding.control import Control
from eecore.decoding.memory import Cells, Field
from eecore.decoding.step import Step
from eecore.models import (
    AttentionBatch,
    DraftHead,
    KVCache,
    LlamaModel,
    Network,
    Positions,
    SeenKeys,
)
from eecore.planning.proposal import MAX_AHEAD, Ahead
from eecore.planning.row import Outcome


def head_drafting_fields(num_rows: int, most: int) -> dict[str, Field]:
    """Fields that the host writes for drafting, with at most ``most`` drafts of a row."""
    return {
        "ahead": (torch.int64, (num_rows,)),
        "num_ahead": (torch.int32, (1,)),
        "ahead_thresholds": (torch.float32, (most, num_rows)),
    }


def head_results(num_rows: int, most: int) -> dict[str, Field]:
    """Result fields of drafting, with at most ``most`` drafts of a row."""
    return {
        "ahead_tokens": (torch.int64, (num_rows, most + 1)),
        "num_ahead_drafted": (torch.int64, (num_rows,)),
        "ahead_probabilities": (torch.float32, (num_rows, most)),
    }


def new_round(step: Step, given: dict[str, Tensor], width: int, **own: Any) -> ops.DraftRound:
    """A round in memory of a program's own, in addition to what host and device exchange.

    Args:
        step: the program.
        given: the program's fields; all its rounds share the fields of the text.
        width: maximum number of tokens of a row: the last token of the text, and drafts.
        own: the other fields of :class:`eecore.ops.DraftRound`, for this round alone.
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


def new_verification(step: Step, width: int) -> ops.Verification:
    """A verification in memory of a program's own; ``width``: maximum number of tokens of a row."""
    rows, zeros = step.sizes.num_rows, step.zeros
    return ops.Verification(
        last_tokens=zeros(rows),
        last_positions=zeros(rows),
        last_slots=zeros(rows),
        last_seq_lens=zeros(rows, dtype=torch.int32),
        token_ids=zeros(rows * width),
        positions=zeros(rows * width),
        slot_mapping=zeros(rows * width),
        sequence=zeros(rows * width, dtype=torch.int32),
        seq_lens=zeros(rows, dtype=torch.int32),
        query_start_loc=zeros(rows + 1, dtype=torch.int32),
        num_tokens=zeros(1, dtype=torch.int32),
    )


class HeadKeys:
    """Writes the keys and values of a draft head's own layers, for one program.

    Args:
        model: a model with such a head.
        kv: the model's cache, with pages for the head's layers.
        num_rows: maximum number of positions of a run.
    """

    def __init__(self, model: Network, kv: KVCache, num_rows: int) -> None:
        assert model.draft_head is not None
        assert kv.of_head is not None
        self._head, self._kv = model.draft_head, kv.of_head
        self._sources = torch.arange(num_rows, dtype=torch.int32, device=model.device)
        self._first_layers = torch.zeros_like(self._sources)

    def fill(
        self,
        states: Ordered[Tensor],
        made: Tensor,
        batch: AttentionBatch,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Write the keys and values of positions that all layers ran for.

        Args:
            states: states after the layers of the head's taps, each [num_rows, hidden_size].
            made: int64 [num_rows]: the token after each position; -1 for none.
            batch: the positions and their slots, of which -1 writes nothing, and the texts.
            starts: int64 [num_starts], the rows at position 0, which only prompts have.

        Returns:
            [num_rows, hidden_size of the head]: the states from which the head drafts.
        """
        count = len(states[0])
        rows = self._sources[:count], self._first_layers[:count]
        return self._head.begin(states, Positions(self._kv, made, *rows, batch, starts))


class EndedRounds(NamedTuple):
    """The rounds of a program, after which a head drafts."""

    step: Step
    """The program."""
    given: dict[str, Tensor]
    """The program's fields, with the fields of :func:`head_drafting_fields`."""
    results: dict[str, Tensor]
    """The program's results, with the fields of :func:`head_results`."""
    ended: ops.EndedRound
    """The ends of the rounds."""
    accepted: ops.DraftRound
    """The rounds, with the number of accepted drafts as the number of drafts."""
    kv: KVCache
    """The model's cache."""


class AheadDrafting(ABC):
    """The calls of a head that drafts for the next round, over memory of a program's own.

    Args:
        rounds: the program's rounds.
        num_drafts: maximum number of drafts of a row.
    """

    last_row: Tensor | None
    """int64 [num_rows]: the row of the verification whose state gives the first draft; None: drafts
    start from keys alone."""

    def __init__(self, rounds: EndedRounds, num_drafts: int) -> None:
        step, given, results = rounds.step, rounds.given, rounds.results
        num_rows, zeros = step.sizes.num_rows, step.zeros
        self._ended, self._page_size = rounds.ended, rounds.kv.page_size
        device = results["ahead_tokens"].device
        self._sources = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._round = new_round(
            step,
            given,
            num_drafts + 1,
            max_drafts=given["ahead"],
            thresholds=given["ahead_thresholds"][0],
            tokens=results["ahead_tokens"],
            confidences=results["ahead_probabilities"],
            num_drafted=results["num_ahead_drafted"],
        )
        self.drafted = ops.DraftedAhead(
            self._round.tokens, self._round.confidences, self._round.num_drafted
        )
        """Drafts of the program's last run, for rows that continue after it."""
        self._thresholds = given["ahead_thresholds"]
        # Drafting leaves rows of the open page table moved; the round itself does not draft then.
        self._active, self._batch = step.active_rows(
            row=zeros(num_rows, dtype=torch.int32),
            positions=zeros(num_rows),
            slot_mapping=zeros(num_rows),
            seq_lens=zeros(num_rows, dtype=torch.int32),
            num_active=given["num_ahead"],
            token_ids=zeros(num_rows),
        )

    def within(self, ahead: int, slots: int) -> int:
        """The number of drafts of a row, which is to have ``ahead`` and has ``slots`` slots for
        keys from the last verified position on, or the one before it; -1 for none.
        """
        return min(ahead, slots)

    @abstractmethod
    def run(self, states: Ordered[Tensor], control: Control, num_rows: Tensor) -> None:
        """Draft after the ended rounds.

        Args:
            states: states of all verified rows after the layers of the head's taps, or the result
                of :meth:`HeadKeys.fill`.
            control: the program's control.
            num_rows: int32 [1], rows of the program.
        """


class HeadDrafting(AheadDrafting):
    """The calls of a head that drafts token by token.

    Args:
        head: the draft head of the program's model.
        model: the program's model.
        rounds: the program's rounds.
    """

    last_row: Tensor

    def __init__(self, head: DraftHead, model: LlamaModel, rounds: EndedRounds) -> None:
        super().__init__(rounds, MAX_AHEAD)
        step, accepted = rounds.step, rounds.accepted
        num_rows, zeros = step.sizes.num_rows, step.zeros
        self._head = head
        self.last_row = zeros(num_rows)
        sizes = [model.config.hidden_size] * len(head.taps)
        self._accepted = accepted
        self._last: ops.Verification | None = None
        if head.keys is not None:
            sizes = [head.keys.hidden_size]
            # The head's key of a token is one position earlier: the last position verified.
            self._last = new_verification(step, accepted.tokens.shape[1])
            self._ended = rounds.ended._replace(next_position=self._last.last_positions)
        self._begun = [zeros(num_rows, size, dtype=model.dtype) for size in sizes]
        self._drafted = ops.HeadRows(
            zeros(num_rows),
            zeros(num_rows, dtype=torch.float32),
            zeros(num_rows, dtype=torch.float32),
        )
        self._seen: SeenKeys | None = None
        if head.attends:
            self._seen = SeenKeys(rounds.kv, self._batch, model.no_keys(num_rows))

    def run(self, states: Ordered[Tensor], control: Control, num_rows: Tensor) -> None:
        with control.rows(num_rows):
            begun = [
                ops.embed_tokens(self.last_row, state, out=out)
                for state, out in zip(states, self._begun, strict=True)
            ]
            state = begun[0]
            if self._last is None:
                state = self._head.begin(begun)
            else:
                ops.begin_verification(self._accepted, self._last)
            condition = control.condition(self._round.all_done)
            ops.begin_round(
                self._round,
                self._active,
                self._page_size,
                ended=self._ended,
                sources=self._sources,
                condition=condition,
                own_key=self._last is not None,
            )
            if control.compacts:
                ops.compact_rows(self._round.done, self._active, state)
        control.unless(self._round.all_done, lambda: self._draft(0, state, control), condition)

    def _draft(self, step: int, state: Tensor, control: Control) -> None:
        """Draft one more token of every row that still drafts, then the tokens after it."""
        active, made = self._active, self._round
        made = made._replace(thresholds=self._thresholds[step])
        goes_on = step + 1 < MAX_AHEAD
        condition = control.condition(made.all_done) if goes_on else None
        with control.rows(active.num_active):
            assert active.token_ids is not None
            state = self._head.step(state, self._head.embed(active.token_ids), self._seen)
            ops.place_head(
                None,
                self._drafted,
                as_probability=True,
                vocabulary=self._head.tokens,
                measure=self._head.measure,
                hidden=state,
            )
            ops.append_drafts(
                None,
                self._drafted.token,
                self._drafted.confidence,
                step,
                made,
                active,
                condition=condition,
                own_key=self._last is not None,
            )
            if control.compacts:
                ops.compact_rows(made.done, active, state)
        if goes_on:
            control.unless(made.all_done, lambda: self._draft(step + 1, state, control), condition)


def add_drafts(outcomes: Ordered[tuple[int, Outcome]], got: Cells) -> None:
    """Add the head's drafts to outcomes, given with their rows: those after the tokens there."""
    tokens, probabilities = got["ahead_tokens"].tolist(), got["ahead_probabilities"].tolist()
    for i, outcome in outcomes:
        last, count = outcome.token_ids[-1], got["num_ahead_drafted"][i]
        if not count or tokens[i][0] != last:  # the text ends before it
            continue
        sequence = outcome.sequence
        num_tokens = len(sequence.prompt_ids) + len(sequence.output_ids) + len(outcome.token_ids)
        drafts = tokens[i][1 : count + 1]
        outcome.ahead = Ahead(num_tokens, last, drafts, probabilities[i][:count])
