"""The papers' tables for any model and data: every exit, and exit modes side by side.

Perplexity and accuracy after each layer (LayerSkip: Tables 1 and 2, Figure 6). Then full depth and
other modes with score, acceptance rate and speed (LayerSkip: Tables 3 to 6 and 11), exit rate,
throughput and inner-token latency (early-exit framework: Table 1, Figures 1 and 2);
self-speculation also without reusing the draft's keys, values and exit states (LayerSkip: Table 7).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from eecore.calibration.examples import Example
from eecore.calibration.exit_scores import ExitScore, Scored, score_exits
from eecore.errors import RequestError
from eecore.exits import ConfidentExit, Exit, SelfSpeculative
from eecore.generation import Model
from eecore.lab.evaluation.tables import number, table_of
from eecore.lab.evaluation.timed import TimedRun, checked_tokenizer, time_policies
from eecore.output import Output


@dataclass(frozen=True)
class ModeRow:
    """One mode on all prompts, at one batch size."""

    mode: str
    batch_size: int
    contract: str
    score: float | None
    """Mean similarity to the targets; None without targets."""
    score_to_full: float
    """Mean similarity to the texts of full depth."""
    same_as_full: float
    """Share of the texts that are those of full depth."""
    acceptance: float | None
    exit_rate: float | None
    """Layers skipped / all layers, over the tokens after the first, which comes from the prompt's
    pass; None where there are none, or where all layers verified drafts.
    """
    mean_exit_layer: float
    """Mean over all tokens."""
    tokens_per_s: float
    """Generated tokens / total time, of the best round."""
    speedup: float
    """Tokens/s over full depth's in the same rounds."""
    latency_ms: float | None
    """Inner-token latency of the best round (early-exit framework §5.2); None where no token is
    after the first.
    """
    latency_speedup: float | None
    """Full depth's latency over this one in the same rounds."""


@dataclass(frozen=True)
class ModesReport:
    """All tables of one model on one set of examples."""

    num_layers: int
    num_examples: int
    metric: str
    max_tokens: int
    rounds: int
    exits: tuple[ExitScore, ...]
    modes: tuple[ModeRow, ...]

    def markdown(self) -> str:
        """All tables in Markdown."""
        parts = [
            f"{self.num_examples} examples, {self.max_tokens} new tokens at most, greedy; "
            f"{self.num_layers} layers; {self.rounds} round(s); score: {self.metric} against the "
            "targets, and against the texts of full depth."
        ]
        if self.exits:
            parts += ["Exits, on the given targets:", table_of(EXITS, self.exits)]
        parts += ["Modes:", table_of(MODES, self.modes)]
        contracts = dict.fromkeys(row.contract for row in self.modes)
        return "\n\n".join([*parts, "\n".join(f"- {contract}" for contract in contracts)])


EXITS: dict[str, Callable[[ExitScore], str]] = {
    "exit layer": lambda exit: str(exit.exit_layer),
    "perplexity": lambda exit: number(exit.perplexity, ".3f"),
    "accuracy": lambda exit: number(exit.accuracy, ".3f"),
    "agrees with the last layer": lambda exit: number(exit.agreement, ".3f"),
}
MODES: dict[str, Callable[[ModeRow], str]] = {
    "mode": lambda row: row.mode,
    "batch": lambda row: str(row.batch_size),
    "score": lambda row: number(row.score, ".3f"),
    "score to full": lambda row: number(row.score_to_full, ".3f"),
    "texts of full": lambda row: number(row.same_as_full, ".1%"),
    "acceptance": lambda row: number(row.acceptance, ".1%"),
    "exit rate": lambda row: number(row.exit_rate, ".1%"),
    "exit layer": lambda row: number(row.mean_exit_layer),
    "tokens/s": lambda row: number(row.tokens_per_s, ".1f"),
    "speed-up": lambda row: number(row.speedup),
    "ms/token": lambda row: number(row.latency_ms),
    "latency to full": lambda row: number(row.latency_speedup),
}


def evaluate_modes(
    model: Model,
    examples: Sequence[Example],
    modes: Sequence[Exit],
    *,
    layers: Sequence[int] | None = None,
    metric: str = "rouge2",
    max_tokens: int = 64,
    batch_sizes: Sequence[int] = (1,),
    rounds: int = 3,
    progress: Callable[[int, int, TimedRun], None] | None = None,
) -> ModesReport:
    """Measure the exits and the modes of a model. At each batch size all modes take turns.

    Args:
        model: from :func:`eecore.load`, with a tokenizer.
        examples: prompts, with targets where exits and texts are to be scored.
        modes: compared with full depth; the first self-speculative one also without reuse.
        layers: exits to score on the targets; all when None, none when empty.
        metric: ``rouge2``, ``rougeL`` or ``exact``.
        max_tokens: new tokens a prompt.
        batch_sizes: how many prompts run together.
        rounds: the number of times that each mode takes its turn.
        progress: called with the batch size, the round and the run after each turn.

    Raises:
        RequestError: the settings or examples cannot be used; nothing has run then.
    """
    tokenizer = checked_tokenizer(model, metric)
    most = model.engine_config.max_num_seqs
    if not batch_sizes or not all(1 <= size <= most for size in batch_sizes):
        raise RequestError(
            f"batch_sizes: expected some of 1..{most}, the engine's max_num_seqs, got "
            f"{list(batch_sizes)}"
        )
    policies: list[Exit] = list(modes)
    for policy in policies:
        policy.check(model.config)
        if isinstance(policy, ConfidentExit) and policy.calibration is not None:
            policy.calibration.check_model(model.network.source)
    speculative = next((mode for mode in modes if isinstance(mode, SelfSpeculative)), None)
    if speculative is not None:
        policies.append(dataclasses.replace(speculative, reuse=False))
    chosen = model.config.exit_layers if layers is None else layers
    pairs = [(e.prompt, e.target) for e in examples if e.target is not None]
    exits: list[ExitScore] = []
    if chosen and pairs:
        scored = [
            Scored.of(
                model.config,
                tokenizer.encode(prompt),
                tokenizer.encode(target, add_special_tokens=False),
            )
            for prompt, target in pairs
        ]
        exits = score_exits(model.network, scored, chosen)
    targets = [example.target for example in examples]
    rows: list[ModeRow] = []
    for size in batch_sizes:
        runs = time_policies(
            model,
            [example.prompt for example in examples],
            policies,
            max_tokens=max_tokens,
            batch_size=size,
            rounds=rounds,
            progress=None if progress is None else partial(progress, size),
        )
        rows += [_row(run, runs[0], size, targets, metric) for run in runs]
    return ModesReport(
        num_layers=model.config.num_layers,
        num_examples=len(examples),
        metric=metric,
        max_tokens=max_tokens,
        rounds=rounds,
        exits=tuple(exits),
        modes=tuple(rows),
    )


def _row(
    run: TimedRun, full: TimedRun, size: int, targets: Sequence[str | None], metric: str
) -> ModeRow:
    full_texts = [output.text or "" for output in full.outputs]
    rate = exit_rate(run.outputs)
    return ModeRow(
        mode=run.name,
        batch_size=size,
        contract=run.policy.contract,
        score=run.mean_similarity(metric, targets),
        score_to_full=run.mean_similarity(metric, full_texts) or 0.0,
        same_as_full=run.mean_similarity("exact", full_texts) or 0.0,
        acceptance=run.acceptance,
        exit_rate=None if run.acceptance is not None else rate,
        mean_exit_layer=run.mean_exit_layer,
        tokens_per_s=run.tokens_per_s,
        speedup=run.speedup_over(full),
        latency_ms=None if rate is None else 1e3 * min(run.latencies),
        latency_speedup=None if rate is None else run.latency_speedup_over(full),
    )


def exit_rate(outputs: Sequence[Output]) -> float | None:
    """Skipped layer executions / all, over the tokens after the first of each output.

    The first token comes from the prompt's pass, which confident exits run in full. None where
    there are no other tokens.
    """
    layers = sum(output.stats.num_layers * len(output.exit_layers[1:]) for output in outputs)
    run = sum(sum(output.exit_layers[1:]) for output in outputs)
    return 1.0 - run / layers if layers else None
