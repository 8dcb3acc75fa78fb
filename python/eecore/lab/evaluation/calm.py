"""The early-exit framework's evaluation for any model and data: quality, throughput, latency.

Full depth, half of the layers, and confident exit by each measure, each row by itself and the batch
together: score and exit rate (Table 1 of the paper), token generation throughput (Figure 1) and
inner-token latency (Figure 2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from eecore.calibration.examples import Example
from eecore.errors import RequestError
from eecore.exits import BatchMode, ConfidentExit, Exit, FixedExit, Full, Measure
from eecore.generation import Model
from eecore.lab.evaluation.tables import number, table_of
from eecore.lab.evaluation.timed import TimedRun, checked_tokenizer, time_policies
from eecore.output import Output

PAPER_THRESHOLDS: dict[Measure, float] = {"softmax": 0.85, "classifier": 0.9, "state": 0.95}
"""The thresholds of the early-exit framework's Table 1, for a T5 v1.1."""


@dataclass(frozen=True)
class CalmRow:
    """One technique, in one batch mode and size, on all examples."""

    technique: str
    """``full``, ``static-half``, or the measure of a confident exit."""
    batch: BatchMode | None
    """None where the mode makes no difference."""
    batch_size: int
    contract: str
    settings: dict[str, Any] | None
    """Thresholds, decay and exit points of a confident exit."""
    score_to_full: float
    exact_to_full: float
    score_to_label: float | None
    """None without targets."""
    exact_to_label: float | None
    exit_rate: float | None
    """Layers skipped / all layers, over the tokens after the first, which comes from the prompt's
    pass; None where there are none.
    """
    mean_exit_layer: float
    """Mean over all tokens."""
    tokens: int
    tokens_per_s: float
    """Token generation throughput of the best round: generated tokens / total time (§5.1)."""
    speedup: float
    """Tokens/s over full depth's in the same rounds."""
    latency_ms: float | None
    """Inner-token latency of the best round (§5.2); None where no token is after the first."""
    latency_speedup: float | None
    """Full depth's latency over this one in the same rounds."""

    @property
    def exiting(self) -> str:
        """Which rows of a batch exit early, in words."""
        return {None: "", "each": "each", "all": f"all {self.batch_size}"}[self.batch]

    @property
    def threshold(self) -> str:
        """The threshold, followed by those of single layers."""
        if self.settings is None:
            return ""
        single = (f"{layer}: {value:g}" for layer, value in self.settings["thresholds"].items())
        return ", ".join([f"{self.settings['threshold']:g}", *single])


@dataclass(frozen=True)
class CalmReport:
    """All techniques of one model on one set of examples."""

    num_layers: int
    num_examples: int
    metric: str
    max_tokens: int
    rounds: int
    batch_sizes: tuple[int, ...]
    rows: tuple[CalmRow, ...]

    def markdown(self) -> str:
        """Table 1, and the numbers of Figures 1 and 2."""
        quality: dict[str, Callable[[CalmRow], str]] = {
            "technique": lambda row: row.technique,
            "rows exit": lambda row: row.exiting,
            "threshold": lambda row: row.threshold,
            f"{self.metric} to full": lambda row: number(row.score_to_full, ".4f"),
            "exact to full": lambda row: number(row.exact_to_full, ".4f"),
            f"{self.metric} to label": lambda row: number(row.score_to_label, ".4f"),
            "exact to label": lambda row: number(row.exact_to_label, ".4f"),
            "exit rate": lambda row: number(row.exit_rate, ".1%"),
            "exit layer": lambda row: number(row.mean_exit_layer),
        }
        # Where the batch exits together, the text depends on the other rows.
        first = self.batch_sizes[0]
        rows = [row for row in self.rows if row.batch_size == first or row.batch == "all"]
        contracts = dict.fromkeys(row.contract for row in self.rows if row.settings is not None)
        return "\n\n".join(
            [
                f"{self.num_examples} examples, {self.max_tokens} new tokens at most, greedy; "
                f"{self.num_layers} layers; {self.rounds} round(s).",
                "Quality and exit rate (Table 1); a row exits where it is confident itself (each), "
                "or the batch exits together (all):",
                table_of(quality, rows, text_columns=2),
                "Token generation throughput and inner-token latency (Figures 1 and 2), and how "
                "many times as fast as full depth each is:",
                table_of(SPEEDS, self.rows, text_columns=2),
                "\n".join(f"- {contract}" for contract in contracts),
            ]
        )


SPEEDS: dict[str, Callable[[CalmRow], str]] = {
    "technique": lambda row: row.technique,
    "rows exit": lambda row: row.exiting,
    "batch": lambda row: str(row.batch_size),
    "tokens/s": lambda row: number(row.tokens_per_s),
    "to full": lambda row: number(row.speedup),
    "ms/token": lambda row: number(row.latency_ms),
    "latency to full": lambda row: number(row.latency_speedup),
}


def evaluate_calm(
    model: Model,
    examples: Sequence[Example],
    policies: Sequence[ConfidentExit],
    *,
    batch_modes: Sequence[BatchMode] = ("each", "all"),
    batch_sizes: Sequence[int] = (8, 32),
    metric: str = "rougeL",
    max_tokens: int = 64,
    rounds: int = 3,
    progress: Callable[[int, int, TimedRun], None] | None = None,
) -> CalmReport:
    """Measure full depth, half of the layers, and confident exits.

    At each batch size, all of them take turns in the same rounds.

    Args:
        model: from :func:`eecore.load`, with a tokenizer.
        examples: prompts, with targets where texts are to be compared with labels.
        policies: at most one of each measure, in any batch mode: each is run in all of
            ``batch_modes``. A calibrated policy keeps its promise in its own mode, ``each``.
        batch_modes: ``each`` and ``all`` of :class:`eecore.ConfidentExit`.
        batch_sizes: how many prompts run together.
        metric: ``rougeL``, ``rouge2`` or ``exact``.
        max_tokens: new tokens a prompt.
        rounds: the number of times that each takes its turn.
        progress: called with the batch size, the round and the run after each turn.

    Raises:
        RequestError: for settings or examples that cannot be used; nothing has run then.
    """
    checked_tokenizer(model, metric)
    measures = [policy.measure for policy in policies]
    if len(set(measures)) < len(measures):
        raise RequestError(f"policies: expected one of each measure, got {', '.join(measures)}")
    most = model.engine_config.max_num_seqs
    if not batch_sizes or not all(1 <= size <= most for size in batch_sizes):
        raise RequestError(
            f"batch_sizes: expected some of 1..{most}, the engine's max_num_seqs, got "
            f"{list(batch_sizes)}"
        )
    for policy in policies:
        if policy.calibration is not None:
            policy.calibration.check_model(model.network.source)
    exits = model.config.exit_layers
    techniques: list[Exit] = [FixedExit(exits[max(1, len(exits) // 2) - 1])]
    techniques += [_in_mode(policy, mode) for policy in policies for mode in batch_modes]
    targets = [example.target for example in examples]
    rows: list[CalmRow] = []
    for size in batch_sizes:
        runs = time_policies(
            model,
            [example.prompt for example in examples],
            techniques,
            max_tokens=max_tokens,
            batch_size=size,
            rounds=rounds,
            progress=None if progress is None else partial(progress, size),
        )
        rows += [_row(run, runs[0], size, targets, metric) for run in runs]
    return CalmReport(
        num_layers=model.config.num_layers,
        num_examples=len(examples),
        metric=metric,
        max_tokens=max_tokens,
        rounds=rounds,
        batch_sizes=tuple(batch_sizes),
        rows=tuple(rows),
    )


def _in_mode(policy: ConfidentExit, mode: BatchMode) -> ConfidentExit:
    """The policy in a batch mode; outside the mode of its calibration it has no guarantee."""
    if policy.batch == mode:
        return policy
    return dataclasses.replace(policy, batch=mode, calibration=None)


def _row(
    run: TimedRun, full: TimedRun, size: int, targets: Sequence[str | None], metric: str
) -> CalmRow:
    policy, settings, batch = run.policy, None, None
    technique = "full" if isinstance(policy, Full) else "static-half"
    if isinstance(policy, ConfidentExit):
        technique, batch = policy.measure, policy.batch
        names = ("threshold", "thresholds", "decay_tau", "exit_points", "min_exit_layer")
        settings = {name: getattr(policy, name) for name in names}
        settings["thresholds"] = dict(policy.thresholds)
    full_texts = [output.text or "" for output in full.outputs]
    rate = exit_rate(run.outputs)
    return CalmRow(
        technique=technique,
        batch=batch,
        batch_size=size,
        contract=policy.contract,
        settings=settings,
        score_to_full=run.mean_similarity(metric, full_texts) or 0.0,
        exact_to_full=run.mean_similarity("exact", full_texts) or 0.0,
        score_to_label=run.mean_similarity(metric, targets),
        exact_to_label=run.mean_similarity("exact", targets),
        exit_rate=rate,
        mean_exit_layer=run.mean_exit_layer,
        tokens=run.tokens,
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
