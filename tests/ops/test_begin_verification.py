"""begin_verification: each row's last token, and the ragged rows of all rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from cases import BATCH_SIZES
from draft_rounds import Rounds, assert_same, copies, random_drafted, round_in, unchanged
from eecore import ops
from random_calls import Arguments, Checked, Maker, compare


@pytest.mark.parametrize("num_steps", [1, 6])
@pytest.mark.parametrize("num_seqs", BATCH_SIZES)
def test_it_matches_the_reference(num_seqs: int, num_steps: int, device: torch.device) -> None:
    rounds = Rounds(num_seqs, num_steps, device)
    given, max_tokens = rounds.drafted(), num_seqs * (num_steps + 1) + 5
    got = rounds.verification(max_tokens)
    ops.begin_verification(given, got)
    assert_same(got, reference.begin_verification(given, max_tokens))


def test_rows_with_drafts_without_and_without_a_round(device: torch.device) -> None:
    rounds = Rounds(3, 2, device)
    given = rounds.given()._replace(
        first_position=torch.tensor([10, 20, 30], device=device),
        most=torch.tensor([2, -1, 0], device=device),
        num_drafted=torch.tensor([2, 0, 0], device=device),
        tokens=torch.tensor([[5, 6, -1], [1, 1, 1], [8, 0, 0]], device=device),
        round_slots=torch.tensor([[70, 71, 72], [1, 1, 1], [90, -1, -1]], device=device),
    )
    got = rounds.verification()
    ops.begin_verification(given, got)
    assert [tensor.tolist() for tensor in got] == [
        *([0, 0, 8], [12, 0, 30], [72, -1, 90], [13, 1, 31]),
        *([5, 6, 0, 8, 0, 0, 0, 0, 0], [10, 11, 12, 30, 0, 0, 0, 0, 0]),
        *([70, 71, 72, 90, -1, -1, -1, -1, -1], [0, 0, 0, 2, 0, 0, 0, 0, 0]),
        *([13, 0, 31], [0, 3, 3, 4], [4]),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_drafted": torch.tensor([0, 5, 1])},
            r"num_drafted: expected values in \[0, 5\), got 5 at row 1",
        ),
        ({"most": torch.zeros(2).long()}, r"most: expected int64 \[num_rows=3\], got int64 \[2\]"),
        (
            {name: torch.zeros(14).long() for name in ("token_ids", "positions", "slot_mapping")}
            | {"sequence": torch.zeros(14, dtype=torch.int32)},
            r"token_ids: expected at least num_rows \* \(num_steps \+ 1\)=15 rows, got 14",
        ),
        (
            {"query_start_loc": torch.zeros(3, dtype=torch.int32)},
            r"query_start_loc: expected int32 \[num_rows \+ 1=4\], got int32 \[3\]",
        ),
        ({"last_slots": torch.zeros(3)}, "last_slots: expected int64 .* got float32"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    rounds = Rounds(3)
    given, got = rounds.drafted(), rounds.verification()
    got = got._replace(**{k: v for k, v in change.items() if k in got._fields})
    if not set(change) & set(got._fields):
        given = given._replace(**change)
    before = copies(got)
    with pytest.raises(RuntimeError, match=f"begin_verification: {message}"):
        ops.begin_verification(given, got)
    assert unchanged(before, got)


def test_opcheck(device: torch.device) -> None:
    rounds = Rounds(6, device=device)
    given = rounds.drafted()
    torch.library.opcheck(
        torch.ops.eecore.begin_verification.default,
        (
            *(given.first_position, given.round_slots, given.tokens, given.num_drafted),
            *(given.most, *rounds.verification()),
        ),
    )


def fuzzed_call(m: Maker) -> Checked:
    rows, steps = m.size(9), m.size(6)
    given = random_drafted(m, rows, steps)
    tokens = rows * (steps + 1) + m.size(3)
    del given["left"]
    given |= {
        name: m.placed(m.whole(9, count).to(dtype))
        for name, count, dtype in (
            ("last_tokens", rows, torch.int64),
            ("last_positions", rows, torch.int64),
            ("last_slots", rows, torch.int64),
            ("last_seq_lens", rows, torch.int32),
            ("token_ids", tokens, torch.int64),
            ("positions", tokens, torch.int64),
            ("slot_mapping", tokens, torch.int64),
            ("sequence", tokens, torch.int32),
            ("seq_lens", rows, torch.int32),
            ("query_start_loc", rows + 1, torch.int32),
            ("num_tokens", 1, torch.int32),
        )
    }

    def oracle(before: Arguments) -> dict[str, Tensor]:
        made = reference.begin_verification(round_in(before), tokens)
        return made._asdict()

    return given, compare(oracle)
