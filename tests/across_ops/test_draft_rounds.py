"""A whole round of self-speculation: op after op, and replayed from a tape for some of its rows."""

from __future__ import annotations

import torch

import reference
from draft_rounds import PAGE_SIZE, VOCAB_SIZE, Rounds
from eecore import ops

NUM_STEPS, HIDDEN_SIZE = 3, 16


class Round:
    """The memory of a round of ``num_rows`` rows, and the calls of it, all steps drafted."""

    def __init__(self, num_rows: int) -> None:
        rounds = Rounds(num_rows, NUM_STEPS)
        self.given = rounds.given(rounds.uniform(num_rows, NUM_STEPS + 1, HIDDEN_SIZE))
        self.active, self.verification = rounds.active(), rounds.verification()
        self.ended, self.num_accepted = rounds.ended(), rounds.whole(99, num_rows)
        self.hidden = rounds.uniform(NUM_STEPS, num_rows, HIDDEN_SIZE)
        self.token = rounds.whole(VOCAB_SIZE, NUM_STEPS, num_rows)
        self.confidence = rounds.uniform(NUM_STEPS, num_rows) + 0.2
        self.last = rounds.uniform(num_rows, HIDDEN_SIZE)
        self.target = rounds.whole(VOCAB_SIZE, num_rows * (NUM_STEPS + 1))
        self.out = torch.full((num_rows * (NUM_STEPS + 1), HIDDEN_SIZE), 7.0)
        self.count = torch.tensor([num_rows], dtype=torch.int32)

    def draft(self) -> None:
        ops.begin_round(self.given, self.active, PAGE_SIZE)
        drafts = zip(self.hidden, self.token, self.confidence, strict=True)
        for step, (hidden, token, confidence) in enumerate(drafts):
            ops.append_drafts(hidden, token, confidence, step, self.given, self.active)
        ops.begin_verification(self.given, self.verification)

    def gather(self) -> None:
        assert self.given.states is not None
        ops.gather_states(self.given.states, self.last, self.verification, self.out)

    def accept(self) -> None:
        ops.accept_round(self.given, self.verification, self.target, self.ended, self.num_accepted)


def test_a_tape_replays_the_rows_that_there_are() -> None:
    """Their results are the reference's for these rows alone; the remaining rows do not change."""
    for num_rows in (0, 3, 5):
        memory, tape = Round(5), ops.Tape()
        with tape.record():
            with tape.rows(memory.count):
                memory.draft()
            with tape.rows(memory.verification.num_tokens, memory.count):
                memory.gather()
            with tape.rows(memory.count):
                memory.accept()
        memory.count.fill_(num_rows)
        before = [tensor.clone() for tensor in (*memory.ended, memory.num_accepted)]
        expected = Round(5)
        made, active = reference.begin_round(expected.given, expected.active, PAGE_SIZE)
        for step in range(NUM_STEPS):
            drafts = (expected.hidden[step], expected.token[step], expected.confidence[step])
            made, active = reference.append_drafts(*drafts, step, made, active)
        made = type(made)(*(None if t is None or len(t) != 5 else t[:num_rows] for t in made))
        verification = reference.begin_verification(made, len(expected.target))
        assert made.states is not None
        states = reference.gather_states(made.states, expected.last, verification)
        ended, num_accepted, _ = reference.accept_round(made, verification, expected.target)

        tape.replay()
        assert bool(memory.given.all_done)
        outcomes = (*memory.ended, memory.num_accepted)
        for got, want, old in zip(outcomes, (*ended, num_accepted), before, strict=True):
            assert torch.equal(got[:num_rows], want)
            assert torch.equal(got[num_rows:], old[num_rows:])
        count = int(verification.num_tokens)
        assert torch.equal(memory.out[:count], states[:count])
        assert (memory.out[count:] == 7.0).all()
