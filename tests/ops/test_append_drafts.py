"""append_drafts: what ends a draft, what is kept of a token, who is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import emulated
import reference
from cases import BATCH_SIZES, DTYPES, HIDDEN_SIZES
from eecore import ops

VOCAB_SIZE = 5


class Drafting:
    """A round before its first draft, and random drafts for it."""

    def __init__(
        self,
        num_seqs: int,
        num_steps: int = 4,
        hidden_size: int = 33,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.generator = torch.Generator().manual_seed(100 * num_steps + num_seqs)
        self.num_seqs, self.hidden_size, self.dtype = num_seqs, hidden_size, dtype
        self.device = device
        width = num_steps + 1
        max_drafts = self.whole(width, num_seqs)
        positions = self.whole(50, num_seqs)
        slots = self.whole(99, num_seqs, width)
        drafting = max_drafts > 0
        self.round = ops.DraftRound(
            thresholds=self.uniform(num_seqs) * 0.3,
            stop_tokens=torch.where(self.uniform(num_seqs, 2) < 0.5, -1, 2),
            max_drafts=max_drafts,
            round_slots=slots,
            # A state for others between two of a row.
            states=self.uniform(num_seqs, 2 * width, hidden_size).to(dtype)[:, ::2],
            tokens=self.whole(VOCAB_SIZE, num_seqs, width),
            confidences=self.uniform(num_seqs, num_steps),
            num_drafted=torch.zeros(num_seqs, dtype=torch.int64, device=device),
            drafting=drafting,
            last_token=self.whole(VOCAB_SIZE, num_seqs),
            positions=positions,
            slot_mapping=torch.where(drafting, slots[:, 0], -1),
            seq_lens=torch.where(drafting, positions + 1, 1).to(torch.int32),
            all_done=torch.zeros(1, dtype=torch.bool, device=device),
        )

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator).to(self.device)

    def whole(self, below: int, *shape: int) -> torch.Tensor:
        return (self.uniform(*shape) * below).to(torch.int64)

    def draft(self) -> tuple[torch.Tensor, ops.SoftmaxConfidence]:
        """A state, a token and a confidence for every row."""
        rows = self.uniform(self.num_seqs, self.hidden_size + 1).to(self.dtype)[:, 1:]
        confidence, token = self.uniform(self.num_seqs), self.whole(VOCAB_SIZE, self.num_seqs)
        return rows, ops.SoftmaxConfidence(confidence, token, confidence, confidence)

    def check(self, step: int) -> None:
        """That the op does what the reference says."""
        hidden, head = self.draft()
        expected = reference.append_drafts(hidden, head, step, self.round)
        drafted = self.round.drafting.clone()
        ops.append_drafts(hidden, head, step, self.round)
        for name, want, got in zip(self.round._fields, expected, self.round, strict=True):
            if name == "states":  # of those that did not draft it may be anything
                want, got = want[drafted], got[drafted]
            assert torch.equal(got, want), name


@pytest.mark.parametrize("num_steps", [1, 2, 6])
@pytest.mark.parametrize("num_seqs", BATCH_SIZES)
def test_a_round_matches_the_reference(num_seqs: int, num_steps: int, device: torch.device) -> None:
    drafting = Drafting(num_seqs, num_steps, device=device)
    for step in range(num_steps):
        drafting.check(step)
    assert bool(drafting.round.all_done)
    assert torch.equal(drafting.round.num_drafted > 0, drafting.round.max_drafts > 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_states(hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    if not emulated.supports(device, dtype):
        pytest.skip("float16 is for CUDA")
    drafting = Drafting(3, 2, hidden_size, dtype, device)
    drafting.round.max_drafts.fill_(2)
    drafting.round.drafting.fill_(True)
    drafting.check(0)
    drafting.check(1)


@pytest.mark.parametrize(
    ("what", "goes_on"),
    [("nothing", True), ("confidence", False), ("nan", False), ("stop", False), ("most", False)],
)
def test_what_ends_a_draft(what: str, goes_on: bool, device: torch.device) -> None:
    drafting = Drafting(1, 3, device=device)
    given = drafting.round
    given.drafting.fill_(True)
    given.max_drafts.fill_(1 if what == "most" else 3)
    given.thresholds.fill_(0.5)
    given.stop_tokens.copy_(torch.tensor([[3, 4 if what == "stop" else -1]]))
    hidden, head = drafting.draft()
    head.token.fill_(4)
    head.confidence.fill_({"confidence": 0.4, "nan": float("nan")}.get(what, 0.5))
    at = int(given.positions)
    ops.append_drafts(hidden, head, 0, given)
    assert given.drafting.tolist() == [goes_on]
    assert given.all_done.tolist() == [not goes_on]
    assert given.slot_mapping.tolist() == [int(given.round_slots[0, 1]) if goes_on else -1]
    assert given.seq_lens.tolist() == [at + 2 if goes_on else 1]
    assert given.positions.tolist() == [at + 1]  # of the draft, which is the last token either way
    assert given.last_token.tolist() == [4]
    assert given.num_drafted.tolist() == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 4}, "step: expected 0..num_steps-1=3, got 4"),
        ({"step": -1}, "step: expected 0..num_steps-1=3, got -1"),
        (
            {"tokens": torch.zeros(5, 4, dtype=torch.int64)},
            r"tokens: expected int64 \[num_seqs=5, num_steps \+ 1=5\], got int64 \[5, 4\]",
        ),
        ({"thresholds": torch.zeros(5).double()}, "thresholds: expected float32 .* got float64"),
        (
            {"states": torch.zeros(5, 5, 33, dtype=torch.bfloat16)},
            "states: expected float32 .* got bfloat16",
        ),
        ({"all_done": torch.zeros(5, dtype=torch.bool)}, r"all_done: expected bool \[1\], got"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    drafting = Drafting(5)
    step = change.get("step", 0)
    given = drafting.round._replace(**{k: v for k, v in change.items() if k != "step"})
    before = [tensor.clone() for tensor in given]
    with pytest.raises(RuntimeError, match=f"append_drafts: {message}"):
        ops.append_drafts(*drafting.draft(), step, given)
    assert all(torch.equal(old, new) for old, new in zip(before, given, strict=True))


def test_opcheck(device: torch.device) -> None:
    drafting = Drafting(6, device=device)
    hidden, head = drafting.draft()
    torch.library.opcheck(
        torch.ops.eecore.append_drafts.default,
        (hidden, head.token, head.confidence, 0, *drafting.round),
    )
