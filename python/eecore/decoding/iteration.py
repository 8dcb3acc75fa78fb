"""One iteration of the engine: draft, one pass through the layers for everybody, heads, outcome.

Prefill chunks, replays, plain decoding, fixed and confident exits and verifications share the pass;
they differ in where their rows enter and leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eecore.decoding.batch import BoolArray, RowBuilder
from eecore.decoding.confident import ConfidentController
from eecore.decoding.draft import Draft, draft, draft_path
from eecore.decoding.heads import Heads, read_heads
from eecore.decoding.outcome import Outcome
from eecore.decoding.runner import Runner, Sweep
from eecore.decoding.sampling import filtered_probs, generator_of, needs_logits, pick
from eecore.decoding.verify import Acceptance, accept, needs_next
from eecore.exits import ConfidentExit, Exit, FixedExit
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Sequence, TokenRecord

__all__ = ["Outcome", "run_iteration"]


@dataclass(frozen=True)
class _Plan:
    """A work and where its rows are in the pass."""

    work: Work
    at: slice
    draft: Draft

    @property
    def emits(self) -> bool:
        """Whether the last row gives a token: always, but for replays and unfinished prompts."""
        sequence = self.work.sequence
        if not self.work.is_prefill:
            return True
        reached = sequence.num_computed + self.work.num_tokens
        return not sequence.output_ids and reached == sequence.num_prompt_tokens


@torch.inference_mode()
def run_iteration(runner: Runner, works: list[Work]) -> list[Outcome]:
    """Run the scheduled works; returns one outcome per work, in order."""
    unread = [work.sequence for work in works if work.sequence.tokens_to_encode]
    if unread:
        runner.encode(unread)
    drafts = draft(runner, works)
    builder = RowBuilder(runner.kv.page_size)
    plans = [
        _Plan(work, _add_rows(builder, runner.num_layers, work, made), made)
        for work, made in zip(works, drafts, strict=True)
    ]
    rows = builder.build()
    confident = [
        (plan.at.start, plan.work.sequence)
        for plan in plans
        if not plan.work.is_prefill and _is_watched(plan.work.sequence.exit, runner.num_layers)
    ]
    controller = ConfidentController(runner, confident) if confident else None
    sweep = runner.sweep(
        rows,
        entering=_kept_states(plans),
        controller=controller,
        fill_at_once=_mask(_replayed(plans), len(rows)),
        fill_at_end=_mask([row for row, _ in confident], len(rows)),
    )
    heads = _read_heads(runner, plans, sweep, controller)
    rounds = _verify(plans, heads)
    return [
        _outcome(plan, sweep, heads, controller, rounds.get(id(plan)), runner.num_layers)
        for plan in plans
    ]


def _is_watched(policy: Exit, num_layers: int) -> bool:
    """Whether it may leave early, keeps others from it, or is measured for the record."""
    return isinstance(policy, ConfidentExit) and (
        bool(policy.points(num_layers)) or policy.batch == "all" or policy.measure != "softmax"
    )


def _add_rows(builder: RowBuilder, num_layers: int, work: Work, made: Draft) -> slice:
    """The rows of one work: where they enter and, but for confident exits, where they leave."""
    sequence = work.sequence
    policy = sequence.exit
    leave = policy.exit_layer if isinstance(policy, FixedExit) else num_layers
    cross: dict[str, Any] = {}
    if sequence.input_ids is not None:
        cross = {"cross_pages": sequence.input_pages, "cross_len": len(sequence.input_ids)}
    if work.is_prefill:
        first, stop = sequence.num_computed, sequence.num_computed + work.num_tokens
        leaves = [leave] * work.num_tokens
        if isinstance(policy, ConfidentExit):  # a replay leaves where the tokens left at first
            for position in range(max(first, sequence.num_prompt_tokens), stop):
                replayed = sequence.kv_exit_layers[position - sequence.num_prompt_tokens]
                leaves[position - first] = replayed
        tokens = sequence.tokens(first, stop)
        enter = [0] * work.num_tokens
        return builder.add(tokens, first, sequence.pages, enter=enter, leave=leaves, **cross)
    tokens = [sequence.output_ids[-1], *made.tokens]
    if not needs_next(sequence, made):
        tokens.pop()
    kept = len(made.states)
    enter = [0] * len(tokens)
    if kept:
        enter[:kept] = [draft_path(policy, num_layers).shared_layers] * kept
    return builder.add(
        tokens,
        sequence.num_tokens - 1,
        sequence.pages,
        enter=enter,
        leave=[leave] * len(tokens),
        **cross,
    )


def _kept_states(plans: list[_Plan]) -> Tensor | None:
    """States with which verification rows come in, in row order (the exit query cache)."""
    states = [state for plan in plans for state in plan.draft.states]
    return torch.stack(states) if states else None


def _replayed(plans: list[_Plan]) -> list[int]:
    """Rows whose KV was filled from an exit state and is being recomputed."""
    rows: list[int] = []
    for plan in plans:
        if plan.work.is_prefill and isinstance(plan.work.sequence.exit, ConfidentExit):
            rows += range(plan.at.start, plan.at.stop)  # those of the last layer need no filling
    return rows


def _mask(rows: list[int], num_rows: int) -> BoolArray | None:
    """[num_rows], true for some rows; None for none."""
    if not rows:
        return None
    mask = np.zeros(num_rows, dtype=np.bool_)
    mask[rows] = True
    return mask


def _verify(plans: list[_Plan], heads: Heads) -> dict[int, Acceptance]:
    """What stands of each verified plan's drafts, by the plan's id."""
    verified = [
        plan
        for plan in plans
        if plan.work.sequence.exit.max_drafts and not plan.work.is_prefill and plan.emits
    ]
    if not verified:
        return {}
    accepted = accept(heads, [(plan.work.sequence, plan.draft, plan.at) for plan in verified])
    return dict(zip(map(id, verified), accepted, strict=True))


def _read_heads(
    runner: Runner, plans: list[_Plan], sweep: Sweep, controller: ConfidentController | None
) -> Heads:
    """Heads of the rows that give tokens; what a confidence measure told is not run again."""
    asked = []
    known: dict[int, tuple[int, float, float]] = {}
    for plan in plans:
        if not plan.emits:
            continue
        sequence = plan.work.sequence
        rows = range(plan.at.start, plan.at.stop)
        if plan.work.is_prefill:
            rows = rows[-1:]
        for row in rows:
            if (
                controller is not None
                and row in controller.tokens
                and controller.measured_at[row] == sweep.exit_layer[row]
                and not needs_logits(sequence.sampling)
            ):
                known[row] = controller.tokens[row]
            else:
                asked.append((row, sequence))
    heads = read_heads(runner, sweep.hidden, asked)
    for row, (token, gap, logprob) in known.items():
        heads.token[row], heads.confidence[row], heads.top_logprob[row] = token, gap, logprob
    return heads


def _outcome(
    plan: _Plan,
    sweep: Sweep,
    heads: Heads,
    controller: ConfidentController | None,
    verified: Acceptance | None,
    num_layers: int,
) -> Outcome:
    """The tokens and counters of one work."""
    work, sequence = plan.work, plan.work.sequence
    layers_run = sum(sweep.layers_run[plan.at])
    outcome = Outcome(sequence, sequence.num_computed + work.num_tokens)
    if work.is_prefill:
        outcome.prompt_layers_run = layers_run
    else:
        outcome.layers_run = layers_run + plan.draft.layers_run

    if verified is not None:
        accepted, next_token = verified
        computed = accepted if next_token is None else 1 + accepted
        outcome.num_computed = sequence.num_computed + computed
        outcome.drafted, outcome.accepted = len(plan.draft.tokens), accepted
        outcome.kv_exit_layers = [num_layers] * computed
        outcome.records = _speculated(plan, heads, accepted, next_token, num_layers)
        return outcome

    if not plan.emits:
        return outcome
    row = plan.at.stop - 1
    exit_layer = sweep.exit_layer[row]
    if not work.is_prefill:
        outcome.kv_exit_layers = [exit_layer]
        if isinstance(sequence.exit, ConfidentExit) and exit_layer < num_layers:
            outcome.layers_filled, outcome.fill_calls = num_layers - exit_layer, 1
    confidence = heads.confidence[row]
    if controller is not None and row in controller.measured:
        measured_here = controller.measured_at[row] == exit_layer
        confidence = controller.measured[row] if measured_here else confidence
    outcome.records = [_sampled(sequence, heads, row, exit_layer, confidence)]
    return outcome


def _sampled(
    sequence: Sequence, heads: Heads, row: int, exit_layer: int, confidence: float
) -> TokenRecord:
    """The token of a row that was not drafted."""
    if row in heads.logits:
        context = sequence.prompt_ids + sequence.output_ids
        logits = heads.adjusted(row, sequence, context)
        if sequence.sampling.temperature == 0.0:
            token = int(logits.argmax())
        else:
            token = pick(filtered_probs(logits, sequence.sampling), generator_of(sequence))
    else:
        token = heads.token[row]
    logprob, top = heads.logprobs(row, sequence, token)
    return TokenRecord(token, exit_layer, confidence, logprob, top)


def _speculated(
    plan: _Plan, heads: Heads, accepted: int, next_token: int | None, num_layers: int
) -> list[TokenRecord]:
    """Accepted drafts with the depth and confidence of the draft, then the verifier's token."""
    sequence, made = plan.work.sequence, plan.draft
    depth = draft_path(sequence.exit, num_layers).num_layers
    records = []
    following = [] if next_token is None else [next_token]
    for i, token in enumerate([*made.tokens[:accepted], *following]):
        row = plan.at.start + i
        logprob, top = heads.logprobs(row, sequence, token)
        if i < accepted:
            records.append(TokenRecord(token, depth, made.confidences[i], logprob, top))
        else:
            records.append(TokenRecord(token, num_layers, heads.confidence[row], logprob, top))
    return records
