"""Rounds of drafts: how they begin, grow, are verified and end."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eecore.ops.exits import ActiveRows
from eecore.ops.registered import compiled

__all__ = [
    "DraftRound",
    "DraftedAhead",
    "EndedRound",
    "SpeculativeAccept",
    "Verification",
    "accept_round",
    "append_drafts",
    "begin_round",
    "begin_verification",
    "gather_states",
    "speculative_accept",
]

_accept_round = compiled("accept_round")
_append_drafts = compiled("append_drafts")
_begin_round = compiled("begin_round")
_begin_verification = compiled("begin_verification")
_gather_states = compiled("gather_states")
_speculative_accept = compiled("speculative_accept")


class DraftRound(NamedTuple):
    """A round of self-speculation: up to num_steps drafts for each of a program's rows.

    The ops of a round write the tensors from ``first_position`` to ``states``, and read them again.
    """

    token_ids: Tensor
    """int64 [num_rows]: the last token of each row's text."""
    start: Tensor
    """int64 [num_rows]: the position of ``token_ids``."""
    tokens_left: Tensor
    """int64 [num_rows]: how many tokens the text may still have; a round gives one or more."""
    max_drafts: Tensor
    """int64 [num_rows]: drafts that the row has pages for; -1 for padding."""
    page_table: Tensor
    """int32 [num_rows, max_pages], any row stride."""
    thresholds: Tensor
    """float32 [num_rows]: drafting ends with a token whose confidence is below it."""
    stop_tokens: Tensor
    """int64 [num_rows, num_stop_tokens], filled up with -1: drafting ends with one of them."""
    first_position: Tensor
    """int64 [num_rows]: the position of the round's first token, which is the last of the text."""
    left: Tensor
    """int64 [num_rows], tokens left at the start of the round."""
    round_slots: Tensor
    """int64 [num_rows, num_steps + 1]: cache slots of the round's tokens, -1 for tokens that a row
    cannot have."""
    tokens: Tensor
    """int64 [num_rows, num_steps + 1]: the round's first token, then the drafts."""
    confidences: Tensor
    """float32 [num_rows, num_steps], of the drafts."""
    num_drafted: Tensor
    """int64 [num_rows]"""
    most: Tensor
    """int64 [num_rows]: maximum drafts of the row; -1 for rows without a round, which are padding
    and rows whose text has no tokens left."""
    done: Tensor
    """bool [num_rows]: rows that draft no more."""
    all_done: Tensor
    """bool [1]"""
    states: Tensor | None
    """[num_rows, num_steps + 1, hidden_size], contiguous rows: states after the drafting layers,
    for the verification; undefined for rows and steps that were not drafted. None: the
    verification runs all layers."""
    drafts: Tensor | None = None
    """int64 [num_rows, num_steps]: drafts that are given to rows; with ``num_given``."""
    num_given: Tensor | None = None
    """int64 [num_rows]: drafts given to the row, which then drafts none itself; -1: it drafts, or
    takes the drafts that were made after the round that it continues."""


class EndedRound(NamedTuple):
    """Where each row's text goes on after a round."""

    next_token: Tensor
    """int64 [num_rows]: the token after the accepted ones; -1 where no token has a positive
    probability."""
    next_position: Tensor
    """int64 [num_rows]: the position of ``next_token``."""
    next_left: Tensor
    """int64 [num_rows]: how many tokens the text may still have."""


class DraftedAhead(NamedTuple):
    """Drafts made after each row of an ended round, for the next round."""

    tokens: Tensor
    """int64 [num_rows, num_steps + 1]: the token that the round ended with, then the drafts."""
    probabilities: Tensor
    """float32 [num_rows, num_steps], of the drafts."""
    num_drafted: Tensor
    """int64 [num_rows]"""


class Verification(NamedTuple):
    """The input of the layers that verify a round: each row's last token, then all, ragged."""

    last_tokens: Tensor
    """int64 [num_rows]: the last token of each round, which the drafting layers have not seen."""
    last_positions: Tensor
    """int64 [num_rows]; 0 without a round."""
    last_slots: Tensor
    """int64 [num_rows]; -1 without a round."""
    last_seq_lens: Tensor
    """int32 [num_rows]; 1 without a round."""
    token_ids: Tensor
    """int64 [max_tokens], max_tokens >= num_rows * (num_steps + 1): the tokens of all rounds, one
    after the other; 0 after num_tokens."""
    positions: Tensor
    """int64 [max_tokens]; 0 after num_tokens."""
    slot_mapping: Tensor
    """int64 [max_tokens]; -1 after num_tokens."""
    sequence: Tensor
    """int32 [max_tokens]: the row of each token; 0 after num_tokens."""
    seq_lens: Tensor
    """int32 [num_rows]; 0 without a round."""
    query_start_loc: Tensor
    """int32 [num_rows + 1]: row r has the tokens from its entry up to the next."""
    num_tokens: Tensor
    """int32 [1]"""


def begin_round(
    draft_round: DraftRound,
    active: ActiveRows,
    page_size: int,
    *,
    ended: EndedRound | None = None,
    sources: Tensor | None = None,
    ahead: DraftedAhead | None = None,
    condition: int | None = None,
    own_key: bool = True,
) -> None:
    """Begin a round: where each row starts, how far it may draft, and where its tokens go.

    A row drafts at most ``max_drafts`` tokens, and one fewer than it has left; it takes at most as
    many of the drafts that it is given. (LayerSkip §4.3.)

    Args:
        draft_round: its inputs are read, its other tensors are written, except for confidences and
            states.
        active: all rows of the round, written; rows that draft nothing are masked. It has
            ``token_ids``; its page tables and ``num_active`` stay as they are.
        page_size: slots of a page.
        ended: where the rows of an earlier round go on; with ``sources``.
        sources: int32 [num_rows]: the row of ``ended`` that a row continues; -1: the row starts
            from ``token_ids``.
        ahead: drafts made after ``ended``: rows that continue a row of it and have ``num_given`` -1
            are given these drafts, up to the first that is less likely than the row's threshold.
            The round has ``drafts``.
        condition: see :func:`exit_rows`; its body runs if a row drafts.
        own_key: ``seq_lens`` of a row that drafts count its own key, which a layer writes before
            it attends; False: only the keys before it, at least one.
    """
    _begin_round(
        draft_round.token_ids,
        draft_round.start,
        draft_round.tokens_left,
        draft_round.max_drafts,
        draft_round.page_table,
        page_size,
        sources,
        *(ended or (None, None, None)),
        draft_round.drafts,
        draft_round.num_given,
        *(ahead or (None, None, None)),
        None if ahead is None else draft_round.thresholds,
        draft_round.first_position,
        draft_round.left,
        draft_round.round_slots,
        draft_round.tokens,
        draft_round.num_drafted,
        draft_round.most,
        draft_round.done,
        draft_round.all_done,
        active.row,
        active.token_ids,
        active.positions,
        active.slot_mapping,
        active.seq_lens,
        condition,
        own_key,
    )


def append_drafts(
    hidden: Tensor | None,
    token: Tensor,
    confidence: Tensor,
    step: int,
    draft_round: DraftRound,
    active: ActiveRows,
    *,
    condition: int | None = None,
    own_key: bool = True,
) -> None:
    """Append a drafted token to every row that drafts; decide which rows draft another, and where.

    Rows that are not active must be done: ``all_done`` is computed from active rows. A token of -1,
    from a row without probabilities, is kept as it is and embedded as 0. (LayerSkip §4.3.)

    Args:
        hidden: [num_active, hidden_size], states after the drafting layers, at the last token so
            far; None where the round keeps no states.
        token: int64 [num_active], the drafts.
        confidence: float32 [num_active], of the drafts; NaN ends drafting.
        step: drafts of the round before this one, 0..num_steps-1.
        draft_round: updated in place.
        active: updated in place; it has ``token_ids``.
        condition: see :func:`exit_rows`; its body runs if a row drafts another.
        own_key: ``seq_lens`` count the next token's own key; False: drafts have no keys, and
            ``seq_lens`` of rows that go on stay as they are.
    """
    _append_drafts(
        hidden,
        token,
        confidence,
        step,
        draft_round.thresholds,
        draft_round.stop_tokens,
        draft_round.most,
        draft_round.round_slots,
        active.row,
        draft_round.states,
        draft_round.tokens,
        draft_round.confidences,
        draft_round.num_drafted,
        draft_round.done,
        draft_round.all_done,
        active.token_ids,
        active.positions,
        active.slot_mapping,
        active.seq_lens,
        condition,
        own_key,
    )


def begin_verification(draft_round: DraftRound, verification: Verification) -> None:
    """Lay out the input that verifies a round's drafts: every row's tokens, the first included.

    (LayerSkip §4.3.)

    Args:
        draft_round: a round with its drafts.
        verification: written.
    """
    _begin_verification(
        draft_round.first_position,
        draft_round.round_slots,
        draft_round.tokens,
        draft_round.num_drafted,
        draft_round.most,
        *verification,
    )


def gather_states(
    states: Tensor, last: Tensor, verification: Verification, out: Tensor | None = None
) -> Tensor:
    """States after the drafting layers, for a verification: kept states and those of last tokens.

    Args:
        states: [num_rows, num_steps + 1, hidden_size], contiguous rows, of a draft round.
        last: [num_rows, hidden_size], any row stride, states of the last tokens.
        verification: the layout of the rows.
        out: [max_tokens, hidden_size], any row stride that keeps rows apart. Rows after num_tokens
            are zeros on CUDA, where layers compute with them, and not written on the CPU.

    Returns:
        ``out``, allocated when left out.
    """
    if out is None:
        out = states.new_empty(verification.token_ids.shape[0], states.shape[2])
    _gather_states(
        states,
        last,
        verification.sequence,
        verification.query_start_loc,
        verification.num_tokens,
        out,
    )
    return out


def accept_round(
    draft_round: DraftRound,
    verification: Verification,
    target: Tensor,
    ended: EndedRound,
    num_accepted: Tensor,
    *,
    sampled: Tensor | None = None,
    draft_probs: Tensor | None = None,
    target_probs: Tensor | None = None,
    uniform: Tensor | None = None,
    last_row: Tensor | None = None,
) -> None:
    """Accept the longest valid prefix of each row's drafts, and write where its text goes on.

    Greedy rows accept drafts while they equal the target's tokens. Rows that sample accept and draw
    as :func:`speculative_accept` does, except that with all drafts accepted the next token is the
    target's, which is already a sample of its distribution. A row without a round keeps its
    position. (LayerSkip §4.3.2; Leviathan et al. 2023.)

    Args:
        draft_round: a round with its drafts.
        verification: the layout that verified these drafts.
        target: int64 [max_tokens], the full model's token after each ragged row: the most probable
            token, or for rows that sample a drawn token.
        ended: written.
        num_accepted: int64 [num_rows], written.
        sampled: bool [num_rows]; None: all rows are greedy. The arguments below are given with it.
        draft_probs: float32 [num_rows * num_steps, vocab_size], the distribution of each draft; for
            greedy rows and missing drafts it may hold anything.
        target_probs: float32 [max_tokens, vocab_size], the full model's at each ragged row.
        uniform: float32 [max_tokens, 2] in [0, 1): for each ragged row one number to accept the
            draft after it, and one to draw another token instead. A number that has drawn a token
            must not be used again in a later round, so each position has its own numbers.
        last_row: int64 [num_rows], written: the ragged row whose state gave the next token; 0
            without a round.
    """
    _accept_round(
        draft_round.tokens,
        draft_round.num_drafted,
        draft_round.most,
        draft_round.first_position,
        draft_round.left,
        verification.query_start_loc,
        target,
        *ended,
        num_accepted,
        sampled,
        draft_probs,
        target_probs,
        uniform,
        last_row,
    )


class SpeculativeAccept(NamedTuple):
    """The outcome of a verification: emit ``drafts[:num_accepted] + [next_token]``."""

    num_accepted: Tensor
    """int32 [num_seqs]"""
    next_token: Tensor
    """int64 [num_seqs]: -1 where the target row has no positive probability, as in a row of NaN."""


def speculative_accept(
    draft_tokens: Tensor,
    draft_start_loc: Tensor,
    *,
    target_tokens: Tensor | None = None,
    draft_probs: Tensor | None = None,
    target_probs: Tensor | None = None,
    uniform: Tensor | None = None,
) -> SpeculativeAccept:
    """Accept the longest valid prefix of each sequence's drafts and give the token after it.

    Greedy (``target_tokens``): drafts are accepted while they equal the target's argmax; the next
    token is the target's at the first difference. Sampling (``draft_probs``, ``target_probs`` and
    ``uniform``): draft x is accepted with probability ``min(1, p(x) / q(x))``; at the first
    rejection the next token is drawn from the normalised positive part of p - q (from p where
    nothing is left of it), after the last acceptance from p. A token of zero probability is never
    drawn. (LayerSkip §4.3.2; Leviathan et al. 2023.)

    Sequence s has drafts ``draft_start_loc[s]..draft_start_loc[s+1]`` and target rows
    ``draft_start_loc[s]+s..draft_start_loc[s+1]+s`` inclusive: one more than drafts, for the
    token after.

    Args:
        draft_tokens: int64 [num_drafts].
        draft_start_loc: int32 [num_seqs + 1].
        target_tokens: int64 [num_drafts + num_seqs].
        draft_probs: float32 [num_drafts, vocab_size].
        target_probs: float32 [num_drafts + num_seqs, vocab_size].
        uniform: float32 [num_drafts + num_seqs] in [0, 1): one per draft, then the sequence's last
            for its next token, laid out like the target rows.
    """
    num_seqs = draft_start_loc.numel() - 1
    num_accepted = torch.empty(max(num_seqs, 0), dtype=torch.int32, device=draft_tokens.device)
    next_token = torch.empty(max(num_seqs, 0), dtype=torch.int64, device=draft_tokens.device)
    _speculative_accept(
        draft_tokens,
        draft_start_loc,
        target_tokens,
        draft_probs,
        target_probs,
        uniform,
        num_accepted,
        next_token,
    )
    return SpeculativeAccept(num_accepted, next_token)
