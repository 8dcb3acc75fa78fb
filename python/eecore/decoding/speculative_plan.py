"""A round of self-speculation as a program over fixed memory: draft, verify, accept.

(LayerSkip §4.3.) Rounds end where they end on the device: rows that draft no more are masked, and
what is behind the last step that any row takes is skipped. Greedy rows only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eecore.decoding.decode_plan import Control, page_table_of
from eecore.exits import SelfSpeculative
from eecore.models import AttentionBatch, KVCache, LlamaModel

__all__ = ["Round", "SpeculativeKind", "SpeculativePlan", "SpeculativeRow", "speculative_kind_of"]


@dataclass(frozen=True)
class SpeculativeKind:
    """What the rows of a plan have in common."""

    exit_layer: int
    num_drafts: int


@dataclass(frozen=True)
class SpeculativeRow:
    """One sequence of a round."""

    token_id: int
    position: int
    pages: list[int]
    max_drafts: int
    """Drafts that it has pages for, up to the kind's ``num_drafts``."""
    draft_threshold: float
    """A draft ends with a token whose gap is below it."""
    stop_ids: list[int]
    """Tokens that end the text, and with it the draft."""


@dataclass(frozen=True)
class Round:
    """What a round gave a sequence."""

    drafts: list[int]
    draft_confidences: list[float]
    num_accepted: int
    target: list[int]
    """The full model's tokens: one per draft, and the one after them."""
    confidences: list[float]
    """Of ``target``: gap of the two largest probabilities."""
    logprobs: list[float]


def speculative_kind_of(policy: SelfSpeculative) -> SpeculativeKind | None:
    """The kind of plan of a policy; None for the ablation without reuse."""
    return SpeculativeKind(policy.exit_layer, policy.num_drafts) if policy.reuse else None


class SpeculativePlan:
    """Rounds of up to ``num_rows`` sequences of one kind; fewer are padded by masked ones.

    A sequence has at most ``max_pages`` pages and ``max_stops`` tokens that end its text.
    """

    def __init__(
        self,
        model: LlamaModel,
        kv: KVCache,
        kind: SpeculativeKind,
        num_rows: int,
        max_pages: int,
        max_stops: int,
    ) -> None:
        self.kind = kind
        self.num_rows = num_rows
        self._model = model
        self._kv = kv
        self._max_pages = max_pages
        device, steps = model.device, kind.num_drafts

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # What load() writes.
        self._first_position = zeros(num_rows)
        self._slots = zeros(num_rows, steps + 1)
        self._page_table = zeros(num_rows, max_pages, dtype=torch.int32)
        self._most = zeros(num_rows)
        self._thresholds = zeros(num_rows, dtype=torch.float64)
        self._stop_ids = zeros(num_rows, max_stops)
        # The round: its first token, then the drafts; states after the drafting layers.
        self._tokens = zeros(num_rows, steps + 1)
        self._states = zeros(num_rows, steps + 1, model.config.hidden_size, dtype=model.dtype)
        self._drafts = zeros(num_rows, dtype=torch.bool)
        self._num_drafted = zeros(num_rows)
        # One copy to the host: drafted, accepted, gaps, tokens, then the verifier's tokens, gaps
        # and log-probabilities.
        self._sizes = (1, 1, steps, steps, steps + 1, steps + 1, steps + 1)
        self._results = zeros(num_rows, sum(self._sizes), dtype=torch.int32)
        views = self._results.split_with_sizes(self._sizes, dim=1)
        self._gaps, self._confidence, self._logprob = (
            views[i].view(torch.float32) for i in (2, 5, 6)
        )

        # What never changes.
        self._steps = torch.arange(steps + 1, device=device)
        self._starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)

    def load(self, rows: list[SpeculativeRow]) -> None:
        """Say who speculates next: at most ``num_rows`` sequences."""
        padding, size = self.num_rows - len(rows), self._kv.page_size
        table = page_table_of([row.pages for row in rows], self.num_rows, self._max_pages)
        positions = torch.tensor([row.position for row in rows] + [0] * padding)
        most = torch.tensor([row.max_drafts for row in rows] + [-1] * padding)
        at = positions[:, None] + self._steps.cpu()
        page = table.gather(1, (at // size).clamp(max=self._max_pages - 1)).long()
        slots = (page * size + at % size).masked_fill(self._steps.cpu() > most[:, None], -1)
        self._first_position.copy_(positions)
        self._most.copy_(most)
        self._slots.copy_(slots)
        self._page_table.copy_(table)
        thresholds = [row.draft_threshold for row in rows] + [0.0] * padding
        self._thresholds.copy_(torch.tensor(thresholds, dtype=torch.float64))
        self._tokens[:, 0] = torch.tensor([row.token_id for row in rows] + [0] * padding)
        most_stops = self._stop_ids.shape[1]
        stops = [row.stop_ids + [-1] * (most_stops - len(row.stop_ids)) for row in rows]
        self._stop_ids.copy_(torch.tensor(stops + [[-1] * most_stops] * padding))

    def run(self, control: Control) -> None:
        """Draft until no row goes on, then verify."""
        self._num_drafted.zero_()
        torch.gt(self._most, 0, out=self._drafts)
        self._draft_from(0, control)
        self._verify()

    def rounds(self, count: int) -> list[Round]:
        """Of the first ``count`` sequences; waits for the device."""
        results = self._results[:count].cpu().split_with_sizes(self._sizes, dim=1)
        drafted, accepted, _, tokens, target, _, _ = (each.tolist() for each in results)
        gaps, confidence, logprob = (results[i].view(torch.float32).tolist() for i in (2, 5, 6))
        return [
            Round(
                tokens[i][:drafts],
                gaps[i][:drafts],
                accepted[i][0],
                target[i][: drafts + 1],
                confidence[i][: drafts + 1],
                logprob[i][: drafts + 1],
            )
            for i, (drafts,) in enumerate(drafted)
        ]

    def _draft_from(self, step: int, control: Control) -> None:
        """One more token of every row that drafts, and what is behind it."""
        drafts = self._drafts
        positions = self._first_position + step
        batch = AttentionBatch(
            positions,
            self._slots[:, step].masked_fill(~drafts, -1),
            self._page_table,
            (positions + 1).masked_fill(~drafts, 1).to(torch.int32),
            self._starts,
        )
        hidden = self._model.embed(self._tokens[:, step])
        hidden = self._model.layers(0, self.kind.exit_layer, hidden, self._kv, batch)
        head = self._model.confidence(hidden)
        self._states[:, step] = hidden
        self._tokens[:, step + 1] = head.token
        self._gaps[:, step] = head.confidence
        self._num_drafted += drafts
        ends = (head.token[:, None] == self._stop_ids).any(1)
        drafts &= (head.confidence.double() >= self._thresholds) & ~ends
        drafts &= self._num_drafted < self._most
        if step + 1 < self.kind.num_drafts:
            control.unless(~drafts.any().view(1), lambda: self._draft_from(step + 1, control))

    def _verify(self) -> None:
        """The last token through the drafting layers, then all through the others."""
        model, exit_layer = self._model, self.kind.exit_layer
        rows, steps = self.num_rows, self._steps
        last = self._num_drafted[:, None]
        is_padding = self._most < 0
        positions = self._first_position + self._num_drafted
        batch = AttentionBatch(
            positions,
            self._slots.gather(1, last)[:, 0],
            self._page_table,
            (positions + 1).masked_fill(is_padding, 1).to(torch.int32),
            self._starts,
        )
        hidden = model.embed(self._tokens.gather(1, last)[:, 0])
        hidden = model.layers(0, exit_layer, hidden, self._kv, batch)
        self._states.scatter_(1, last[:, :, None].expand(-1, 1, hidden.shape[1]), hidden[:, None])

        at = self._first_position[:, None] + steps
        batch = AttentionBatch(
            at.clamp(max=model.config.max_position - 1).view(-1),
            self._slots.masked_fill(steps > last, -1).view(-1),
            self._page_table,
            (self._first_position + len(steps)).to(torch.int32),
            self._starts * len(steps),
        )
        hidden = self._states.view(rows * len(steps), -1)
        hidden = model.layers(exit_layer, model.config.num_layers, hidden, self._kv, batch)
        head = model.confidence(hidden)
        target = head.token.view(rows, -1)
        self._confidence.copy_(head.confidence.view(rows, -1))
        self._logprob.copy_((head.top_logit - head.logsumexp).view(rows, -1))
        stands = (self._tokens[:, 1:] == target[:, :-1]) & (steps[:-1] < last)
        drafted, accepted, _, drafts, verified, _, _ = self._results.split_with_sizes(
            self._sizes, dim=1
        )
        drafted.copy_(last)
        accepted.copy_(stands.cumprod(1).sum(1, keepdim=True))
        drafts.copy_(self._tokens[:, 1:])
        verified.copy_(target)
