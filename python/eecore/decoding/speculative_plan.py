"""A round of self-speculation as a program over fixed memory: draft, verify, accept.

(LayerSkip §4.3.) Rounds end where they end on the device: rows that draft no more are masked, and
what is behind the last step that any row takes is skipped. Greedy rows only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eecore.decoding.decode_plan import Control, take_over, write_page_table, write_sources
from eecore.decoding.twin_memory import HostSide, TwinMemory
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
    tokens_left: int
    """Tokens that it may still give: it drafts one fewer at most."""
    draft_threshold: float
    """A draft ends with a token whose gap is below it."""
    stop_ids: list[int]
    """Tokens that end the text, and with it the draft."""
    follows: int | None = None
    """The sequence's row in the plan's last round: its ``token_id``, ``position`` and
    ``tokens_left`` are where that round leaves off, instead of those given."""


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
        device, steps, row = model.device, kind.num_drafts, (num_rows,)
        per_draft, per_token = (num_rows, steps), (num_rows, steps + 1)
        self._given = TwinMemory(
            device,
            {
                "token_ids": (torch.int64, row),
                "positions": (torch.int64, row),
                "tokens_left": (torch.int64, row),
                "sources": (torch.int64, row),
                "page_table": (torch.int32, (num_rows, max_pages)),
                "max_drafts": (torch.int64, row),
                "thresholds": (torch.float64, row),
                "stop_ids": (torch.int64, (num_rows, max_stops)),
            },
        )
        self._page_table = self._given.device["page_table"]
        # Where each sequence is in its text, and how much of it is left.
        self._first_position = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._tokens_left = torch.zeros_like(self._first_position)
        self._most = torch.zeros_like(self._first_position)
        self._slots = torch.zeros(per_token, dtype=torch.int64, device=device)
        # The round: its first token, then the drafts; states after the drafting layers.
        self._tokens = torch.zeros(per_token, dtype=torch.int64, device=device)
        shape = *per_token, model.config.hidden_size
        self._states = torch.zeros(shape, dtype=model.dtype, device=device)
        self._drafts = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._results = TwinMemory(
            device,
            {
                "num_drafted": (torch.int64, row),
                "num_accepted": (torch.int64, row),
                "drafts": (torch.int64, per_draft),
                "draft_confidences": (torch.float32, per_draft),
                "target": (torch.int64, per_token),
                "confidences": (torch.float32, per_token),
                "logprobs": (torch.float32, per_token),
            },
        )
        self._num_drafted = self._results.device["num_drafted"]
        # What never changes.
        self._steps = torch.arange(steps + 1, device=device)
        self._starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)

    def load(self, rows: list[SpeculativeRow]) -> None:
        """Say who speculates next: at most ``num_rows`` sequences."""
        side = self._given.host()
        given = side.tensors
        padding, most_stops = self.num_rows - len(rows), given["stop_ids"].shape[1]
        for name, values, filler in (
            ("token_ids", [row.token_id for row in rows], 0),
            ("positions", [row.position for row in rows], 0),
            ("tokens_left", [row.tokens_left for row in rows], 0),
            ("max_drafts", [row.max_drafts for row in rows], -1),
            ("thresholds", [row.draft_threshold for row in rows], 0.0),
            (
                "stop_ids",
                [row.stop_ids + [-1] * (most_stops - len(row.stop_ids)) for row in rows],
                [-1] * most_stops,
            ),
        ):
            given[name].numpy()[:] = [*values, *([filler] * padding)]
        write_sources(given["sources"], [row.follows for row in rows])
        write_page_table(given["page_table"], [row.pages for row in rows])
        self._given.send(side)

    def run(self, control: Control) -> None:
        """Draft until no row goes on, then verify."""
        self._begin()
        self._draft_from(0, control)
        self._verify()

    def fetch(self) -> HostSide:
        """Have what the last round gave sent to the host."""
        return self._results.fetch()

    def rounds(self, side: HostSide, count: int) -> list[Round]:
        """Of the first ``count`` sequences; waits for what was fetched to come."""
        got = {name: tensor[:count].tolist() for name, tensor in side.wait().tensors.items()}
        return [
            Round(
                got["drafts"][i][:drafts],
                got["draft_confidences"][i][:drafts],
                got["num_accepted"][i],
                got["target"][i][: drafts + 1],
                got["confidences"][i][: drafts + 1],
                got["logprobs"][i][: drafts + 1],
            )
            for i, drafts in enumerate(got["num_drafted"])
        ]

    def _begin(self) -> None:
        """Where each sequence is, and where its next keys and values go; those that have given all
        their tokens are masked.
        """
        given, results, size = self._given.device, self._results.device, self._kv.page_size
        sources, accepted = given["sources"], results["num_accepted"]
        emitted = accepted + 1
        last = results["target"].gather(1, accepted[:, None])[:, 0]
        self._tokens[:, 0] = take_over(last, given["token_ids"], sources)
        position = take_over(self._first_position + emitted, given["positions"], sources)
        left = take_over(self._tokens_left - emitted, given["tokens_left"], sources)
        self._first_position.copy_(position)
        self._tokens_left.copy_(left)
        torch.minimum(given["max_drafts"], left - 1, out=self._most)
        self._num_drafted.zero_()
        torch.gt(self._most, 0, out=self._drafts)
        at = position[:, None] + self._steps
        page = self._page_table.gather(1, (at // size).clamp(max=self._page_table.shape[1] - 1))
        slots = (page.long() * size + at % size).masked_fill(self._steps > self._most[:, None], -1)
        self._slots.copy_(slots)

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
        self._results.device["draft_confidences"][:, step] = head.confidence
        self._num_drafted += drafts
        ends = (head.token[:, None] == self._given.device["stop_ids"]).any(1)
        drafts &= (head.confidence.double() >= self._given.device["thresholds"]) & ~ends
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
        results, target = self._results.device, head.token.view(rows, -1)
        results["target"].copy_(target)
        results["confidences"].copy_(head.confidence.view(rows, -1))
        results["logprobs"].copy_((head.top_logit - head.logsumexp).view(rows, -1))
        results["drafts"].copy_(self._tokens[:, 1:])
        stands = (self._tokens[:, 1:] == target[:, :-1]) & (steps[:-1] < last)
        torch.sum(stands.cumprod(1), 1, out=results["num_accepted"])
