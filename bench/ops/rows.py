"""Rows of a program, for the benchmarks of ops at which rows exit."""

from __future__ import annotations

import torch

from eecore import ops


def head_rows(num_seqs: int, device: torch.device | None = None) -> ops.SoftmaxConfidence:
    """A possible result of the head for some rows."""
    confidence, logsumexp, top_logit = torch.rand(3, num_seqs, device=device)
    token = torch.zeros(num_seqs, dtype=torch.int64, device=device)
    return ops.SoftmaxConfidence(confidence, token, logsumexp, top_logit)


def active_rows(num_seqs: int, device: torch.device | None = None) -> ops.ActiveRows:
    """All rows of a program, at their first position."""
    zeros = torch.zeros(num_seqs, dtype=torch.int64, device=device)
    return ops.ActiveRows(
        row=torch.arange(num_seqs, dtype=torch.int32, device=device),
        positions=zeros,
        slot_mapping=zeros.clone(),
        seq_lens=torch.ones(num_seqs, dtype=torch.int32, device=device),
        page_table=torch.zeros(num_seqs, 64, dtype=torch.int32, device=device),
        num_active=torch.full((1,), num_seqs, dtype=torch.int32, device=device),
    )
