"""The loss of a head that drafts a block, and its agreement with the model.

Blocks start from random rows of answers (DeepSpec), given the text's own tokens and the model's
states up to there; draft k is compared with the model's prediction k + 1 rows later, the tokens
before it being the text's.

The loss of a draft is, with the overlap ``a = sum(min(p, q))`` of the model's distribution p and
the head's q, ``w H(p, q) + (1 - w) (1 - a)`` with ``w = exp(-3 a)``: the cross entropy while they
are far apart, later the total variation, which is what acceptance depends on (LK losses, arXiv
2602.23881). Drafts are weighted by what they add to the expected accepted length: draft k by
``sum_(m >= k) prod_(j <= m) a_j``, after D-PACE (arXiv 2605.18810). The confidence learns whether a
draft is the model's own most probable token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from eecore.lab.training.block_head import BlockHead, TextBlocks
from eecore.lab.training.head_loss import DraftOrder, FrozenSide, shares
from eecore.lab.training.head_states import HeadStates

SHARPNESS = 3.0
"""How fast the cross entropy gives way to the total variation as the overlap grows."""
MIN_ACCEPTED = 0.5
"""The least chance of acceptance in weights, so that later drafts learn from the first step on."""
BLOCKS_AT_ONCE = 256
"""Blocks of one pass when agreement is measured."""


class AnchorOrder(DraftOrder):
    """Random rows that blocks start from, a few of each text.

    Args:
        starts: int64 [m], the rows that drafts can start from, text by text.
        text: int64 [m], their texts.
        per_text: rows of a text in a step, at most.
    """

    def __init__(
        self, starts: Tensor, text: Tensor, per_text: int, batch_size: int, seed: int
    ) -> None:
        counts = torch.unique_consecutive(text, return_counts=True)[1]
        self._texts = torch.split(starts, counts.tolist())
        self._per_text = per_text
        super().__init__(len(self._texts), batch_size, seed)

    def starts(self, step: int) -> Tensor:
        generator = self.generator(-1 - step)
        rows = []
        for rows_of_text in (self._texts[text] for text in self.chosen(step).tolist()):
            some = torch.randperm(len(rows_of_text), generator=generator)[: self._per_text]
            rows.append(rows_of_text[some.sort().values])
        return torch.cat(rows)


def blocks_after(
    head: BlockHead, frozen: FrozenSide, data: HeadStates, starts: Tensor, mask_token: int
) -> TextBlocks:
    """The blocks that start after rows, int64 [n], which are ascending within a text."""
    firsts, counts = torch.unique_consecutive(data.begins[starts], return_counts=True)
    by_text = torch.split(starts, counts.tolist())
    rows = [
        torch.arange(first, int(own[-1]) + 1) for first, own in zip(firsts, by_text, strict=True)
    ]
    tokens = torch.full((len(starts), head.sizes.block_size), mask_token)
    tokens[:, 0] = data.token[starts]
    return TextBlocks(
        states=data.states[torch.cat(rows)].float(),
        lengths=[len(own) for own in rows],
        counts=counts.tolist(),
        rows=starts - data.begins[starts],
        block=frozen.embeddings[tokens],
    )


def draft_weights(overlap: Tensor, counts: Tensor) -> Tensor:
    """How much the expected accepted length depends on each draft: float32 [n, block_size].

    Args:
        overlap: float32 [n, block_size], the chance that each draft is accepted if those before
            it are.
        counts: bool, likewise: whether it can be; no draft after one that cannot has a weight.
    """
    chance = torch.where(counts, MIN_ACCEPTED + (1 - MIN_ACCEPTED) * overlap, 0.0)
    accepted = chance.cumprod(1)
    return accepted.flip(1).cumsum(1).flip(1)


def block_loss(
    head: BlockHead, frozen: FrozenSide, data: HeadStates, starts: Tensor, mask_token: int
) -> tuple[Tensor, float]:
    """The loss, and the first draft's agreement.

    Tokens outside the vocabulary are never drafted, so that these positions add nothing.

    Args:
        data: states and tokens, those of prompts among them.
        starts: int64 [n], the rows that blocks start from, ascending within a text.
        mask_token: the token that stands for what is to be drafted.
    """
    rows, can_draft, place = _targets(head, frozen, data, starts)
    wanted, index = torch.unique(rows[can_draft], return_inverse=True)
    with torch.no_grad():
        teacher = frozen.distribution(data.states.last(wanted))
    hidden = head(blocks_after(head, frozen, data, starts, mask_token))[can_draft]
    before = head.before(data.token[rows[can_draft] - 1])
    logits = frozen.products(hidden) + head.correction(before)
    truth, log_q = teacher[index], logits.log_softmax(-1)
    overlap = torch.minimum(truth, log_q.exp()).sum(-1)
    entropy = -(truth * log_q).sum(-1)
    known = overlap.detach()
    share = (-SHARPNESS * known).exp()
    accepted = torch.zeros(can_draft.shape).masked_scatter(can_draft, known)
    weights = draft_weights(accepted, can_draft)[can_draft]
    weights = weights / weights.sum().clamp(min=1e-6)
    right = logits.argmax(-1) == place[can_draft]
    confidence = functional.binary_cross_entropy_with_logits(
        head.confidence(hidden.detach(), before.detach()), right.float(), reduction="none"
    )
    loss = share * entropy + (1 - share) * (1 - overlap) + confidence
    first = can_draft.nonzero()[:, 1] == 0
    agreement = int(right[first].sum()) / max(1, int(first.sum()))
    return (weights * loss).sum(), agreement


@torch.inference_mode()
def block_agreement(
    head: BlockHead, frozen: FrozenSide, data: HeadStates, starts: Tensor, mask_token: int
) -> list[float]:
    """For each position how often the draft is the model's own greedy token, where all drafts
    before it were; as :func:`agreement_by_position` counts it.
    """
    size = head.sizes.block_size
    right, tried = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    for some in torch.split(starts, BLOCKS_AT_ONCE):
        rows, _, place = _targets(head, frozen, data, some)
        hidden = head(blocks_after(head, frozen, data, some, mask_token))
        before = head.before(data.token[rows - 1])
        logits = frozen.products(hidden.flatten(0, 1)) + head.correction(before.flatten(0, 1))
        hits = logits.argmax(-1).view(rows.shape) == place
        inside = rows < data.ends[some][:, None]
        goes_on = hits & (data.token[rows] == data.greedy[rows])
        reached = torch.ones_like(hits)
        reached[:, 1:] = goes_on[:, :-1].cumprod(1).bool()
        tried += (reached & inside).sum(0)
        right += (reached & inside & hits).sum(0)
    return shares(right.tolist(), tried.tolist())


def _targets(
    head: BlockHead, frozen: FrozenSide, data: HeadStates, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows whose predictions the drafts are compared with, whether these can be drafted, and
    the places of the model's own tokens there in the vocabulary: [n, block_size] each.

    Past the end of its text a draft has the text's last row, and cannot be drafted.
    """
    rows = starts[:, None] + 1 + torch.arange(head.sizes.block_size)
    ends = data.ends[starts][:, None]
    inside, rows = rows < ends, rows.minimum(ends - 1)
    place = frozen.place(data.greedy[rows])
    return rows, inside & (place >= 0), place
