"""A round of self-speculation, for the benchmarks of its ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.case import PAGE_SIZE, Setting
from eecore import ops


@dataclass(frozen=True)
class Drafting:
    """A round in which every row drafts up to eight tokens, and its verification."""

    draft_round: ops.DraftRound
    active: ops.ActiveRows
    verification: ops.Verification
    ended: ops.EndedRound
    hidden: Tensor
    token: Tensor
    confidence: Tensor
    num_accepted: Tensor
    target: Tensor


def drafting_rows(num_rows: int, hidden_size: int, setting: Setting) -> Drafting:
    """The tensors of a round after its drafts; all tokens are equal."""
    dtype, device = setting.dtype, setting.device
    steps, width, max_tokens = 8, 9, 9 * num_rows

    def whole(*shape: int, value: int = 0) -> Tensor:
        return torch.full(shape, value, device=device)

    def half(*shape: int, value: int = 0) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    draft_round = ops.DraftRound(
        token_ids=whole(num_rows, value=1),
        start=whole(num_rows),
        tokens_left=whole(num_rows, value=100),
        max_drafts=whole(num_rows, value=steps),
        page_table=half(num_rows, 4),
        thresholds=torch.zeros(num_rows, device=device),
        stop_tokens=whole(num_rows, 2, value=-1),
        first_position=whole(num_rows),
        left=whole(num_rows),
        round_slots=whole(num_rows, width),
        tokens=whole(num_rows, width, value=1),
        confidences=torch.zeros(num_rows, steps, device=device),
        num_drafted=whole(num_rows),
        most=whole(num_rows),
        done=torch.zeros(num_rows, dtype=torch.bool, device=device),
        all_done=torch.zeros(1, dtype=torch.bool, device=device),
        states=torch.zeros(num_rows, width, hidden_size, dtype=dtype, device=device),
    )
    active = ops.ActiveRows(
        row=half(num_rows),
        positions=whole(num_rows),
        slot_mapping=whole(num_rows),
        seq_lens=half(num_rows, value=1),
        page_table=half(num_rows, 4),
        num_active=half(1, value=num_rows),
        token_ids=whole(num_rows),
    )
    ops.begin_round(draft_round, active, PAGE_SIZE)
    draft_round.num_drafted.fill_(steps)
    verification = ops.Verification(
        *(whole(num_rows) for _ in range(3)),
        half(num_rows),
        *(whole(max_tokens) for _ in range(3)),
        half(max_tokens),
        half(num_rows),
        half(num_rows + 1),
        half(1),
    )
    ops.begin_verification(draft_round, verification)
    return Drafting(
        draft_round,
        active,
        verification,
        ops.EndedRound(*(whole(num_rows) for _ in range(3))),
        setting.states(num_rows, hidden_size),
        whole(num_rows, value=1),
        torch.ones(num_rows, device=device),
        whole(num_rows),
        whole(max_tokens, value=1),
    )
