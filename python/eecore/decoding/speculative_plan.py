"""A round of self-speculation as a program over fixed memory: draft, verify, accept.

(LayerSkip §4.3.) Rounds end where they end on the device: rows that draft no more are masked, and
what is behind the last step that any row takes is skipped. Greedy rows only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from eecore import ops
from eecore.decoding.batch import fill_page_table
from eecore.decoding.cross_memory import cross_batch, cross_fields, load_cross
from eecore.decoding.decode_plan import Control, take_over, write_sources
from eecore.decoding.twin_memory import HostSide, TwinMemory
from eecore.exits import SelfSpeculative
from eecore.models import AttentionBatch, KVCache, Network

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
    input_pages: list[int] = field(default_factory=list)
    input_len: int = 0
    """Tokens of the encoder's input."""


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
        model: Network,
        kv: KVCache,
        kind: SpeculativeKind,
        num_rows: int,
        max_pages: int,
        max_stops: int,
        max_input_pages: int = 0,
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
                "thresholds": (torch.float32, row),
                "stop_ids": (torch.int64, (num_rows, max_stops)),
                **cross_fields(num_rows, max_input_pages),
            },
        )
        self._loaded = self._given.host()
        given = self._given.device
        self._page_table = given["page_table"]
        self._cross = cross_batch(given)
        # Where each sequence is in its text, and how much of it is left.
        self._first_position = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._tokens_left = torch.zeros_like(self._first_position)
        self._most = torch.zeros_like(self._first_position)
        self._slots = torch.zeros(per_token, dtype=torch.int64, device=device)
        self._results = TwinMemory(
            device,
            {
                "num_drafted": (torch.int64, row),
                "num_accepted": (torch.int64, row),
                "tokens": (torch.int64, per_token),  # the first, then the drafts
                "draft_confidences": (torch.float32, per_draft),
                "target": (torch.int64, per_token),
                "confidences": (torch.float32, per_token),
                "logprobs": (torch.float32, per_token),
            },
        )
        results = self._results.device
        shape = *per_token, model.config.hidden_size
        whole: Any = {"dtype": torch.int64, "device": device}
        self._round = ops.DraftRound(
            thresholds=given["thresholds"],
            stop_tokens=given["stop_ids"],
            max_drafts=self._most,
            round_slots=self._slots,
            states=torch.zeros(shape, dtype=model.dtype, device=device),
            tokens=results["tokens"],
            confidences=results["draft_confidences"],
            num_drafted=results["num_drafted"],
            drafting=torch.zeros(num_rows, dtype=torch.bool, device=device),
            last_token=torch.zeros(num_rows, **whole),
            positions=torch.zeros(num_rows, **whole),
            slot_mapping=torch.zeros(num_rows, **whole),
            seq_lens=torch.zeros(num_rows, dtype=torch.int32, device=device),
            all_done=torch.zeros(1, dtype=torch.bool, device=device),
        )
        # What never changes.
        self._steps = torch.arange(steps + 1, device=device)
        self._starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)

    def load(self, rows: list[SpeculativeRow]) -> None:
        """Say who speculates next: at most ``num_rows`` sequences."""
        self._loaded = self._given.host()
        given = self._loaded.tensors
        padding, most_stops = self.num_rows - len(rows), given["stop_ids"].shape[1]
        for name, values, filler in (
            ("token_ids", [row.token_id for row in rows], 0),
            ("positions", [row.position for row in rows], 0),
            ("tokens_left", [row.tokens_left for row in rows], 0),
            ("max_drafts", [row.max_drafts for row in rows], -1),
            ("thresholds", [_rounded_up(row.draft_threshold) for row in rows], 0.0),
            (
                "stop_ids",
                [row.stop_ids + [-1] * (most_stops - len(row.stop_ids)) for row in rows],
                [-1] * most_stops,
            ),
        ):
            given[name].numpy()[:] = [*values, *([filler] * padding)]
        write_sources(given["sources"], [row.follows for row in rows])
        fill_page_table(given["page_table"].numpy(), [row.pages for row in rows])
        load_cross(given, [row.input_pages for row in rows], [row.input_len for row in rows])
        self.send()

    def send(self) -> None:
        """Have what was loaded sent to the device."""
        self._given.send(self._loaded)

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
                got["tokens"][i][1 : drafts + 1],
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
        token = take_over(last, given["token_ids"], sources)
        position = take_over(self._first_position + emitted, given["positions"], sources)
        left = take_over(self._tokens_left - emitted, given["tokens_left"], sources)
        self._first_position.copy_(position)
        self._tokens_left.copy_(left)
        torch.minimum(given["max_drafts"], left - 1, out=self._most)
        at = position[:, None] + self._steps
        page = self._page_table.gather(1, (at // size).clamp(max=self._page_table.shape[1] - 1))
        slots = (page.long() * size + at % size).masked_fill(self._steps > self._most[:, None], -1)
        self._slots.copy_(slots)

        first = self._round
        torch.gt(self._most, 0, out=first.drafting)
        first.tokens[:, 0] = token
        first.num_drafted.zero_()
        first.last_token.copy_(token)
        first.positions.copy_(position)
        rests = ~first.drafting
        first.slot_mapping.copy_(slots[:, 0].masked_fill(rests, -1))
        first.seq_lens.copy_((position + 1).masked_fill(rests, 1))

    def _draft_from(self, step: int, control: Control) -> None:
        """One more token of every row that drafts, and what is behind it."""
        now = self._round
        batch = AttentionBatch(
            now.positions,
            now.slot_mapping,
            self._page_table,
            now.seq_lens,
            self._starts,
            self._cross,
        )
        hidden = self._model.embed(now.last_token)
        hidden = self._model.layers(0, self.kind.exit_layer, hidden, self._kv, batch)
        ops.append_drafts(hidden, self._model.confidence(hidden), step, now)
        if step + 1 < self.kind.num_drafts:
            control.unless(now.all_done, lambda: self._draft_from(step + 1, control))

    def _verify(self) -> None:
        """The last token through the drafting layers, then all through the others."""
        model, exit_layer, made = self._model, self.kind.exit_layer, self._round
        rows, steps = self.num_rows, self._steps
        last = made.num_drafted[:, None]
        batch = AttentionBatch(
            made.positions,
            self._slots.gather(1, last)[:, 0],
            self._page_table,
            (made.positions + 1).masked_fill(self._most < 0, 1).to(torch.int32),
            self._starts,
            self._cross,
        )
        hidden = model.embed(made.last_token)
        hidden = model.layers(0, exit_layer, hidden, self._kv, batch)
        made.states.scatter_(1, last[:, :, None].expand(-1, 1, hidden.shape[1]), hidden[:, None])

        at = self._first_position[:, None] + steps
        batch = AttentionBatch(
            at.clamp(max=model.config.max_position - 1).view(-1),
            self._slots.masked_fill(steps > last, -1).view(-1),
            self._page_table,
            (self._first_position + len(steps)).to(torch.int32),
            self._starts * len(steps),
            self._cross,
        )
        hidden = made.states.view(rows * len(steps), -1)
        hidden = model.layers(exit_layer, model.config.num_layers, hidden, self._kv, batch)
        head = model.confidence(hidden)
        results, target = self._results.device, head.token.view(rows, -1)
        results["target"].copy_(target)
        results["confidences"].copy_(head.confidence.view(rows, -1))
        torch.sub(
            head.top_logit.view(rows, -1), head.logsumexp.view(rows, -1), out=results["logprobs"]
        )
        stands = (made.tokens[:, 1:] == target[:, :-1]) & (steps[:-1] < last)
        torch.sum(stands.cumprod(1), 1, out=results["num_accepted"])


def _rounded_up(threshold: float) -> float:
    """The smallest float32 that is not below it: the same float32 numbers reach both."""
    rounded = np.float32(threshold)
    if float(rounded) < threshold:
        rounded = np.nextafter(rounded, np.float32(np.inf))
    return float(rounded)
