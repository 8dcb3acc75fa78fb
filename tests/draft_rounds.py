"""Rounds of self-speculation with random contents, for the tests of the ops of a round."""

from __future__ import annotations

import torch
from torch import Tensor

import reference
from eecore import ops
from random_calls import Arguments, Maker

PAGE_SIZE, MAX_PAGES = 8, 4
VOCAB_SIZE = 5


class Rounds:
    """Makes rounds of ``num_rows`` rows, the same ones for the same sizes."""

    def __init__(self, num_rows: int, num_steps: int = 4, device: torch.device | None = None):
        self.num_rows, self.num_steps = num_rows, num_steps
        self.device = device
        self._generator = torch.Generator().manual_seed(100 * num_steps + num_rows)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator).to(self.device)

    def whole(self, below: int, *shape: int) -> Tensor:
        return (self.uniform(*shape) * below).to(torch.int64)

    def active(self) -> ops.ActiveRows:
        """Active rows whose fields are all to be written, except the page table and the count."""
        rows = self.num_rows
        return ops.ActiveRows(
            row=self.whole(99, rows).to(torch.int32),
            positions=self.whole(99, rows),
            slot_mapping=self.whole(99, rows),
            seq_lens=self.whole(99, rows).to(torch.int32),
            page_table=self.whole(99, rows, MAX_PAGES).to(torch.int32),
            num_active=torch.full((1,), rows, dtype=torch.int32, device=self.device),
            token_ids=self.whole(99, rows),
        )

    def given(self, states: Tensor | None = None) -> ops.DraftRound:
        """A round before its start: fields to be written hold anything."""
        rows, width = self.num_rows, self.num_steps + 1
        start = self.whole(MAX_PAGES * PAGE_SIZE, rows)
        room = MAX_PAGES * PAGE_SIZE - 1 - start
        return ops.DraftRound(
            token_ids=self.whole(VOCAB_SIZE, rows),
            start=start,
            tokens_left=self.whole(2 * width, rows),
            max_drafts=torch.minimum(self.whole(width + 3, rows) - 1, room),
            # Other numbers between two rows.
            page_table=self.whole(50, rows, 2 * MAX_PAGES).to(torch.int32)[:, :MAX_PAGES],
            thresholds=self.uniform(rows) * 0.3,
            stop_tokens=torch.where(self.uniform(rows, 2) < 0.5, -1, 2),
            first_position=self.whole(99, rows),
            left=self.whole(99, rows),
            round_slots=self.whole(99, rows, width),
            tokens=self.whole(VOCAB_SIZE, rows, width),
            confidences=self.uniform(rows, self.num_steps),
            num_drafted=self.whole(99, rows),
            most=self.whole(99, rows),
            done=self.uniform(rows) < 0.5,
            all_done=torch.zeros(1, dtype=torch.bool, device=self.device),
            states=states,
        )

    def drafted(self, states: Tensor | None = None) -> ops.DraftRound:
        """A round that has ended: rows with drafts, without drafts, and without a round."""
        rows, width = self.num_rows, self.num_steps + 1
        most = self.whole(width + 1, rows) - 1
        return self.given(states)._replace(
            most=most,
            num_drafted=torch.minimum(self.whole(width, rows), most.clamp(min=0)),
        )

    def verification(self, max_tokens: int | None = None) -> ops.Verification:
        """Memory for a verification, all of which is to be written."""
        rows, total = self.num_rows, max_tokens or self.num_rows * (self.num_steps + 1)
        return ops.Verification(
            *(self.whole(99, rows) for _ in range(3)),
            self.whole(99, rows).to(torch.int32),
            *(self.whole(99, total) for _ in range(3)),
            self.whole(99, total).to(torch.int32),
            self.whole(99, rows).to(torch.int32),
            self.whole(99, rows + 1).to(torch.int32),
            self.whole(99, 1).to(torch.int32),
        )

    def ended(self) -> ops.EndedRound:
        rows, width = self.num_rows, self.num_steps + 1
        room = MAX_PAGES * PAGE_SIZE - width
        return ops.EndedRound(
            self.whole(VOCAB_SIZE + 1, rows) - 1, self.whole(room, rows), self.whole(width, rows)
        )

    def ahead(self, num_ended: int, num_steps: int = 3) -> ops.DraftedAhead:
        """Drafts made ahead, after a round of ``num_ended`` rows."""
        return ops.DraftedAhead(
            self.whole(VOCAB_SIZE, num_ended, num_steps + 1),
            self.uniform(num_ended, num_steps),
            self.whole(num_steps + 1, num_ended),
        )


Rows = ops.ActiveRows | ops.DraftRound | ops.EndedRound | ops.Verification


def assert_same(got: Rows, expected: Rows, *, but: str = "") -> None:
    """All tensors of two tuples have to be equal, except the field ``but``."""
    for name, have, want in zip(got._fields, got, expected, strict=True):
        if want is not None and name != but:
            assert torch.equal(have, want), name


def random_round(m: Maker, rows: int, steps: int) -> Arguments:
    """The tensors that the ops of a round write and read, before its start."""
    return {
        "first_position": m.placed(m.whole(20, rows)),
        "left": m.placed(m.whole(20, rows)),
        "round_slots": m.placed(m.whole(99, rows, steps + 1)),
        "tokens": m.placed(m.whole(9, rows, steps + 1)),
        "num_drafted": m.placed(m.whole(9, rows)),
        "most": m.placed(m.whole(9, rows)),
        "done": m.flags(rows),
        "all_done": m.flags(1),
    }


def random_drafted(m: Maker, rows: int, steps: int) -> Arguments:
    """A round that has ended."""
    most = m.whole(steps + 2, rows) - 1
    given = random_round(m, rows, steps)
    given["most"] = m.placed(most)
    given["num_drafted"] = m.placed(torch.minimum(m.whole(steps + 1, rows), most.clamp(min=0)))
    for name in ("done", "all_done"):
        del given[name]
    return given


def random_verification(m: Maker, rows: int, steps: int) -> tuple[Arguments, ops.Verification]:
    """A drafted round and what verifies it."""
    given = random_drafted(m, rows, steps)
    return given, reference.begin_verification(round_in(given), rows * (steps + 1) + m.size(3))


def round_in(arguments: Arguments) -> ops.DraftRound:
    """The round among some arguments; missing fields stay missing."""
    return ops.DraftRound(*(arguments.get(name) for name in ops.DraftRound._fields))  # type: ignore[arg-type]


def arguments_of_round(made: ops.DraftRound) -> dict[str, Tensor]:
    names = ("first_position", "left", "round_slots", "tokens", "num_drafted", "most", "done")
    return {name: getattr(made, name) for name in (*names, "all_done")}


def active_in(arguments: Arguments) -> ops.ActiveRows:
    """The active rows of some arguments."""
    fields = (arguments.get(name) for name in ops.ActiveRows._fields)
    return ops.ActiveRows(*fields)._replace(token_ids=arguments.get("active_token_ids"))  # type: ignore[arg-type]


def arguments_of_active(active: ops.ActiveRows) -> dict[str, Tensor]:
    assert active.token_ids is not None
    names = ("positions", "slot_mapping", "seq_lens")
    return {"active_token_ids": active.token_ids, **{n: getattr(active, n) for n in names}}
