"""LayerSkip's evaluation for any model and data: exits one by one, and the modes side by side.

Perplexity and task score after each layer (Tables 1 and 2, Figure 6 of the paper); full depth,
early exit, self-speculation and Draft & Verify with score, token acceptance and speed (Tables 3 to
6 and 11); what the reuse of the draft's keys, values and exit states saves (Table 7).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eecore.calibration.examples import Example
from eecore.calibration.exit_scores import ExitScore, Scored, score_exits
from eecore.calibration.similarity import SIMILARITIES
from eecore.errors import RequestError
from eecore.exits import DraftAndVerify, Exit, FixedExit, SelfSpeculative
from eecore.generation import Model
from eecore.lab.evaluation.tables import markdown_table
from eecore.lab.evaluation.timed import TimedRun, time_policies

__all__ = ["LayerSkipReport", "ModeRow", "evaluate_layerskip"]


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
    """Over full depth in the same rounds."""


@dataclass(frozen=True)
class LayerSkipReport:
    """All tables of one model on one set of examples."""

    num_layers: int
    num_examples: int
    metric: str
    max_tokens: int
    exits: tuple[ExitScore, ...]
    modes: tuple[ModeRow, ...]
    ablation: tuple[ModeRow, ...]
    """Self-speculation without and with reuse, where one was asked for."""

    def to_dict(self) -> dict[str, Any]:
        """What goes into JSON."""
        return asdict(self)

    def markdown(self) -> str:
        """The tables."""
        parts = [
            f"{self.num_examples} examples, {self.max_tokens} new tokens at most, greedy; score: "
            f"{self.metric} against the targets."
        ]
        if self.exits:
            parts.append("Exits, on the given targets:")
            head = ("exit layer", "perplexity", "accuracy", "agrees with the last layer")
            rows = [
                (
                    str(exit.exit_layer),
                    f"{exit.perplexity:.3f}",
                    f"{exit.accuracy:.3f}",
                    f"{exit.agreement:.3f}",
                )
                for exit in self.exits
            ]
            parts.append(markdown_table(head, rows))
        parts += ["Modes:", markdown_table(MODE_HEAD, [_mode_cells(row) for row in self.modes])]
        if self.ablation:
            without, reusing = self.ablation
            saved = 1 - without.tokens_per_s / reusing.tokens_per_s
            parts += [
                "What reusing the draft's keys, values and exit states saves "
                f"({saved:.1%} of the time of a token):",
                markdown_table(MODE_HEAD, [_mode_cells(row) for row in self.ablation]),
            ]
        return "\n\n".join(parts)


MODE_HEAD = ("mode", "score", "text of full", "acceptance", "exit layer", "tokens/s", "speed-up")


def _mode_cells(row: ModeRow) -> tuple[str, ...]:
    return (
        row.mode,
        "" if row.score is None else f"{row.score:.3f}",
        "yes" if row.same_as_full else "no",
        "" if row.acceptance is None else f"{row.acceptance:.1%}",
        f"{row.mean_exit_layer:.2f}",
        f"{row.tokens_per_s:.1f}",
        f"{row.speedup:.2f}",
    )


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
    ablation: bool = True,
    progress: Callable[[int, TimedRun], None] | None = None,
) -> LayerSkipReport:
    """Measure the exits and the modes of a model.

    Args:
        model: from :func:`eecore.load`, with a tokenizer.
        examples: prompts, with targets where exits are to be scored.
        modes: beside full depth; of the self-speculative ones the first is taken for the ablation.
        layers: exits to score on the targets; all when None, none when empty.
        metric: ``rouge2``, ``rougeL`` or ``exact``.
        max_tokens: new tokens a prompt.
        batch_size: prompts that run together.
        rounds: how often all modes take their turn.
        ablation: whether to measure self-speculation without reuse as well.
        progress: called with the round and a run when it has had its turn.

    Raises:
        RequestError: for settings or examples that cannot be used.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise RequestError("evaluate: expected a model with a tokenizer, got one without")
    if metric not in SIMILARITIES:
        raise RequestError(f"metric: expected {' or '.join(SIMILARITIES)}, got {metric!r}")
    num_layers = model.config.num_layers
    chosen = range(1, num_layers + 1) if layers is None else layers
    pairs = [(e.prompt, e.target) for e in examples if e.target is not None]
    exits: list[ExitScore] = []
    if chosen and pairs:
        exits = score_exits(model.network, [_scored(model, *pair) for pair in pairs], chosen)

    speculative = next((mode for mode in modes if isinstance(mode, SelfSpeculative)), None)
    policies: list[Exit] = list(modes)
    if ablation and speculative is not None:
        policies.append(dataclasses.replace(speculative, reuse=False))
    prompts = [example.prompt for example in examples]
    runs = time_policies(
        model,
        prompts,
        policies,
        max_tokens=max_tokens,
        batch_size=batch_size,
        rounds=rounds,
        progress=progress,
    )
    rows = [_row(run, runs[0], examples, metric) for run in runs]
    shown, without = rows[: len(modes) + 1], rows[len(modes) + 1 :]
    reusing = [row for row, run in zip(rows, runs, strict=True) if run.policy is speculative]
    return LayerSkipReport(
        num_layers=num_layers,
        num_examples=len(examples),
        metric=metric,
        max_tokens=max_tokens,
        exits=tuple(exits),
        modes=tuple(shown),
        ablation=(*without, *reusing) if without else (),
    )


def _scored(model: Model, prompt: str, target: str) -> Scored:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    learnt = tokenizer.encode(target, add_special_tokens=False)
    return Scored.of(model.config, tokenizer.encode(prompt), learnt)


def _row(run: TimedRun, full: TimedRun, examples: Sequence[Example], metric: str) -> ModeRow:
    alike = SIMILARITIES[metric]
    scores = [
        alike(output.text or "", example.target)
        for output, example in zip(run.outputs, examples, strict=True)
        if example.target is not None
    ]
    return ModeRow(
        mode=run.name,
        score=statistics.fmean(scores) if scores else None,
        same_as_full=run.same_tokens(full),
        acceptance=run.acceptance,
        mean_exit_layer=run.mean_exit_layer,
        tokens_per_s=run.tokens_per_s,
        speedup=run.speedup_over(full),
    )
