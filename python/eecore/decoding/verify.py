"""The second half of self-speculation: how many drafts stand, and the token after them.

(LayerSkip §4.3.2; Leviathan et al. 2023.) The rows of a verification go through the layers with
everybody else's; here their heads are compared with the drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eecore import ops
from eecore.decoding.draft import Draft
from eecore.decoding.draft_stop import stop_rule
from eecore.decoding.heads import Heads
from eecore.decoding.sampling import NO_TOKEN, filtered_probs, generator_of
from eecore.exits import DraftAndVerify
from eecore.scheduling.sequence import Sequence

__all__ = ["Acceptance", "accept", "needs_next"]


# Accepted drafts, and the token after them: None behind an accepted end of the text.
Acceptance = tuple[int, int | None]


def needs_next(sequence: Sequence, draft: Draft) -> bool:
    """Whether the token after the last draft may be needed: not after one that ends the text.

    Sampling draws one number a row, and keeps the row.
    """
    ends = bool(draft.tokens) and sequence.stops_at(draft.tokens[-1])
    return not ends or sequence.sampling.temperature > 0.0


def accept(heads: Heads, rounds: list[tuple[Sequence, Draft, slice]]) -> list[Acceptance]:
    """What stands of each verified sequence's drafts.

    Args:
        heads: of the verified rows.
        rounds: sequence, its drafts, and where its rows are: one per draft, and one more where the
            draft :func:`needs_next`.
    """
    results: list[Acceptance] = [(0, None)] * len(rounds)
    sampled = [i for i, (s, _, _) in enumerate(rounds) if s.sampling.temperature > 0.0]
    for i, (sequence, draft, at) in enumerate(rounds):
        if sequence.sampling.temperature == 0.0:
            results[i] = _longest_match(draft, _target_tokens(heads, sequence, draft, at))
    if sampled:
        outcomes = _accept_sampled(heads, [rounds[i] for i in sampled])
        for i, outcome in zip(sampled, outcomes, strict=True):
            results[i] = outcome
    for (sequence, draft, _), (accepted, _) in zip(rounds, results, strict=True):
        if isinstance(sequence.exit, DraftAndVerify) and sequence.exit.adaptive:
            stop_rule(sequence).update(len(draft.tokens), accepted, sequence.exit.num_drafts)
    return results


def _longest_match(draft: Draft, target: list[int]) -> Acceptance:
    """Both sides are on the host already, so no op is called for this."""
    accepted = 0
    while accepted < len(draft.tokens) and draft.tokens[accepted] == target[accepted]:
        accepted += 1
    return accepted, target[accepted] if accepted < len(target) else None


def _accept_sampled(
    heads: Heads, rounds: list[tuple[Sequence, Draft, slice]]
) -> list[tuple[int, int]]:
    lengths = torch.tensor([0] + [len(draft.tokens) for _, draft, _ in rounds])
    drafted = [probs for _, draft, _ in rounds for probs in draft.probs]
    target_probs = torch.stack(
        [probs for round_ in rounds for probs in _target_probs(heads, *round_)]
    ).cpu()
    got = ops.speculative_accept(
        torch.tensor([t for _, draft, _ in rounds for t in draft.tokens], dtype=torch.int64),
        lengths.cumsum(0).to(torch.int32),
        draft_probs=torch.stack(drafted).cpu() if drafted else target_probs[:0],
        target_probs=target_probs,
        uniform=torch.cat(
            [torch.rand(len(d.tokens) + 1, generator=generator_of(s)) for s, d, _ in rounds]
        ),
    )
    if bool((got.next_token < 0).any()):
        raise RuntimeError(NO_TOKEN)
    return list(zip(got.num_accepted.tolist(), got.next_token.tolist(), strict=True))


def _context(sequence: Sequence, draft: Draft, count: int) -> list[int]:
    return sequence.prompt_ids + sequence.output_ids + draft.tokens[:count]


def _target_tokens(heads: Heads, sequence: Sequence, draft: Draft, at: slice) -> list[int]:
    """The full model's greedy token at each verified position."""
    tokens = []
    for i, row in enumerate(range(at.start, at.stop)):
        if row in heads.logits:
            context = _context(sequence, draft, i)
            tokens.append(int(heads.adjusted(row, sequence, context).argmax()))
        else:
            tokens.append(heads.token[row])
    return tokens


def _target_probs(heads: Heads, sequence: Sequence, draft: Draft, at: slice) -> list[Tensor]:
    """The full model's filtered distribution at each verified position."""
    return [
        filtered_probs(
            heads.adjusted(row, sequence, _context(sequence, draft, i)), sequence.sampling
        )
        for i, row in enumerate(range(at.start, at.stop))
    ]
