"""Self-speculation on one screen: draft, verify, accept. (LayerSkip §4.3, A.4; Zhang et al. 2023.)

A draft runs either the first layers only (SelfSpeculative) or all layers with some sublayers left
out (DraftAndVerify). Both keep the state of every drafted position at the depth up to which the
draft ran exactly like the full model: verification takes the rows up from there, so that no
position passes through one of those layers twice. Their KV is in the cache already; deeper layers'
KV, where a draft with left-out sublayers wrote any, is overwritten by the verification.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eecore import ops
from eecore.decoding.heads import Heads, read_heads
from eecore.engine.batch import RowBuilder
from eecore.engine.runner import Runner
from eecore.engine.sampling import NO_TOKEN, filtered_probs, make_generator, pick
from eecore.engine.scheduler import Work
from eecore.engine.sequence import Sequence
from eecore.exits import DraftAndVerify, Exit, SelfSpeculative

__all__ = ["AdaptiveDraftStop", "Draft", "DraftPath", "accept", "draft", "draft_path"]


@dataclass
class AdaptiveDraftStop:
    """The draft threshold of Zhang et al., which follows the acceptance rate."""

    threshold: float
    acceptance: float = 0.9

    def update(self, drafted: int, accepted: int, num_drafts: int) -> None:
        """After a verification: one step towards more or fewer drafts."""
        if drafted == 0:
            return
        self.acceptance = 0.5 * self.acceptance + 0.5 * accepted / drafted
        easy = 0.0 if drafted == num_drafts else -0.01
        step = 0.01 if self.acceptance < 0.9 else easy
        self.threshold = 0.9 * self.threshold + 0.1 * (self.threshold + step)


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
        return DraftPath(policy.exit_layer, policy.exit_layer)
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


def generator_of(sequence: Sequence) -> torch.Generator:
    """The request's own random numbers, made at first use and kept across preemptions."""
    if sequence.generator is None:
        assert sequence.sampling.seed is not None
        sequence.generator = make_generator(sequence.sampling.seed)
    generator: torch.Generator = sequence.generator
    return generator


def _draft_confidence(heads: Heads, row: int, sequence: Sequence, draft: Draft) -> float:
    """What the draft's stop rule looks at: the gap, or (Zhang et al.) the token's probability."""
    if isinstance(sequence.exit, SelfSpeculative):
        return heads.confidence[row]
    if draft.probs:
        return float(draft.probs[-1][draft.tokens[-1]])
    return float(torch.tensor(heads.top_logprob[row]).exp())


def _goes_on(work: Work, draft: Draft) -> bool:
    """Whether another token is drafted in this round."""
    sequence = work.sequence
    if len(draft.tokens) >= work.max_drafts or sequence.stops_at(draft.tokens[-1]):
        return False
    policy = sequence.exit
    if isinstance(policy, SelfSpeculative):
        return policy.draft_threshold is None or draft.confidences[-1] >= policy.draft_threshold
    assert isinstance(policy, DraftAndVerify)
    return not policy.adaptive or draft.confidences[-1] >= _stop_rule(sequence).threshold


def _stop_rule(sequence: Sequence) -> AdaptiveDraftStop:
    policy = sequence.exit
    assert isinstance(policy, DraftAndVerify)
    if sequence.draft_stop is None:
        start = policy.initial_threshold
        if start is None:
            start = 0.8 if sequence.sampling.temperature == 0.0 else 0.5
        sequence.draft_stop = AdaptiveDraftStop(start)
    rule: AdaptiveDraftStop = sequence.draft_stop
    return rule


def accept(heads: Heads, rounds: list[tuple[Sequence, Draft, slice]]) -> list[tuple[int, int]]:
    """(number of accepted drafts, next token) of each verified sequence.

    Args:
        heads: of the verified rows.
        rounds: sequence, its drafts, and where its rows are: one per draft and one more.
    """
    results: list[tuple[int, int]] = [(0, 0)] * len(rounds)
    for greedy in (True, False):
        chosen = [
            i for i, (s, _, _) in enumerate(rounds) if (s.sampling.temperature == 0.0) == greedy
        ]
        if not chosen:
            continue
        group = [rounds[i] for i in chosen]
        tokens = torch.tensor([t for _, d, _ in group for t in d.tokens], dtype=torch.int64)
        lengths = torch.tensor([0] + [len(d.tokens) for _, d, _ in group])
        starts = lengths.cumsum(0).to(torch.int32)
        if greedy:
            target = [t for s, d, at in group for t in _target_tokens(heads, s, d, at)]
            got = ops.speculative_accept(
                tokens, starts, target_tokens=torch.tensor(target, dtype=torch.int64)
            )
        else:
            target_probs = torch.stack(
                [p for s, d, at in group for p in _target_probs(heads, s, d, at)]
            ).cpu()
            drafted = [p for _, d, _ in group for p in d.probs]
            got = ops.speculative_accept(
                tokens,
                starts,
                draft_probs=torch.stack(drafted).cpu() if drafted else target_probs[:0],
                target_probs=target_probs,
                uniform=torch.cat(
                    [torch.rand(len(d.tokens) + 1, generator=generator_of(s)) for s, d, _ in group]
                ),
            )
        if bool((got.next_token < 0).any()):
            raise RuntimeError(NO_TOKEN)
        outcomes = zip(got.num_accepted.tolist(), got.next_token.tolist(), strict=True)
        for i, outcome in zip(chosen, outcomes, strict=True):
            results[i] = outcome
    for (sequence, draft, _), (accepted, _) in zip(rounds, results, strict=True):
        if isinstance(sequence.exit, DraftAndVerify) and sequence.exit.adaptive:
            _stop_rule(sequence).update(len(draft.tokens), accepted, sequence.exit.num_drafts)
    return results


def _context(sequence: Sequence, draft: Draft, count: int) -> list[int]:
    return sequence.prompt_ids + sequence.output_ids + draft.tokens[:count]


def _target_tokens(heads: Heads, sequence: Sequence, draft: Draft, at: slice) -> list[int]:
    """The full model's greedy token at each verified position."""
    tokens = []
    for i, row in enumerate(range(at.start, at.stop)):
        if row in heads.logits:
            context = _context(sequence, draft, i)
            tokens.append(int(heads.adjusted(row, sequence, context).argmax()))
        else:
            tokens.append(heads.token[row])
    return tokens


def _target_probs(heads: Heads, sequence: Sequence, draft: Draft, at: slice) -> list[Tensor]:
    """The full model's filtered distribution at each verified position."""
    return [
        filtered_probs(
            heads.adjusted(row, sequence, _context(sequence, draft, i)), sequence.sampling
        )
        for i, row in enumerate(range(at.start, at.stop))
    ]
