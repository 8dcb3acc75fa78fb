"""accept_round: accepted prefixes, greedy and sampled, and where each row goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

import reference
from cases import BATCH_SIZES
from draft_rounds import (
    VOCAB_SIZE,
    Rounds,
    assert_same,
    random_verification,
    round_in,
)
from eecore import ops
from random_calls import Arguments, Checked, Maker, compare


class Verified:
    """A round's drafts and their verification by the full model."""

    def __init__(
        self, num_rows: int, num_steps: int = 4, vocab_size: int = VOCAB_SIZE, device: Any = None
    ) -> None:
        self.rounds = rounds = Rounds(num_rows, num_steps, device)
        self.round = rounds.drafted()
        self.round.tokens.copy_(rounds.whole(vocab_size, num_rows, num_steps + 1))
        max_tokens = num_rows * (num_steps + 1) + 2
        self.verification = reference.begin_verification(self.round, max_tokens)
        # Three in four are the drafts that they are held against.
        self.target = rounds.whole(vocab_size, max_tokens)
        right = rounds.uniform(max_tokens - 1) < 0.75
        self.target[:-1][right] = self.verification.token_ids[1:][right]
        self.ended = rounds.ended()
        self.num_accepted, self.last_row = rounds.whole(99, num_rows), rounds.whole(99, num_rows)
        self.sampling: dict[str, Tensor] = {}

    def sample(self, vocab_size: int) -> None:
        """Let some rows sample: drafts come from q, and p is close to it."""
        rounds, given = self.rounds, self.round
        rows, steps, max_tokens = rounds.num_rows, rounds.num_steps, len(self.target)
        p = (rounds.uniform(max_tokens, vocab_size) * 4).softmax(-1)
        q = torch.full((rows * steps, vocab_size), float("nan"), device=rounds.device)
        starts = self.verification.query_start_loc.tolist()
        for row, drafted in enumerate(given.num_drafted.tolist()):
            if int(given.most[row]) >= 0 and drafted > 0:
                noise = rounds.uniform(drafted, vocab_size)
                near = (p[starts[row] :][:drafted].log() + noise).softmax(-1)
                q[row * steps :][:drafted] = near
                given.tokens[row, 1 : drafted + 1] = torch.multinomial(near.cpu(), 1).flatten()
        p[int(self.verification.num_tokens) :] = float("nan")
        self.sampling = {
            "sampled": rounds.uniform(rows) < 0.7,
            "draft_probs": q,
            "target_probs": p,
            "uniform": rounds.uniform(max_tokens, 2),
        }

    def accept(self) -> None:
        ops.accept_round(
            self.round,
            self.verification,
            self.target,
            self.ended,
            self.num_accepted,
            last_row=self.last_row,
            **self.sampling,
        )

    def check(self) -> None:
        """The op has to do what the reference does."""
        ended, num_accepted, last_row = reference.accept_round(
            self.round, self.verification, self.target, **self.sampling
        )
        self.accept()
        assert torch.equal(self.num_accepted, num_accepted)
        assert torch.equal(self.last_row, last_row)
        assert_same(self.ended, ended)


@pytest.mark.parametrize("num_steps", [1, 6, 40])
@pytest.mark.parametrize("num_seqs", BATCH_SIZES)
def test_greedy_matches_the_reference(num_seqs: int, num_steps: int, device: torch.device) -> None:
    Verified(num_seqs, num_steps, device=device).check()


@pytest.mark.parametrize("vocab_size", [1, 17, 600, 49153])
@pytest.mark.parametrize("num_seqs", [0, 1, 7])
def test_sampling_matches_the_reference(
    num_seqs: int, vocab_size: int, device: torch.device
) -> None:
    torch.manual_seed(num_seqs)
    verified = Verified(num_seqs, 3, vocab_size, device)
    verified.sample(vocab_size)
    verified.check()


def two_drafts(device: torch.device, num_rows: int = 1) -> Verified:
    """Rows with the drafts 2 and 3 after token 4, at position 10, with 8 tokens left."""
    verified = Verified(num_rows, 2, device=device)
    given = verified.round
    for tensor, value in (
        (given.most, 2),
        (given.num_drafted, 2),
        (given.first_position, 10),
        (given.left, 8),
    ):
        tensor.fill_(value)
    given.tokens.copy_(torch.tensor([4, 2, 3]))
    verified.verification = reference.begin_verification(given, 3 * num_rows)
    return verified


def sampled(p: list[float], q: list[float], num_rows: int, device: torch.device) -> Verified:
    """Rows whose drafts come from q, to be accepted for p."""
    verified = two_drafts(device, num_rows)
    drafts = torch.multinomial(torch.tensor(q), 2 * num_rows, replacement=True)
    last = torch.multinomial(torch.tensor(p), 3 * num_rows, replacement=True)
    verified.round.tokens[:, 1:] = drafts.view(num_rows, 2)
    verified.target = last.to(device)
    verified.sampling = {
        "sampled": torch.ones(num_rows, dtype=torch.bool, device=device),
        "draft_probs": torch.tensor(q, device=device).repeat(2 * num_rows, 1),
        "target_probs": torch.tensor(p, device=device).repeat(3 * num_rows, 1),
        "uniform": torch.rand(3 * num_rows, 2).to(device),
    }
    return verified


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.1, 0.2, 0.3, 0.25, 0.15], [0.15, 0.25, 0.2, 0.2, 0.2]),
        ([0.7, 0.1, 0.1, 0.05, 0.05], [0.02, 0.08, 0.1, 0.3, 0.5]),
        ([0.5, 0.3, 0.2, 0.0, 0.0], [0.0, 0.0, 0.0, 0.4, 0.6]),
    ],
    ids=["close", "far", "disjoint"],
)
def test_each_emitted_token_has_the_distribution_of_the_target(
    p: list[float], q: list[float], device: torch.device
) -> None:
    torch.manual_seed(5)
    verified = sampled(p, q, 4000, device)
    verified.accept()
    accepted, following = verified.num_accepted.cpu(), verified.ended.next_token.cpu()
    for place in range(3):
        drafts = verified.round.tokens[:, min(place + 1, 2)].cpu()
        there = accepted >= place
        tokens = torch.where(accepted > place, drafts, following)[there]
        counts = torch.bincount(tokens, minlength=5)
        assert counts[torch.tensor(p) == 0].sum() == 0
        seen = torch.tensor(p) > 0
        expected = torch.tensor(p, dtype=torch.float64)[seen] * int(there.sum())
        if len(tokens) > 50:
            assert chisquare(counts[seen], expected / expected.sum() * counts.sum()).pvalue > 1e-4


def test_no_probability_gives_minus_one(device: torch.device) -> None:
    verified = sampled([0.5, 0.5, 0, 0, 0], [0.5, 0.5, 0, 0, 0], 1, device)
    verified.sampling["target_probs"].fill_(float("nan"))
    verified.accept()
    assert verified.num_accepted.tolist() == [0]
    assert verified.ended.next_token.tolist() == [-1]


def test_a_draft_that_is_no_token_is_refused(device: torch.device) -> None:
    verified = sampled([0, 0, 0, 1.0, 0], [0, 0, 0, 1.0, 0], 2, device)
    verified.round.tokens[:, 2] = torch.tensor([-1, 5])
    verified.accept()
    assert verified.num_accepted.tolist() == [1, 1]
    assert verified.ended.next_token.tolist() == [3, 3]


def fuzzed_call(m: Maker) -> Checked:
    rows, steps, vocab = m.size(9), m.size(5), m.size(40, 1)
    given, verification = random_verification(m, rows, steps)
    tokens = len(verification.token_ids)
    given["tokens"].clamp_(max=vocab - 1)
    del given["round_slots"]
    samples = m.chance()
    given |= {
        "query_start_loc": m.placed(verification.query_start_loc),
        "target": m.placed(m.whole(min(vocab, 3), tokens)),
        "next_token": m.placed(m.whole(9, rows)),
        "next_position": m.placed(m.whole(9, rows)),
        "next_left": m.placed(m.whole(9, rows)),
        "num_accepted": m.placed(m.whole(9, rows)),
        "last_row": m.maybe(lambda: m.placed(m.whole(9, rows))),
        "sampled": m.flags(rows) if samples else None,
        "draft_probs": m.placed(m.normal(rows * steps, vocab).softmax(-1)) if samples else None,
        "target_probs": m.placed(m.normal(tokens, vocab).softmax(-1)) if samples else None,
        "uniform": m.placed(m.uniform(tokens, 2)) if samples else None,
    }
    given["tokens"].clamp_(min=0)

    def oracle(before: Arguments) -> dict[str, Tensor]:
        names = ("sampled", "draft_probs", "target_probs", "uniform")
        ended, accepted, last_row = reference.accept_round(
            round_in(before),
            verification,
            before["target"],
            **{n: before[n] for n in names},
        )
        new = {**ended._asdict(), "num_accepted": accepted}
        return new if before["last_row"] is None else {**new, "last_row": last_row}

    return given, compare(oracle)
