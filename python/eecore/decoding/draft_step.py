"""A round of speculation as a program: draft, verify, accept.

(LayerSkip §4.3, A.4; Leviathan et al. 2023; Zhang et al. 2023.) A draft runs either the first
layers only (SelfSpeculative) or all layers with some sublayers skipped (DraftAndVerify). Both keep
the state of every drafted position after the first layers, which the draft runs exactly like the
full model. Verification continues from these states, so that no position passes through a shared
layer twice. The keys and values of shared layers are in the cache already. A draft with skipped
sublayers also writes keys and values of deeper layers; verification overwrites them.

Drafts that were looked up, or made by a draft head, are given to the round, and all layers verify
them. Their distribution has a single token, so rejection sampling accepts a draft where the full
model draws the same token: a sampled request gets the tokens that decoding without drafts draws.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eecore import ops
from eecore.decoding.control import Control
from eecore.decoding.draft_kind import DraftKind
from eecore.decoding.draft_outcomes import DraftOutcomes
from eecore.decoding.draft_rows import DraftRows
from eecore.decoding.head_drafts import (
    EndedRounds,
    HeadDrafting,
    HeadKeys,
    new_round,
    new_verification,
)
from eecore.decoding.heads import HeadWork, Logits, head_fields
from eecore.decoding.memory import HostSide, cross_batch
from eecore.decoding.sampling import DRAWS_DRAFT, DRAWS_TOKEN, sampling_rows
from eecore.decoding.step import tapped_layers
from eecore.models import AttentionBatch, KVCache, LlamaModel, Network
from eecore.planning.row import Outcome, Row


class DraftStep(DraftRows):
    """Rounds of up to ``sizes.num_rows`` sequences; the rows after them are padding."""

    _logits: Logits | None = None
    """Logits of the verified tokens, if some rows need them."""

    def __init__(self, model: Network, kv: KVCache, kind: DraftKind) -> None:
        super().__init__(model, kv, kind)
        given, results, zeros = self._given.device, self._results.device, self.zeros
        rows, width = kind.sizes.num_rows, kind.num_steps + 1
        self._num_rows = given["num_rows"]
        self._outcomes = DraftOutcomes(kind, model.config.num_layers)
        states = None
        if kind.path.shared_layers:
            states = zeros(rows, width, model.config.hidden_size, dtype=model.dtype)
        self._round = new_round(
            self,
            given,
            width,
            max_drafts=given["max_drafts"],
            thresholds=given["thresholds"],
            tokens=results["tokens"],
            confidences=results["draft_confidences"],
            num_drafted=results["num_drafted"],
            states=states,
            drafts=given.get("drafts"),
            num_given=given.get("num_given"),
        )
        self._ended = ops.EndedRound(results["next_token"], zeros(rows), zeros(rows))
        self._active, self._draft_batch = self.active_rows(
            positions=zeros(rows),
            slot_mapping=zeros(rows),
            seq_lens=zeros(rows, dtype=torch.int32),
            token_ids=zeros(rows),
        )
        # Tokens and confidences of one drafting step.
        self._drafted = {
            name: zeros(*shape, dtype=dtype)
            for name, (dtype, shape) in head_fields(rows, replace(kind.sizes.heads, top=0)).items()
        }
        self._verification = checked = new_verification(self, width)._replace(
            query_start_loc=results["query_start_loc"]
        )
        pages, cross = given["page_table"], cross_batch(given)
        self._last_batch = AttentionBatch(
            checked.last_positions,
            checked.last_slots,
            pages,
            checked.last_seq_lens,
            self._draft_batch.query_start_loc,
            cross,
            states=self.states_in(pages),
        )
        self._verify_batch = AttentionBatch(
            checked.positions,
            checked.slot_mapping,
            pages,
            checked.seq_lens,
            checked.query_start_loc,
            cross,
            states=self.states_in(pages),
        )
        head = model.draft_head
        if kind.taps and head is not None and head.keys is not None:
            self._keys = HeadKeys(model, kv, rows * width)
        self._begin_with: dict[str, Any] = {}  # keyword arguments of begin_round
        self._accept_with: dict[str, Any] = {}  # keyword arguments of accept_round
        if kind.drafts_ahead:
            assert isinstance(model, LlamaModel)
            assert head is not None
            assert kind.path.is_given  # else both ways to draft would move rows of open_page_table
            accepted = self._round._replace(num_drafted=results["num_accepted"])
            ended = EndedRounds(self, given, results, self._ended, accepted, kv)
            self._ahead = head.drafting(ended) or HeadDrafting(head, model, ended)
            self._accept_with["last_row"] = self._ahead.last_row
        if self.sizes.follows:
            ahead = None if self._ahead is None else self._ahead.drafted
            self._begin_with = {"ended": self._ended, "sources": given["sources"], "ahead": ahead}
        draft_draws: dict[str, Any] = {}
        verify_draws: dict[str, Any] = {}
        if kind.samples:
            # As large as all other memory together; on a CPU only rows that draw touch their part.
            draft_probs, target_probs = (
                self.unset(rows * count, model.config.vocab_size, dtype=torch.float32)
                for count in (kind.num_steps, width)
            )
            uniform = zeros(rows * width, 2, dtype=torch.float32)
            draft_draws = {"probs": draft_probs, "probs_by_step": kind.num_steps}
            verify_draws = {"probs": target_probs, "uniform": uniform}
            self._accept_with |= {
                "sampled": given["sampled"],
                "draft_probs": draft_probs,
                "target_probs": target_probs,
                "uniform": uniform,
            }
        self._draft_work = self._work(DRAWS_DRAFT, self._active.positions, draft_draws)
        self._verify_work = self._work(DRAWS_TOKEN, checked.positions, verify_draws)

    def _work(self, purpose: int, positions: Tensor, draws: dict[str, Any]) -> HeadWork | None:
        """The settings of rows that need logits, where there are any.

        Args:
            purpose: what the random numbers are for.
            positions: int64 [num_rows], the position of the token before the one that is made.
            draws: the fields of :class:`HeadWork` where drawn tokens leave their distributions.
        """
        if not self.sizes.heads.logits:
            return None
        return HeadWork(
            sampling_rows(self._given.device),
            positions,
            purpose,
            round_tokens=self._round.tokens,
            first_position=self._round.first_position,
            **draws,
        )

    # The program

    def run(self, control: Control) -> None:
        """Draft until no row drafts any more, then verify."""
        made, active = self._round, self._active
        drafts = not self.kind.path.is_given
        condition = control.condition(made.all_done) if drafts else None
        with control.rows(self._num_rows):
            ops.begin_round(made, active, self._page_size, condition=condition, **self._begin_with)
            if control.compacts:
                ops.compact_rows(made.done, active)
        if drafts:
            control.unless(made.all_done, lambda: self._draft(0, control), condition)
        self._verify(control)

    def _draft(self, step: int, control: Control) -> None:
        """Draft one more token of every row that still drafts, then the tokens after it."""
        made, active, drafted = self._round, self._active, self._drafted
        goes_on = step + 1 < self.kind.num_steps
        condition = control.condition(made.all_done) if goes_on else None
        with control.rows(active.num_active):
            shared, hidden = self._draft_layers()
            self._draft_head(hidden, control)
            token, gap = drafted["token"], drafted["gap"]
            ops.append_drafts(shared, token, gap, step, made, active, condition=condition)
            if control.compacts:
                ops.compact_rows(made.done, active)
        if goes_on:
            control.unless(made.all_done, lambda: self._draft(step + 1, control), condition)

    def _verify(self, control: Control) -> None:
        """Run the last tokens through the shared layers, then all tokens through the others."""
        made, checked, num_rows = self._round, self._verification, self._num_rows
        token, num_accepted = self._results.device["token"], self._results.device["num_accepted"]
        with control.rows(num_rows):
            ops.begin_verification(made, checked)
            last = self._last_through_shared()
        with control.rows(checked.num_tokens, num_rows):
            states = self._verify_layers(last, control)
        with control.rows(num_rows):
            ops.accept_round(made, checked, token, self._ended, num_accepted, **self._accept_with)
        if self._keys is not None:
            # Keys after the last accepted token are overwritten before they are read.
            with control.rows(checked.num_tokens, num_rows):
                states = [self._keys.fill(states, token, self._verify_batch)]
        if self._ahead is not None:
            self._ahead.run(states, control, num_rows)

    def _draft_layers(self) -> tuple[Tensor | None, Tensor]:
        """The states of the drafting rows after the layers shared with verification, which are None
        without such layers, and after all layers of the draft.
        """
        model, path, kv, batch = self._model, self.kind.path, self._kv, self._draft_batch
        num_shared, num_layers = path.shared_layers, path.num_layers
        assert self._active.token_ids is not None
        hidden, shared = model.embed(self._active.token_ids), None
        if num_shared:
            hidden = shared = model.layers(0, num_shared, hidden, kv, batch)
        if num_shared < num_layers:
            hidden = model.layers(
                num_shared,
                num_layers,
                hidden,
                kv,
                batch,
                skip_attention=path.skip_attention,
                skip_mlp=path.skip_mlp,
            )
        return shared, hidden

    def _draft_head(self, hidden: Tensor, control: Control) -> None:
        """Write the drafted tokens and their confidences."""
        self._heads.run(
            hidden,
            self._given.device["kind"],
            self._drafted,
            control,
            self._draft_work,
            request=self._active.row,
            as_probability=self.kind.path.stops_on == "probability",
        )

    def _last_through_shared(self) -> Tensor | None:
        """The states of the last tokens after the shared layers; None without such layers."""
        num_shared = self.kind.path.shared_layers
        if not num_shared:
            return None
        hidden = self._model.embed(self._verification.last_tokens)
        return self._model.layers(0, num_shared, hidden, self._kv, self._last_batch)

    def _verify_layers(self, last: Tensor | None, control: Control) -> list[Tensor]:
        """Write the token after each verified one, and return the states after the taps.

        Args:
            last: the result of :meth:`_last_through_shared`.
        """
        model, made, checked = self._model, self._round, self._verification
        if last is None:
            hidden = model.embed(checked.token_ids)
        else:
            assert made.states is not None
            hidden = ops.gather_states(made.states, last, checked)
        begin, end = self.kind.path.shared_layers, model.config.num_layers
        hidden, states = tapped_layers(
            model, begin, end, self.kind.taps, hidden, self._kv, self._verify_batch
        )
        self._logits = self._heads.run(
            hidden,
            self._given.device["kind"],
            self._results.device,
            control,
            self._verify_work,
            request=checked.sequence,
        )
        return states

    def fetch(self) -> HostSide:
        if self._scores:
            self._score()
        return super().fetch()

    @torch.inference_mode()
    def _score(self) -> None:
        """Write the log-probabilities of the tokens that rows have got which draw drafts: they need
        not be the tokens that the full model has drawn.
        """
        results, checked, sampled = self._results.device, self._verification, self._given.device
        request, starts = checked.sequence.long(), checked.query_start_loc
        place = torch.arange(len(request), device=request.device) - starts[request]
        made = self._made()[request, place.clamp(max=self.kind.num_steps)]
        assert self._logits is not None
        rows, logits = self._logits.of(made.clamp(min=0))
        known = results["logprob"][rows]
        own = logits - results["logsumexp"][rows]
        results["logprob"][rows] = own.where(sampled["sampled"][request[rows]], known)

    def _made(self) -> Tensor:
        results = self._results.device
        drafts, accepted = results["tokens"][:, 1:], results["num_accepted"].unsqueeze(1)
        following = results["next_token"].unsqueeze(1)
        place = torch.arange(self.kind.num_steps + 1, device=drafts.device)
        tokens = torch.cat([drafts, following], 1).where(place < accepted, following)
        return tokens.masked_fill(place > accepted, -1)

    # Outcomes

    def outcomes(self, rows: list[tuple[int, Row]], arrived: HostSide) -> list[Outcome]:
        """Outcomes of some of the rows of a round; waits until the results have arrived."""
        return self._outcomes.of(rows, arrived.wait().cells)
