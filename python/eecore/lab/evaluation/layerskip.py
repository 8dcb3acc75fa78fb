"""LayerSkip's evaluation for any model and data: every exit, and the modes side by side.

Perplexity and task score after each layer (Tables 1 and 2, Figure 6 of the paper); full depth,
early exit, self-speculation and Draft & Verify with score, acceptance rate and speed (Tables 3 to 6
and 11); self-speculation also without reusing the draft's keys, values and exit states (Table 7).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eecore.calibration.examples import Example
from eecore.calibration.exit_scores import ExitScore, Scored, score_exits
from eecore.exits import DraftAndVerify, Exit, FixedExit, SelfSpeculative
from eecore.generation import Model
from eecore.lab.evaluation.tables import number, table_of
from eecore.lab.evaluation.timed import TimedRun, checked_tokenizer, time_policies


@dataclass(frozen=True)
class ModeRow:
    """One mode on all prompts."""

    mode: str
    score: float | None
    """Mean similarity to the targets; None without targets."""
    same_as_full: bool
    acceptance: float | None
    mean_exit_layer: float
    tokens_per_s: float
    speedup: float
    """Speed over full depth's in the same rounds."""


@dataclass(frozen=True)
class LayerSkipReport:
    """All tables of one model on one set of examples."""

    num_layers: int
    num_examples: int
    metric: str
    max_tokens: int
    exits: tuple[ExitScore, ...]
    modes: tuple[ModeRow, ...]

    def markdown(self) -> str:
        """All tables in Markdown."""
        parts = [
            f"{self.num_examples} examples, {self.max_tokens} new tokens at most, greedy; score: "
            f"{self.metric} against the targets."
        ]
        if self.exits:
            parts += ["Exits, on the given targets:", table_of(EXITS, self.exits)]
        parts += ["Modes:", table_of(MODES, self.modes)]
        return "\n\n".join(parts)


EXITS: dict[str, Callable[[ExitScore], str]] = {
    "exit layer": lambda exit: str(exit.exit_layer),
    "perplexity": lambda exit: number(exit.perplexity, ".3f"),
    "accuracy": lambda exit: number(exit.accuracy, ".3f"),
    "agrees with the last layer": lambda exit: number(exit.agreement, ".3f"),
}
MODES: dict[str, Callable[[ModeRow], str]] = {
    "mode": lambda row: row.mode,
    "score": lambda row: number(row.score, ".3f"),
    "text of full": lambda row: "yes" if row.same_as_full else "no",
    "acceptance": lambda row: number(row.acceptance, ".1%"),
    "exit layer": lambda row: number(row.mean_exit_layer),
    "tokens/s": lambda row: number(row.tokens_per_s, ".1f"),
    "speed-up": lambda row: number(row.speedup),
}


def evaluate_layerskip(
    model: Model,
    examples: Sequence[Example],
    modes: Sequence[FixedExit | SelfSpeculative | DraftAndVerify],
    *,
    layers: Sequence[int] | None = None,
    metric: str = "rouge2",
    max_tokens: int = 64,
    batch_size: int = 1,
    rounds: int = 3,
    progress: Callable[[int, TimedRun], None] | None = None,
) -> LayerSkipReport:
    """Measure the exits and the modes of a model.

    Args:
        model: from :func:`eecore.load`, with a tokenizer.
        examples: prompts, with targets where exits are to be scored.
        modes: compared with full depth; the first self-speculative one also without reuse.
        layers: exits to score on the targets; all when None, none when empty.
        metric: ``rouge2``, ``rougeL`` or ``exact``.
        max_tokens: new tokens a prompt.
        batch_size: prompts that run together.
        rounds: the number of times that each mode takes its turn.
        progress: called with the round and the run after each turn.

    Raises:
        RequestError: the settings or examples cannot be used.
    """
    tokenizer = checked_tokenizer(model, metric)
    num_layers = model.config.num_layers
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
    speculative = next((mode for mode in modes if isinstance(mode, SelfSpeculative)), None)
    policies: list[Exit] = list(modes)
    if speculative is not None:
        policies.append(dataclasses.replace(speculative, reuse=False))
    runs = time_policies(
        model,
        [example.prompt for example in examples],
        policies,
        max_tokens=max_tokens,
        batch_size=batch_size,
        rounds=rounds,
        progress=progress,
    )
    return LayerSkipReport(
        num_layers=num_layers,
        num_examples=len(examples),
        metric=metric,
        max_tokens=max_tokens,
        exits=tuple(exits),
        modes=tuple(_row(run, runs[0], examples, metric) for run in runs),
    )


def _row(run: TimedRun, full: TimedRun, examples: Sequence[Example], metric: str) -> ModeRow:
    return ModeRow(
        mode=run.name,
        score=run.mean_similarity(metric, [example.target for example in examples]),
        same_as_full=run.same_tokens(full),
        acceptance=run.acceptance,
        mean_exit_layer=run.mean_exit_layer,
        tokens_per_s=run.tokens_per_s,
        speedup=run.speedup_over(full),
    )
