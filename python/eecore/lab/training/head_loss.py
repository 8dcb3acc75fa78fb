"""The loss of a draft head, and its agreement with the model, over stretches of the model's
texts.

A stretch is a run of rows of one text. From each of them the head drafts, given the text's own
tokens and its own states, and draft k is compared with the model's prediction k rows later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from eecore.lab.training.draft_head import DraftHead
from eecore.lab.training.head_states import HeadStates, begins_of, ends_of

LATER_ROWS = 2
"""One row in so many goes on to drafts after the first, since the first one matters most."""
STEP_WEIGHTS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
ROWS_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class FrozenSide:
    """The parts of the model that a head uses, in float32."""

    embeddings: Tensor
    """[vocab_size, hidden_size]"""
    head_rows: Tensor
    """[vocabulary_size, hidden_size], the LM head's rows for the tokens that can be drafted."""
    vocabulary: Tensor
    """int64 [vocabulary_size], the tokens that can be drafted, ascending."""
    final_norm: Tensor
    """[hidden_size]"""
    eps: float
    cos_sin: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    """float32 [num_positions, rotary_dim], for the positions that are attended from, if any."""
    attention_scale: float | None = None
    """The attention scores' factor; None: head_dim**-0.5."""
    multiplier: float = 1.0
    """The logits' factor."""
    soft_cap: float = 0.0
    """c > 0: multiplied logits l become ``c * tanh(l / c)``."""
    rows_of: Callable[[Tensor], Tensor] | None = None
    """The LM head's rows, float32 [n, hidden_size], for any tokens, int64 [n]."""

    def with_tokens(self, tokens: Tensor) -> FrozenSide:
        """The same with further tokens, int64 [n], in the vocabulary; itself where none is new."""
        if self.rows_of is None:
            return self
        new = torch.unique(tokens[self.place(tokens) < 0])
        if not len(new):
            return self
        vocabulary, order = torch.cat((self.vocabulary, new)).sort()
        rows = torch.cat((self.head_rows, self.rows_of(new)))[order]
        return replace(self, vocabulary=vocabulary, head_rows=rows)

    @cached_property
    def short_rows(self) -> Tensor:
        """``head_rows`` in bfloat16, which autocast would convert for every product."""
        return self.head_rows.bfloat16()

    def products(self, values: Tensor) -> Tensor:
        """The products of normed states, [n, hidden_size], with the LM head's rows, in float32."""
        short = torch.is_autocast_enabled("cpu")
        return functional.linear(values, self.short_rows if short else self.head_rows).float()

    def logits(self, values: Tensor) -> Tensor:
        """The model's logits, float32 [n, vocabulary_size], of normed states, [n, hidden_size]."""
        logits = self.products(values)
        if self.multiplier != 1:
            logits = logits * self.multiplier
        return self.soft_cap * torch.tanh(logits / self.soft_cap) if self.soft_cap else logits

    def place(self, tokens: Tensor) -> Tensor:
        """The places of tokens in the vocabulary; -1 for tokens outside."""
        places = torch.searchsorted(self.vocabulary, tokens)
        places = places.clamp_(max=len(self.vocabulary) - 1)
        return torch.where(self.vocabulary[places] == tokens, places, -1)

    def distribution(self, last_states: Tensor) -> Tensor:
        """The model's own distribution over the vocabulary, [n, vocabulary_size], from its last
        states [n, H].
        """
        normed = functional.rms_norm(
            last_states.float(), self.final_norm.shape, self.final_norm, self.eps
        )
        return self.logits(normed).softmax(-1)


class StretchOrder:
    """The rows that drafts of each step start from; the same for the same seed.

    They are stretches of ``length`` rows, shuffled for each epoch.

    Args:
        text: int64 [n], each row's text.
        length: rows that drafts start from; a text's last stretch may be shorter.
        batch_size: stretches of a step.
    """

    def __init__(self, text: Tensor, length: int, batch_size: int, seed: int) -> None:
        ends = ends_of(text)
        rows = torch.arange(len(text))
        begins = rows[((rows - begins_of(text)) % length == 0) & (rows + 1 < ends)]
        self._begins, self._ends = begins, torch.minimum(begins + length, ends[begins] - 1)
        self._batch_size, self._seed = batch_size, seed
        self.steps_per_epoch = max(1, len(begins) // batch_size)

    def starts(self, step: int) -> Tensor:
        """int64 [n], the rows that the drafts of a step start from, ascending within a text."""
        epoch, place = divmod(step, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        order = torch.randperm(len(self._begins), generator=generator)
        chosen = order[place * self._batch_size : (place + 1) * self._batch_size]
        pairs = zip(self._begins[chosen].tolist(), self._ends[chosen].tolist(), strict=True)
        return torch.cat([torch.arange(begin, end) for begin, end in pairs])


def draft_loss(
    head: DraftHead, frozen: FrozenSide, data: HeadStates, starts: Tensor, num_steps: int
) -> tuple[Tensor, float]:
    """Cross entropy with the model's distribution, weighted over steps; and the first step's
    agreement.

    Tokens that the model predicts at these positions may be outside the vocabulary, since a request
    can add tokens of its text. Without the model's rows for them, positions that need other tokens
    add nothing.

    Args:
        starts: int64 [n], the rows that drafts start from.
        num_steps: tokens of a draft.
    """
    ends = data.ends[starts]
    kept = [starts, *[starts[::LATER_ROWS]] * (num_steps - 1)]
    kept_ends = [ends, *[ends[::LATER_ROWS]] * (num_steps - 1)]
    targets = [rows + k + 1 for k, rows in enumerate(kept)]
    inside = [target < end for target, end in zip(targets, kept_ends, strict=True)]
    wanted = torch.unique(torch.cat([t[i] for t, i in zip(targets, inside, strict=True)]))
    frozen = frozen.with_tokens(data.greedy[wanted])
    with torch.no_grad():
        teacher = frozen.distribution(data.states.last(wanted))
    state = head.begin(data.states[starts].float())
    seen = data.seen(starts, frozen.cos_sin, frozen.attention_scale)
    total = torch.zeros(())
    agreement = 0.0
    for k, target in enumerate(targets):
        if k == 1:
            state = state[::LATER_ROWS]
            seen = seen and seen.rows(torch.arange(0, len(starts), LATER_ROWS))
        given = data.token[(target - 1).clamp(max=len(data) - 1)]
        state = head.step(state, frozen.embeddings[given], seen)
        seen = seen and seen.advanced()
        there = target[inside[k]]
        place = frozen.place(data.greedy[there])
        can_draft = place >= 0
        logits = frozen.logits(head.output(state[inside[k]][can_draft]))
        truth = teacher[torch.searchsorted(wanted, there[can_draft])]
        count = max(1, len(truth))
        loss = functional.cross_entropy(logits, truth, reduction="sum") / count
        total = total + STEP_WEIGHTS[k] * loss
        if k == 0:
            agreement = int((logits.argmax(-1) == place[can_draft]).sum()) / count
    return total / sum(STEP_WEIGHTS[:num_steps]), agreement


@torch.inference_mode()
def agreement_by_position(
    head: DraftHead, frozen: FrozenSide, data: HeadStates, starts: Tensor, num_steps: int
) -> list[float]:
    """For each position how often the draft is the model's own greedy token, where all drafts
    before it were.

    The tokens are the text's, and a draft goes on only while they are the greedy ones. A token
    outside the vocabulary counts as wrong, since the tokens that a request would add are not known
    here.
    """
    place = frozen.place(data.greedy)
    ends = data.ends[starts]
    right = [0] * num_steps
    tried = [0] * num_steps
    for begin in range(0, len(starts), ROWS_AT_ONCE):
        rows = starts[begin : begin + ROWS_AT_ONCE]
        row_ends = ends[begin : begin + ROWS_AT_ONCE]
        state = head.begin(data.states[rows].float())
        seen = data.seen(rows, frozen.cos_sin, frozen.attention_scale)
        for k in range(num_steps):
            there = rows + k + 1 < row_ends
            rows, row_ends, state = rows[there], row_ends[there], state[there]
            seen = seen and seen.rows(there)
            if not len(rows):
                break
            target = rows + k + 1
            state = head.step(state, frozen.embeddings[data.token[target - 1]], seen)
            seen = seen and seen.advanced()
            drafts = frozen.logits(head.output(state)).argmax(-1)
            hits = drafts == place[target]
            tried[k] += len(hits)
            right[k] += int(hits.sum())
            on = hits & (data.token[target] == data.greedy[target])
            rows, row_ends, state = rows[on], row_ends[on], state[on]
            seen = seen and seen.rows(on)
    return [r / t if t else 0.0 for r, t in zip(right, tried, strict=True)]
