"""A round of speculation as a program: draft, verify, accept.

(LayerSkip §4.3, A.4; Leviathan et al. 2023; Zhang et al. 2023.) A draft runs either the first
layers only (SelfSpeculative) or all layers with some sublayers skipped (DraftAndVerify). Both keep
the state of every drafted position after the first layers, which the draft runs exactly like the
full model. Verification continues from these states, so that no position passes through a shared
layer twice. The keys and values of shared layers are in the cache already. A draft with skipped
sublayers also writes keys and values of deeper layers; verification overwrites them.

Drafts that were looked up (PromptLookup) are given to the round, and all layers verify them. Their
distribution has a single token, so rejection sampling accepts a draft where the full model draws
the same token: a sampled request gets the tokens that decoding without drafts draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isnan
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eecore import ops
from eecore.decoding.block_drafts import BlockDrafting
from eecore.decoding.control import Control
from eecore.decoding.head_drafts import (
    HeadDrafting,
    HeadKeys,
    drafted_ahead,
    head_drafting_fields,
    head_results,
    new_round,
    new_verification,
)
from eecore.decoding.heads import HeadWork, Logits, head_fields
from eecore.decoding.memory import (
    Cells,
    Field,
    HostSide,
    cross_batch,
    cross_fields,
    numbers_of,
    power_of_two,
)
from eecore.decoding.sampling import (
    DRAWS_DRAFT,
    DRAWS_TOKEN,
    NO_TOKEN,
    head_sizes,
    sampling_rows,
    top_logprobs,
)
from eecore.decoding.step import Sizes, Step, sizes_for, tapped_layers
from eecore.errors import NotFiniteError
from eecore.models import (
    AttentionBatch,
    DraftHead,
    KeyedHead,
    KVCache,
    LlamaModel,
    Network,
    PassHead,
)
from eecore.planning.heads import max_ahead
from eecore.planning.route import DraftPath
from eecore.planning.row import Outcome, Row
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Counters, Sequence, TokenRecord

__all__ = ["DraftKind", "DraftStep", "draft_kind"]

# Programs are made for at least this many drafts, if requests can have so many, also near the end
# of a text.
MIN_STEPS = 16


@dataclass(frozen=True)
class DraftKind:
    """The key of a program: its calls, and the sizes of its memory."""

    path: DraftPath
    num_steps: int
    """Maximum number of drafts of a row."""
    samples: bool
    """Whether some rows draw their drafts at random."""
    num_stops: int
    """Maximum number of tokens that end a row's text."""
    most_ahead: int
    """Maximum number of drafts that a draft head makes for the next round; 0 where none does."""
    taps: tuple[int, ...]
    """Layers after which a draft head takes the states of verified rows; () where none does."""
    sizes: Sizes

    @property
    def drafts_ahead(self) -> bool:
        """Whether a draft head drafts for the next round."""
        return self.most_ahead > 0


def draft_kind(
    rows: list[Row],
    *,
    page_size: int,
    ahead: bool,
    head: DraftHead | KeyedHead | None = None,
) -> DraftKind:
    """The program that these rows need, sizes rounded up."""
    sequences = [row.sequence for row in rows]
    path = rows[0].route.path
    assert path is not None
    steps = power_of_two(max(MIN_STEPS, *(row.work.max_drafts for row in rows)))
    # No more than the requests can ever have.
    longest = max(sequence.sampling.max_tokens - 1 for sequence in sequences)
    steps = min(steps, max(s.max_drafts for s in sequences), power_of_two(max(1, longest)))
    drafts_ahead = any(row.ahead > 0 for row in rows)
    takes = path.is_given and (drafts_ahead or isinstance(head, KeyedHead))
    return DraftKind(
        path,
        steps,
        not path.is_given and any(s.sampling.temperature > 0.0 for s in sequences),
        power_of_two(max(1, *(len(sequence.stop_ids) for sequence in sequences))),
        max_ahead(head) if drafts_ahead else 0,
        head.taps if takes and head is not None else (),
        sizes_for(
            rows,
            steps + 1,
            page_size=page_size,
            ahead=ahead,
            more_pages=_more_pages(head, page_size) if drafts_ahead else 0,
        ),
    )


def _more_pages(head: DraftHead | KeyedHead | None, page_size: int) -> int:
    """Entries of the page table after a row's own pages, for the places of its block that have no
    slot: causal attention counts them in the length."""
    if not isinstance(head, PassHead) or not head.causal:
        return 0
    return -(-head.block_size // page_size)


class DraftStep(Step):
    """Rounds of up to ``sizes.num_rows`` sequences; the rows after them are padding."""

    def __init__(self, model: Network, kv: KVCache, kind: DraftKind) -> None:
        self.kind = kind
        super().__init__(model, kv, kind.sizes, self._given_fields(), self._result_fields())
        given, results = self._given.device, self._results.device
        rows, width = kind.sizes.num_rows, kind.num_steps + 1

        zeros, states = self.zeros, None
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
        self._active, self._batch = self.active_rows(
            positions=zeros(rows),
            slot_mapping=zeros(rows),
            seq_lens=zeros(rows, dtype=torch.int32),
            token_ids=zeros(rows),
        )
        self._verification = new_verification(self, width)._replace(
            query_start_loc=results["query_start_loc"]
        )
        # Tokens and confidences of one drafting step.
        self._drafted = {
            name: zeros(*shape, dtype=dtype)
            for name, (dtype, shape) in head_fields(rows, replace(kind.sizes.heads, top=0)).items()
        }
        self.rows: list[Row] = []
        self._sequences: list[Sequence] = []
        self._adapts = False  # whether some row's threshold follows its acceptance rate
        self._draft_layers = kind.path.layers_run - kind.path.shared_layers
        self._cross = cross_batch(given)
        vocab = model.config.vocab_size if kind.samples else 0
        # As large as all other memory together; on a CPU only rows that draw touch their part.
        self._draft_probs = self.unset(rows * kind.num_steps, vocab, dtype=torch.float32)
        self._target_probs = self.unset(rows * width, vocab, dtype=torch.float32)
        self._uniform = zeros(rows * width, 2, dtype=torch.float32)
        self._logits: Logits | None = None
        self._more_pages = 0
        self._keys: HeadKeys | None = None
        if kind.taps and isinstance(model.draft_head, KeyedHead):
            self._keys = HeadKeys(model, kv, rows * width)
        self._ahead: HeadDrafting | BlockDrafting | None = None
        if kind.drafts_ahead:
            assert isinstance(model, LlamaModel)
            assert kind.path.is_given  # else both ways to draft would move rows of open_page_table
            accepted = self._round._replace(num_drafted=results["num_accepted"])
            head = model.draft_head
            if isinstance(head, PassHead):
                self._more_pages = _more_pages(head, kv.page_size)
                self._ahead = BlockDrafting(self, head, given, results, self._ended, kv)
            else:
                self._ahead = HeadDrafting(self, model, given, results, self._ended, accepted, kv)

    def _given_fields(self) -> dict[str, Field]:
        sizes = self.kind.sizes
        row, drafts = (sizes.num_rows,), (sizes.num_rows, self.kind.num_steps)
        ahead = self.kind.most_ahead
        return {
            "start": (torch.int64, row),
            "tokens_left": (torch.int64, row),
            "max_drafts": (torch.int64, row),
            **({"num_given": (torch.int64, row)} if self.kind.path.is_given else {}),
            **(head_drafting_fields(sizes.num_rows, ahead) if ahead else {}),
            "page_table": (torch.int32, (sizes.num_rows, sizes.num_pages)),
            "thresholds": (torch.float32, row),
            "stop_tokens": (torch.int64, (sizes.num_rows, self.kind.num_stops)),
            "sampled": (torch.bool, row),
            **({"drafts": (torch.int64, drafts)} if self.kind.path.is_given else {}),
            **cross_fields(sizes.num_rows, sizes.num_input_pages),
        }

    def _result_fields(self) -> dict[str, Field]:
        rows, steps, ahead = self.kind.sizes.num_rows, self.kind.num_steps, self.kind.most_ahead
        return {
            "num_drafted": (torch.int64, (rows,)),
            "num_accepted": (torch.int64, (rows,)),
            "next_token": (torch.int64, (rows,)),
            "tokens": (torch.int64, (rows, steps + 1)),  # the first, then the drafts
            "draft_confidences": (torch.float32, (rows, steps)),
            "query_start_loc": (torch.int32, (rows + 1,)),
            **(head_results(rows, ahead) if ahead else {}),
            # Tokens and confidences of the full model, at every verified position.
            **head_fields(rows * (steps + 1), self.kind.sizes.heads),
        }

    # Between rounds

    def fits(self, rows: list[Row]) -> bool:
        """Whether these rows are the rows that were loaded last, and need this program again."""
        if rows[0].route.path is not self.kind.path:
            return False
        sequences = [row.work.sequence for row in rows]
        if self._sequences != sequences:
            return False
        heads = self.sizes.heads
        if heads.logits and head_sizes(sequences, self.kind.num_steps + 1) != heads:
            return False  # penalties count more tokens now than there is memory for
        num_pages = self.sizes.num_pages - self._more_pages
        most = num_pages * self._page_size - self.kind.num_steps
        for row in rows:
            work = row.work
            if work.max_drafts > MIN_STEPS or len(work.sequence.pages) > num_pages:
                return False
            if work.sequence.num_tokens > most:
                return False
        return True

    def load(self, rows: list[Row]) -> None:
        """Load the rows of the next round: at most ``sizes.num_rows`` sequences."""
        sequences = [row.work.sequence for row in rows]
        changes = self.sizes.follows or self.sizes.heads.logits
        if changes or self._sequences != sequences:
            self._fixed = object()
        self._write(rows, sequences)

    def follow(self, works: list[Work]) -> bool:
        """Load the rows of the run in flight again, each to continue after its tokens there.

        Returns:
            False, without any effect, where the requests are not the same, or no longer fit.
        """
        sequences = [work.sequence for work in works]
        if not self.sizes.follows or self._sequences != sequences:
            return False
        for work in works:
            if len(work.sequence.pages) > self.sizes.num_pages - self._more_pages:
                return False
        rows = self._followers(self.rows)
        if any(map(is_not, [row.work for row in rows], works)):
            rows = [row._replace(work=work) for row, work in zip(rows, works, strict=True)]
        self._write(rows, sequences)
        return True

    def _write(self, rows: list[Row], sequences: list[Sequence]) -> None:
        """Write all fields of a round, and send them."""
        self.rows, self._sequences = [], []  # until all is written
        self._host = host = self._given.host()
        if host.holds is not self._fixed:
            self._write_fixed(rows, sequences)
        elif self._adapts:
            host.write(thresholds=[_threshold(row) for row in rows])
        self._write_state(rows)
        pages = [sequence.pages for sequence in sequences]
        for prefix in ("", "open_"):
            host.write_pages(f"{prefix}page_table", pages)
            if self.sizes.num_input_pages:
                self._write_inputs(sequences, prefix)
        self.send()
        self.rows, self._sequences = rows, sequences

    def _write_fixed(self, rows: list[Row], sequences: list[Sequence]) -> None:
        """Write the columns that do not change from round to round of the same rows."""
        self._host.holds = None
        self._adapts = any(row.route.adaptive for row in rows)
        self._write_rows(rows)
        padding = [False] * (self.sizes.num_rows - len(rows))
        self._host.write(
            thresholds=[_threshold(row) for row in rows],
            sampled=[s.sampling.temperature > 0.0 for s in sequences] + padding,
        )
        stops = self._host.arrays["stop_tokens"]
        stops[:] = -1
        for i, sequence in enumerate(sequences):
            stops[i, : len(sequence.stop_ids)] = sequence.stop_ids
        self._host.holds = self._fixed

    def _write_state(self, rows: list[Row]) -> None:
        """Write the position and the given drafts of each row."""
        cells, states = self._host.cells, []
        for i, row in enumerate(rows):
            work, sequence, drafts = row.work, row.work.sequence, row.given.tokens
            output = sequence.output_ids
            where = output[-1], len(sequence.prompt_ids) + len(output) - 1, sequence.tokens_left
            num_ahead = row.ahead if self._keys is None else self._num_ahead(row)
            states.append((*where, work.max_drafts, len(drafts), num_ahead))
            for k, token in enumerate(drafts):
                cells["drafts"][i, k] = token
            if self._ahead is not None:
                for k, threshold in enumerate(row.ahead_thresholds):
                    cells["ahead_thresholds"][k, i] = threshold
        states += [(0, 0, 0, -1, 0, -1)] * (self.sizes.num_rows - len(rows))
        tokens, starts, left, most, num_given, ahead = zip(*states, strict=True)
        columns = {
            "num_active": (len(rows),),
            "token_ids": tokens,
            "start": starts,
            "tokens_left": left,
            "max_drafts": most,
        }
        if self.kind.path.is_given:
            columns["num_given"] = num_given
        if self._ahead is not None:
            columns |= {"ahead": ahead, "num_ahead": (len(rows),)}
        self._host.write_whole(**columns)

    def _num_ahead(self, row: Row) -> int:
        """Number of drafts that a head with keys of its own may make, by the slots for them."""
        verified = len(row.given.tokens) if row.follows is None else row.work.max_drafts
        # The key of the first draft is at the last verified position, or before it.
        sequence = row.sequence
        last = min(row.position + verified, sequence.num_tokens + sequence.tokens_left - 2)
        slots = len(sequence.pages) * self._page_size - last
        if isinstance(self._ahead, BlockDrafting):
            return self._ahead.num_drafts(slots - 1) if row.ahead else -1
        return min(row.ahead, slots)

    # The program

    def run(self, control: Control) -> None:
        """Draft until no row drafts any more, then verify."""
        given, active, made = self._given.device, self._active, self._round
        drafts = not self.kind.path.is_given
        condition = control.condition(made.all_done) if drafts else None
        with control.rows(given["num_rows"]):
            if self.sizes.follows:
                ops.begin_round(
                    made,
                    active,
                    self._kv.page_size,
                    ended=self._ended,
                    sources=given["sources"],
                    ahead=None if self._ahead is None else self._ahead.drafted,
                    condition=condition,
                )
            else:
                ops.begin_round(made, active, self._kv.page_size, condition=condition)
            if control.compacts:
                ops.compact_rows(made.done, active)
        if drafts:
            control.unless(made.all_done, lambda: self._draft(0, control), condition)
        self._verify(control)

    def _draft(self, step: int, control: Control) -> None:
        """Draft one more token of every row that still drafts, then the tokens after it."""
        model, path, active, made = self._model, self.kind.path, self._active, self._round
        batch = self._batch
        with control.rows(active.num_active):
            assert active.token_ids is not None
            hidden = model.embed(active.token_ids)
            shared = None
            if path.shared_layers:
                hidden = model.layers(0, path.shared_layers, hidden, self._kv, batch)
                shared = hidden
            if path.shared_layers < path.num_layers:
                hidden = model.layers(
                    path.shared_layers,
                    path.num_layers,
                    hidden,
                    self._kv,
                    batch,
                    skip_attention=path.skip_attention,
                    skip_mlp=path.skip_mlp,
                )
            drafted, goes_on = self._drafted, step + 1 < self.kind.num_steps
            condition = control.condition(made.all_done) if goes_on else None
            self._heads.run(
                hidden,
                self._given.device["kind"],
                drafted,
                control,
                self._work(DRAWS_DRAFT, active.positions),
                request=active.row,
                as_probability=path.stops_on == "probability",
            )
            ops.append_drafts(
                shared,
                drafted["token"],
                drafted["gap"],
                step,
                made,
                active,
                condition=condition,
            )
            if control.compacts:
                ops.compact_rows(made.done, active)
        if goes_on:
            control.unless(made.all_done, lambda: self._draft(step + 1, control), condition)

    def _verify(self, control: Control) -> None:
        """Run the last token through the shared layers, then all tokens through the others."""
        model, given, results = self._model, self._given.device, self._results.device
        shared, made, checked = self.kind.path.shared_layers, self._round, self._verification
        with control.rows(given["num_rows"]):
            ops.begin_verification(made, checked)
            if shared:
                batch = AttentionBatch(
                    checked.last_positions,
                    checked.last_slots,
                    made.page_table,
                    checked.last_seq_lens,
                    self._batch.query_start_loc,
                    self._cross,
                )
                last = model.embed(checked.last_tokens)
                last = model.layers(0, shared, last, self._kv, batch)
        with control.rows(checked.num_tokens, given["num_rows"]):
            if made.states is not None:
                hidden = ops.gather_states(made.states, last, checked)
            else:
                hidden = model.embed(checked.token_ids)
            batch = AttentionBatch(
                checked.positions,
                checked.slot_mapping,
                made.page_table,
                checked.seq_lens,
                checked.query_start_loc,
                self._cross,
            )
            layers = model.config.num_layers
            hidden, states = tapped_layers(
                model, shared, layers, self.kind.taps, hidden, self._kv, batch
            )
            self._logits = self._heads.run(
                hidden,
                given["kind"],
                results,
                control,
                self._work(DRAWS_TOKEN, checked.positions),
                request=checked.sequence,
            )
        with control.rows(given["num_rows"]):
            drawn: dict[str, Any] = {}
            if self._ahead is not None:
                drawn["last_row"] = self._ahead.last_row
            if self.kind.samples:
                drawn |= {
                    "sampled": given["sampled"],
                    "draft_probs": self._draft_probs,
                    "target_probs": self._target_probs,
                    "uniform": self._uniform,
                }
            ops.accept_round(
                made, checked, results["token"], self._ended, results["num_accepted"], **drawn
            )
        if self._keys is not None:
            # Keys after the last accepted token are overwritten before they are read.
            with control.rows(checked.num_tokens, given["num_rows"]):
                states = [self._keys.fill(states, results["token"], batch)]
        if self._ahead is not None:
            self._ahead.run(states, control, given["num_rows"])

    def _work(self, purpose: int, positions: Tensor) -> HeadWork | None:
        """The settings of rows that need logits, where there are any."""
        if not self.sizes.heads.logits:
            return None
        work = HeadWork(
            sampling_rows(self._given.device),
            positions,
            purpose,
            round_tokens=self._round.tokens,
            first_position=self._round.first_position,
        )
        if not self.kind.samples:
            return work
        if purpose == DRAWS_DRAFT:
            return replace(work, probs=self._draft_probs, probs_by_step=self.kind.num_steps)
        return replace(work, probs=self._target_probs, uniform=self._uniform)

    # Outcomes

    def outcomes(self, rows: list[tuple[int, Row]], arrived: HostSide) -> list[Outcome]:
        """Outcomes of some of the rows of a round; waits until the results have arrived."""
        got = arrived.wait().cells
        starts = got["query_start_loc"]
        return [self._outcome(row, i, starts[i], got) for i, row in rows]

    def _outcome(self, row: Row, i: int, start: int, got: Cells) -> Outcome:
        """The accepted part of a round; no token follows an accepted end of the text."""
        sequence, num_layers = row.work.sequence, self._model.config.num_layers
        drafted, accepted, tokens = got["num_drafted"][i], got["num_accepted"][i], got["tokens"]
        emitted = [tokens[i, k] for k in range(1, accepted + 1)]
        if not 0 < drafted == accepted or not sequence.stops_at(tokens[i, drafted]):
            emitted.append(got["next_token"][i])
        records = self._records(sequence, emitted, accepted, i, start, got)
        good = len(records)
        if not good:
            return Outcome(sequence, sequence.num_computed, error=NotFiniteError(NO_TOKEN))
        is_cut = good < len(emitted)
        emitted, accepted = emitted[:good], min(accepted, good)
        # Drafted positions run through the layers that they share with the draft once.
        runs = drafted * self._draft_layers + (drafted + 1) * num_layers
        outcome = Outcome(
            sequence,
            sequence.num_computed + good,
            records,
            [num_layers] * good,
            Counters(layers_run=runs, drafted=drafted, accepted=accepted),
            is_cut=is_cut,
        )
        if self._ahead is not None and not is_cut:
            outcome.ahead = drafted_ahead(row, i, emitted, got)
        if row.route.adaptive:
            outcome.draft_stop = sequence.draft.stop.after(drafted, accepted, sequence.max_drafts)
        return outcome

    def _records(
        self, sequence: Sequence, emitted: list[int], accepted: int, i: int, start: int, got: Cells
    ) -> list[TokenRecord]:
        """Records of the tokens up to the first whose logits or confidence are NaN."""
        path, num_layers = self.kind.path, self._model.config.num_layers
        gaps, logprobs = got["gap"], got["logprob"]
        is_asked = sequence.sampling.logprobs is not None
        records: list[TokenRecord] = []
        for k, token in enumerate(emitted):
            at, is_draft = start + k, k < accepted
            if token < 0 or isnan(logprobs[at]):
                break
            confidence = gaps[at]
            if is_draft and not path.is_given:
                confidence = got["draft_confidences"][i, k]
                if isnan(confidence):
                    break
            logprob, best = self._logprobs(sequence, token, at, got) if is_asked else (None, None)
            layer = path.num_layers if is_draft else num_layers
            records.append(TokenRecord(token, layer, confidence, logprob, best))
        return records

    def _logprobs(
        self, sequence: Sequence, token: int, at: int, got: Cells
    ) -> tuple[float | None, dict[int, float] | None]:
        """Log-probabilities of an emitted token, as far as the request asked for them."""
        logprob = got["logprob"][at]
        if token != got["token"][at]:  # a sampled draft, or drawn after a rejection
            assert self._logits is not None
            logprob = self._logits.of(at, token) - got["logsumexp"][at]
        ids, values = numbers_of(got, "top_ids", at), numbers_of(got, "top_logprobs", at)
        return top_logprobs(sequence.sampling.logprobs, logprob, ids, values)


def _threshold(row: Row) -> float:
    """The smallest float32 not below the row's threshold: the same float32 numbers reach both."""
    threshold = row.route.draft_threshold
    if threshold is None:
        return -1.0
    if row.route.adaptive:
        threshold = row.sequence.draft.stop.threshold
    rounded = np.float32(threshold)
    if float(rounded) < threshold:
        rounded = np.nextafter(rounded, np.float32(np.inf))
    return float(rounded)
