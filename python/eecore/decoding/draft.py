"""The first half of self-speculation: draft. (LayerSkip §4.3.1, A.4; Zhang et al. 2023.)

A draft runs either the first layers only (SelfSpeculative) or all layers with some sublayers left
out (DraftAndVerify). Both keep the state of every drafted position at the depth up to which the
draft ran exactly like the full model: verification takes the rows up from there, so that no
position passes through one of those layers twice. Their KV is in the cache already; deeper layers'
KV, where a draft with left-out sublayers wrote any, is overwritten by the verification.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from eecore.decoding.batch import cross_rows, fill_page_table
from eecore.decoding.draft_stop import stop_rule
from eecore.decoding.heads import Heads, read_heads
from eecore.decoding.runner import Runner
from eecore.decoding.sampling import filtered_probs, generator_of, pick
from eecore.exits import DraftAndVerify, Exit, SelfSpeculative
from eecore.models import AttentionBatch, CrossBatch
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Sequence

__all__ = ["Draft", "DraftPath", "draft", "draft_path"]


@dataclass(frozen=True)
class DraftPath:
    """Which part of the model drafts, and up to which layer it is the full model."""

    num_layers: int
    """Layers that the draft goes through."""
    shared_layers: int
    """Layers whose work verification reuses."""
    skip_attention: frozenset[int] = frozenset()
    skip_mlp: frozenset[int] = frozenset()


@dataclass
class Draft:
    """One sequence's drafts of a round."""

    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    """[hidden_size] after the shared layers, one per position the draft ran."""
    probs: list[Tensor] = field(default_factory=list)
    """float32 [vocab_size] each, when sampling."""
    layers_run: int = 0


def draft_path(policy: Exit, num_layers: int) -> DraftPath:
    """The draft of a speculating policy."""
    if isinstance(policy, SelfSpeculative):
        return DraftPath(policy.exit_layer, policy.exit_layer if policy.reuse else 0)
    assert isinstance(policy, DraftAndVerify)
    return DraftPath(num_layers, policy.first_skipped, policy.skip_attention, policy.skip_mlp)


def draft(runner: Runner, works: list[Work]) -> list[Draft]:
    """Draft for every work that may; requests with the same path share the passes."""
    drafts = [Draft() for _ in works]
    groups: dict[DraftPath, list[int]] = {}
    for i, work in enumerate(works):
        if work.max_drafts > 0:
            path = draft_path(work.sequence.exit, runner.num_layers)
            groups.setdefault(path, []).append(i)
    for path, members in groups.items():
        _draft_group(runner, path, [(works[i], drafts[i]) for i in members])
    return drafts


def _draft_group(runner: Runner, path: DraftPath, rows: list[tuple[Work, Draft]]) -> None:
    """Drafts of requests with one path, until none of them goes on."""
    model, first, last = runner.model, path.shared_layers, path.num_layers
    skips = {"skip_attention": path.skip_attention, "skip_mlp": path.skip_mlp}
    both = len(path.skip_attention & path.skip_mlp)
    while rows:
        batches, tokens = _batches(runner, rows), _last_tokens(runner, rows)
        count = len(rows)
        while len(rows) == count:  # until somebody ends
            hidden = model.embed(tokens)
            batch = next(batches)
            if first:
                hidden = model.layers(0, first, hidden, runner.kv, batch, **skips)
                for i, (_, draft) in enumerate(rows):
                    draft.states.append(hidden[i])
            if first < last:
                hidden = model.layers(first, last, hidden, runner.kv, batch, **skips)
            heads = read_heads(runner, hidden, [(i, w.sequence) for i, (w, _) in enumerate(rows)])
            for i, (work, draft) in enumerate(rows):
                draft.tokens.append(_choose(heads, i, work.sequence, draft))
                draft.confidences.append(_draft_confidence(heads, i, work.sequence, draft))
                draft.layers_run += last - both
            rows = [(work, draft) for work, draft in rows if _goes_on(work, draft)]
            tokens = _last_tokens(runner, rows) if heads.tokens is None else heads.tokens


def _last_tokens(runner: Runner, rows: list[tuple[Work, Draft]]) -> Tensor:
    """int64 [num_rows]"""
    last = [d.tokens[-1] if d.tokens else work.sequence.output_ids[-1] for work, d in rows]
    return runner.tensor(np.array(last, dtype=np.int64))


def _batches(runner: Runner, rows: list[tuple[Work, Draft]]) -> Iterator[AttentionBatch]:
    """One more position of every row at a time; all arrays are made at once."""
    page_size, count = runner.kv.page_size, len(rows)
    steps = max(work.max_drafts - len(draft.tokens) for work, draft in rows)
    begins = [work.sequence.num_tokens - 1 + len(draft.tokens) for work, draft in rows]
    positions = np.add.outer(np.arange(steps), np.array(begins))  # [steps, rows]
    pages = [work.sequence.pages for work, _ in rows]
    table = fill_page_table(np.empty((count, max(map(len, pages))), dtype=np.int32), pages)
    column = np.minimum(positions // page_size, table.shape[1] - 1)  # rows end before others do
    slots = table[np.arange(count), column].astype(np.int64) * page_size + positions % page_size
    at, to = runner.tensor(positions), runner.tensor(slots)
    seq_lens = runner.tensor((positions + 1).astype(np.int32))
    page_table = runner.tensor(table)
    starts = runner.tensor(np.arange(count + 1, dtype=np.int32))
    cross = _cross_batch(runner, [work.sequence for work, _ in rows])
    for step in range(steps):
        yield AttentionBatch(at[step], to[step], page_table, seq_lens[step], starts, cross)


def _cross_batch(runner: Runner, sequences: list[Sequence]) -> CrossBatch | None:
    """What sequences with an encoder attend to."""
    lengths = [len(s.input_ids) for s in sequences if s.input_ids is not None]
    if not lengths:
        return None
    return cross_rows([s.input_pages for s in sequences], lengths).batch(runner.tensor)


def _choose(heads: Heads, row: int, sequence: Sequence, draft: Draft) -> int:
    """The draft token: greedy, or drawn from the filtered draft distribution."""
    if row not in heads.logits:
        return heads.token[row]
    context = sequence.prompt_ids + sequence.output_ids + draft.tokens
    probs = filtered_probs(heads.adjusted(row, sequence, context), sequence.sampling)
    if sequence.sampling.temperature == 0.0:
        return int(probs.argmax())
    draft.probs.append(probs)
    return pick(probs, generator_of(sequence))


def _draft_confidence(heads: Heads, row: int, sequence: Sequence, draft: Draft) -> float:
    """What the draft's stop rule looks at: the gap, or (Zhang et al.) the token's probability."""
    if isinstance(sequence.exit, SelfSpeculative):
        return heads.confidence[row]
    if draft.probs:
        return float(draft.probs[-1][draft.tokens[-1]])
    return math.exp(heads.top_logprob[row])


def _goes_on(work: Work, draft: Draft) -> bool:
    """Whether another token is drafted in this round."""
    sequence = work.sequence
    if len(draft.tokens) >= work.max_drafts or sequence.stops_at(draft.tokens[-1]):
        return False
    policy = sequence.exit
    if isinstance(policy, SelfSpeculative):
        return policy.draft_threshold is None or draft.confidences[-1] >= policy.draft_threshold
    assert isinstance(policy, DraftAndVerify)
    return not policy.adaptive or draft.confidences[-1] >= stop_rule(sequence).threshold
