"""begin_verification: each row's last token, and the ragged rows of all rounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import reference
from cases import BATCH_SIZES
from draft_rounds import Rounds, assert_same, random_drafted, round_in
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
