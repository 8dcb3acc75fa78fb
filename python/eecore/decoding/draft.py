"""The first half of self-speculation: draft. (LayerSkip §4.3.1, A.4; Zhang et al. 2023.)

A draft runs either the first layers only (SelfSpeculative) or all layers with some sublayers left
out (DraftAndVerify). Both keep the state of every drafted position at the depth up to which the
draft ran exactly like the full model: verification takes the rows up from there, so that no
position passes through one of those layers twice. Their KV is in the cache already; deeper layers'
KV, where a draft with left-out sublayers wrote any, is overwritten by the verification.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from eecore.decoding.draft_stop import stop_rule
from eecore.decoding.heads import Heads, read_heads
from eecore.engine.batch import RowBuilder
from eecore.engine.runner import Runner
from eecore.engine.sampling import filtered_probs, generator_of, pick
from eecore.engine.scheduler import Work
from eecore.engine.sequence import Sequence
from eecore.exits import DraftAndVerify, Exit, SelfSpeculative

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
        while members:
            _draft_one(runner, path, [(works[i].sequence, drafts[i]) for i in members])
            members = [i for i in members if _goes_on(works[i], drafts[i])]
    return drafts


def _draft_one(runner: Runner, path: DraftPath, rows: list[tuple[Sequence, Draft]]) -> None:
    """One more draft token for each sequence."""
    builder = RowBuilder(runner.kv.page_size)
    for sequence, draft in rows:
        last = draft.tokens[-1] if draft.tokens else sequence.output_ids[-1]
        position = sequence.num_tokens - 1 + len(draft.tokens)
        builder.add([last], position, sequence.pages, enter=[0], leave=[path.num_layers])
    sweep = runner.sweep(
        builder.build(),
        skip_attention=path.skip_attention,
        skip_mlp=path.skip_mlp,
        capture_after=path.shared_layers,
    )
    heads = read_heads(
        runner, sweep.hidden, [(i, sequence) for i, (sequence, _) in enumerate(rows)]
    )
    skipped = sum(
        (layer in path.skip_attention and layer in path.skip_mlp)
        for layer in range(path.num_layers)
    )
    for i, (sequence, draft) in enumerate(rows):
        token = _choose(heads, i, sequence, draft)
        draft.tokens.append(token)
        draft.confidences.append(_draft_confidence(heads, i, sequence, draft))
        if sweep.captured is not None:
            draft.states.append(sweep.captured[i])
        draft.layers_run += path.num_layers - skipped


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
