"""begin_round: rows' first positions, their maximum draft length, and the slots of drafts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import reference
from cases import BATCH_SIZES
from draft_rounds import (
    PAGE_SIZE,
    Rounds,
    active_in,
    arguments_of_active,
    arguments_of_round,
    assert_same,
    random_round,
    round_in,
)
from eecore import ops
from random_calls import Arguments, Checked, Maker, compare


@pytest.mark.parametrize("own_key", [True, False])
@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("num_steps", [1, 6])
@pytest.mark.parametrize("num_seqs", BATCH_SIZES)
def test_a_round_matches_the_reference(
    num_seqs: int, num_steps: int, follows: bool, own_key: bool, device: torch.device
) -> None:
    rounds = Rounds(num_seqs, num_steps, device)
    given, active = rounds.given(), rounds.active()
    ended = rounds.ended() if follows else None
    sources = (rounds.whole(num_seqs + 1, num_seqs) - 1).to(torch.int32) if follows else None
    expected = reference.begin_round(given, active, PAGE_SIZE, ended, sources, own_key=own_key)
    ops.begin_round(given, active, PAGE_SIZE, ended=ended, sources=sources, own_key=own_key)
    assert_same(given, expected[0])
    assert_same(active, expected[1])


@pytest.mark.parametrize("own_key", [True, False])
def test_keys_before_a_first_token(own_key: bool, device: torch.device) -> None:
    """There is at least one key, of any content."""
    rounds = Rounds(2, 4, device)
    given, active = rounds.given(), rounds.active()
    given.start.copy_(torch.tensor([0, 5]))
    given.max_drafts.fill_(2)
    given.tokens_left.fill_(9)
    ops.begin_round(given, active, PAGE_SIZE, own_key=own_key)
    assert active.seq_lens.tolist() == [1, 5 + own_key]


@pytest.mark.parametrize(
    ("max_drafts", "tokens_left", "most"),
    [(-1, 9, -1), (0, 9, 0), (9, 9, 4), (3, 9, 3), (9, 3, 2), (9, 1, 0), (9, 0, -1), (-1, -5, -1)],
)
def test_how_far_a_row_drafts(
    max_drafts: int, tokens_left: int, most: int, device: torch.device
) -> None:
    rounds = Rounds(1, 4, device)
    given, active = rounds.given(), rounds.active()
    for tensor, value in ((given.max_drafts, max_drafts), (given.tokens_left, tokens_left)):
        tensor.fill_(value)
    given.start.fill_(PAGE_SIZE - 2)
    given.page_table[:, :2] = torch.tensor([7, 3])
    ops.begin_round(given, active, PAGE_SIZE)
    slots = [7 * PAGE_SIZE + PAGE_SIZE - 2, 7 * PAGE_SIZE + PAGE_SIZE - 1]
    slots += [3 * PAGE_SIZE + k for k in range(3)]
    assert given.most.tolist() == [most]
    assert given.round_slots.tolist() == [[s if k <= most else -1 for k, s in enumerate(slots)]]
    assert given.done.tolist() == given.all_done.tolist() == [most <= 0]
    assert active.slot_mapping.tolist() == [slots[0] if most > 0 else -1]
    assert active.seq_lens.tolist() == [PAGE_SIZE - 1 if most > 0 else 1]


@pytest.mark.parametrize("num_seqs", BATCH_SIZES)
def test_rows_that_go_on_with_what_was_drafted_ahead(num_seqs: int, device: torch.device) -> None:
    """The earlier round has fewer rows; the remaining rows have drafts of their own."""
    rounds, num_ended = Rounds(num_seqs, 5, device), (num_seqs + 1) // 2
    given = rounds.given()._replace(
        drafts=rounds.whole(9, num_seqs, 5), num_given=rounds.whole(8, num_seqs) - 1
    )
    active, ended = rounds.active(), ops.EndedRound(*(t[:num_ended] for t in rounds.ended()))
    ahead = rounds.ahead(num_ended)
    sources = (rounds.whole(num_ended + 1, num_seqs) - 1).to(torch.int32)
    expected = reference.begin_round(given, active, PAGE_SIZE, ended, sources, ahead)
    ops.begin_round(given, active, PAGE_SIZE, ended=ended, sources=sources, ahead=ahead)
    assert_same(given, expected[0])
    assert_same(active, expected[1])


def test_drafts_ahead_end_before_one_that_is_unlikely(device: torch.device) -> None:
    """A probability of NaN ends drafts too; one equal to the threshold does not."""
    probabilities = [[0.5, 0.9, 0.9], [0.9, 0.4999, 0.9], [0.9, float("nan"), 0.9], [0.9] * 3]
    rounds = Rounds(4, 4, device)
    given = rounds.given()._replace(
        drafts=rounds.whole(9, 4, 4), num_given=torch.full((4,), -1, device=device)
    )
    given.max_drafts.fill_(9)
    given.thresholds.fill_(0.5)
    ended = rounds.ended()
    ended.next_left.fill_(9)
    ahead = ops.DraftedAhead(
        torch.arange(16, device=device).view(4, 4),
        torch.tensor(probabilities, device=device),
        torch.tensor([3, 3, 3, 2], device=device),
    )
    sources = torch.arange(4, dtype=torch.int32, device=device)
    ops.begin_round(given, rounds.active(), PAGE_SIZE, ended=ended, sources=sources, ahead=ahead)
    assert given.num_drafted.tolist() == [3, 1, 1, 2]
    assert given.tokens[0, 1:4].tolist() == [1, 2, 3]
    assert given.tokens[3, 1:3].tolist() == [13, 14]
    assert given.all_done.item()


def fuzzed_call(m: Maker) -> Checked:
    rows, steps, page_size, pages = m.size(9), m.size(6), m.size(9, 1), m.size(5, 1)
    room = pages * page_size
    start = m.whole(room, rows)
    most = torch.minimum(m.whole(steps + 3, rows) - 1, room - 1 - start)
    ended, is_given = m.chance(), m.chance()
    num_ended = m.size(5, 1)
    given = {
        "token_ids": m.placed(m.whole(9, rows) - 1),
        "start": m.placed(start),
        "tokens_left": m.placed(m.whole(2 * steps + 2, rows)),
        "max_drafts": m.placed(most),
        "page_table": m.placed(m.whole(50, rows, pages).int(), 1),
        "page_size": page_size,
        "sources": None,
        "next_token": None,
        "next_position": None,
        "next_left": None,
        "drafts": m.placed(m.whole(9, rows, steps)) if is_given else None,
        "num_given": m.placed(m.whole(steps + 3, rows) - 1) if is_given else None,
        "ahead_tokens": None,
        "ahead_probabilities": None,
        "num_ahead": None,
        "thresholds": None,
        **random_round(m, rows, steps),
        "row": m.placed(m.whole(9, rows).int()),
        "active_token_ids": m.placed(m.whole(9, rows)),
        "positions": m.placed(m.whole(9, rows)),
        "slot_mapping": m.placed(m.whole(9, rows)),
        "seq_lens": m.placed(m.whole(9, rows).int()),
        "own_key": m.chance(),
    }
    if ended:
        # A row that goes on has room for one draft more than its maximum.
        deep = max(room - steps - 4, 1)
        given |= {
            "sources": m.placed(
                torch.where(most > room - deep - 1, -1, m.whole(num_ended, rows)).int()
            ),
            "next_token": m.placed(m.whole(9, num_ended) - 1),
            "next_position": m.placed(m.whole(deep, num_ended)),
            "next_left": m.placed(m.whole(steps + 2, num_ended)),
        }
    if ended and is_given and m.chance():
        ahead = m.size(6)
        given |= {
            "ahead_tokens": m.placed(m.whole(9, num_ended, ahead + 1)),
            "ahead_probabilities": m.placed(m.uniform(num_ended, ahead)),
            "num_ahead": m.placed(m.whole(ahead + 1, num_ended)),
            "thresholds": m.placed(m.uniform(rows)),
        }

    def oracle(before: Arguments) -> dict[str, Tensor]:
        following = None
        if before["sources"] is not None:
            fields = ("next_token", "next_position", "next_left")
            following = ops.EndedRound(*(before[n] for n in fields))
        ahead = None
        if before["ahead_tokens"] is not None:
            fields = ("ahead_tokens", "ahead_probabilities", "num_ahead")
            ahead = ops.DraftedAhead(*(before[n] for n in fields))
        made, active = reference.begin_round(
            *(round_in(before), active_in(before), page_size, following, before["sources"], ahead),
            own_key=before["own_key"],
        )
        return {**arguments_of_round(made), **arguments_of_active(active), "row": active.row}

    return given, compare(oracle)
