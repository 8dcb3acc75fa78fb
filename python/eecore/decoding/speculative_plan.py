"""A round of self-speculation as a program over fixed memory: draft, verify, accept.

(LayerSkip §4.3.) Rounds end where they end on the device: rows that draft no more are masked, and
what is behind the last step that any row takes is skipped. Greedy rows only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eecore.decoding.decode_plan import Control, write_page_table
from eecore.decoding.twin_memory import TwinMemory
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
        device, steps, row = model.device, kind.num_drafts, (num_rows,)
        per_draft, per_token = (num_rows, steps), (num_rows, steps + 1)
        self._given = TwinMemory(
            device,
            {
                "token_ids": (torch.int64, row),
                "first_position": (torch.int64, row),
                "slots": (torch.int64, per_token),
                "page_table": (torch.int32, (num_rows, max_pages)),
                "most": (torch.int64, row),
                "thresholds": (torch.float64, row),
                "stop_ids": (torch.int64, (num_rows, max_stops)),
            },
        )
        given = self._given.device
        self._first_position, self._slots = given["first_position"], given["slots"]
        self._page_table, self._most = given["page_table"], given["most"]
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
        """Say who speculates next: at most ``num_rows`` sequences. What ran before must be done."""
        size, given = self._kv.page_size, self._given.host
        padding, most_stops = self.num_rows - len(rows), given["stop_ids"].shape[1]
        for name, values, filler in (
            ("token_ids", [row.token_id for row in rows], 0),
            ("first_position", [row.position for row in rows], 0),
            ("most", [row.max_drafts for row in rows], -1),
            ("thresholds", [row.draft_threshold for row in rows], 0.0),
            (
                "stop_ids",
                [row.stop_ids + [-1] * (most_stops - len(row.stop_ids)) for row in rows],
                [-1] * most_stops,
            ),
        ):
            given[name].numpy()[:] = [*values, *([filler] * padding)]
        write_page_table(given["page_table"], [row.pages for row in rows])
        table, steps = given["page_table"], torch.arange(self.kind.num_drafts + 1)
        at = given["first_position"][:, None] + steps
        page = table.gather(1, (at // size).clamp(max=table.shape[1] - 1)).long()
        slots = (page * size + at % size).masked_fill(steps > given["most"][:, None], -1)
        given["slots"].copy_(slots)
        self._given.send()

    def run(self, control: Control) -> None:
        """Draft until no row goes on, then verify."""
        self._num_drafted.zero_()
        self._tokens[:, 0] = self._given.device["token_ids"]
        torch.gt(self._most, 0, out=self._drafts)
        self._draft_from(0, control)
        self._verify()

    def rounds(self, count: int) -> list[Round]:
        """Of the first ``count`` sequences; waits for the device."""
        self._results.fetch()
        got = {name: tensor[:count].tolist() for name, tensor in self._results.host.items()}
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
