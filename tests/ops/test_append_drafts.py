"""append_drafts: the ends of a draft, the kept fields of a token, the untouched rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import emulated
import reference
from cases import BATCH_SIZES, DTYPES, HIDDEN_SIZES
from draft_rounds import (
    PAGE_SIZE,
    VOCAB_SIZE,
    Rounds,
    active_in,
    arguments_of_active,
    assert_same,
    random_round,
    round_in,
)
from eecore import ops
from random_calls import Arguments, Checked, Maker, compare


class Drafting:
    """A round before its first draft, and random drafts for it."""

    def __init__(
        self,
        num_rows: int,
        num_steps: int = 4,
        hidden_size: int | None = 33,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.rounds = Rounds(num_rows, num_steps, device)
        self.hidden_size, self.dtype = hidden_size, dtype
        states = None
        if hidden_size is not None:  # a state for others between two of a row
            states = self.rounds.uniform(num_rows, 2 * num_steps + 2, hidden_size).to(dtype)[:, ::2]
        self.round, self.active = reference.begin_round(
            self.rounds.given(states), self.rounds.active(), PAGE_SIZE
        )

    def draft(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """A state, a token and a confidence for every active row."""
        rows, hidden = len(self.active.row), None
        if self.hidden_size is not None:
            hidden = self.rounds.uniform(rows, self.hidden_size + 1).to(self.dtype)[:, 1:]
        return hidden, self.rounds.whole(VOCAB_SIZE, rows), self.rounds.uniform(rows)

    def check(self, step: int) -> None:
        """The op has to do what the reference does."""
        drafts = self.draft()
        expected = reference.append_drafts(*drafts, step, self.round, self.active)
        drafted = ~self.round.done
        ops.append_drafts(*drafts, step, self.round, self.active)
        assert_same(self.round, expected[0], but="states")
        assert_same(self.active, expected[1])
        if self.round.states is not None:  # rows that did not draft may hold anything
            assert expected[0].states is not None
            assert torch.equal(self.round.states[drafted], expected[0].states[drafted])


@pytest.mark.parametrize("num_steps", [1, 2, 6])
@pytest.mark.parametrize("num_seqs", BATCH_SIZES)
def test_a_round_matches_the_reference(num_seqs: int, num_steps: int, device: torch.device) -> None:
    drafting = Drafting(num_seqs, num_steps, device=device)
    for step in range(num_steps):
        drafting.check(step)
    assert bool(drafting.round.all_done)
    assert torch.equal(drafting.round.num_drafted > 0, drafting.round.most > 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_states(hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    if not emulated.supports(device, dtype):
        pytest.skip("float16 is for CUDA")
    drafting = Drafting(3, 2, hidden_size, dtype, device)
    drafting.round.most.fill_(2)
    drafting.round.done.fill_(False)
    drafting.check(0)
    drafting.check(1)


@pytest.mark.parametrize(
    ("what", "goes_on"),
    [("nothing", True), ("confidence", False), ("nan", False), ("stop", False), ("most", False)],
)
def test_what_ends_a_draft(what: str, goes_on: bool, device: torch.device) -> None:
    drafting = Drafting(1, 3, device=device)
    given, active = drafting.round, drafting.active
    given.done.fill_(False)
    given.most.fill_(1 if what == "most" else 3)
    given.thresholds.fill_(0.5)
    given.round_slots.copy_(torch.tensor([[20, 21, 22, 23]]))
    given.stop_tokens.copy_(torch.tensor([[3, 4 if what == "stop" else -1]]))
    hidden, token, confidence = drafting.draft()
    token.fill_(4)
    confidence.fill_({"confidence": 0.4, "nan": float("nan")}.get(what, 0.5))
    at = int(active.positions)
    ops.append_drafts(hidden, token, confidence, 0, given, active)
    assert given.done.tolist() == given.all_done.tolist() == [not goes_on]
    assert active.slot_mapping.tolist() == [21 if goes_on else -1]
    assert active.seq_lens.tolist() == [at + 2 if goes_on else 1]
    assert active.positions.tolist() == [at + 1]  # the draft's: the last token in both cases
    assert active.token_ids is not None
    assert active.token_ids.tolist() == [4]
    assert given.num_drafted.tolist() == [1]


def test_no_token_is_kept_and_not_embedded(device: torch.device) -> None:
    drafting = Drafting(1, 3, device=device)
    drafting.round.done.fill_(False)
    hidden, token, confidence = drafting.draft()
    token.fill_(-1)
    confidence.fill_(float("nan"))
    ops.append_drafts(hidden, token, confidence, 0, drafting.round, drafting.active)
    assert drafting.round.tokens[0, 1] == -1
    assert drafting.active.token_ids is not None
    assert drafting.active.token_ids.tolist() == [0]


def fuzzed_call(m: Maker) -> Checked:
    rows, steps, size = m.size(9), m.size(6, 1), m.size(20)
    active = m.size(rows)
    dtype, keeps = m.dtype(), m.chance()
    states = m.normal(rows, steps + 1, size).to(dtype)
    given = {
        "hidden": m.states(active, size, dtype) if keeps else None,
        "token": m.placed(m.whole(9, active) - 1),
        "confidence": m.placed(m.uniform(active)),
        "step": m.random.randrange(steps),
        "thresholds": m.placed(m.uniform(rows) / 2),
        "stop_tokens": m.placed(m.whole(9, rows, m.size(3)) - 1),
        "states": m.placed(states, 1) if keeps else None,
        **random_round(m, rows, steps),
        "confidences": m.placed(m.uniform(rows, steps)),
        "row": m.placed(m.shuffled(rows)[:active].sort().values.int()),
        "active_token_ids": m.placed(m.whole(9, active)),
        "positions": m.placed(m.whole(9, active)),
        "slot_mapping": m.placed(m.whole(9, active)),
        "seq_lens": m.placed(m.whole(9, active).int()),
        "own_key": m.chance(),
    }
    for name in ("first_position", "left"):
        del given[name]

    def oracle(before: Arguments) -> dict[str, Tensor]:
        made, active = reference.append_drafts(
            *(before[n] for n in ("hidden", "token", "confidence", "step")),
            round_in(before),
            active_in(before),
            own_key=before["own_key"],
        )
        names = ("tokens", "confidences", "num_drafted", "done", "all_done")
        new = {name: getattr(made, name) for name in names}
        if made.states is not None:
            new["states"] = made.states
        return {**new, **arguments_of_active(active)}

    return given, compare(oracle)
