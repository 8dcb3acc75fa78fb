"""The early-exit framework's evaluation for any model and data: quality, throughput, latency.

Full depth, half of the layers, and confident exit by each measure, each row by itself and the batch
together: score and exit rate (Table 1 of the paper), token generation throughput (Figure 1) and
inner-token latency (Figure 2), each beside the value for time proportional to the layers that ran.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from eecore.calibration.examples import Example
from eecore.errors import RequestError
from eecore.exits import BatchMode, ConfidentExit, Exit, FixedExit, Full, Measure
from eecore.generation import Model
from eecore.lab.evaluation.calm_report import CalmReport, CalmRow, Speed
from eecore.lab.evaluation.timed import TimedRun, checked_tokenizer, median_ratio, time_policies
from eecore.output import Output

PAPER_THRESHOLDS: dict[Measure, float] = {"softmax": 0.85, "classifier": 0.9, "state": 0.95}
"""The thresholds of the early-exit framework's Table 1, for a T5 v1.1."""


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
    if not batch_modes or not set(batch_modes) <= {"each", "all"}:
        raise RequestError(f"batch_modes: expected some of each and all, got {list(batch_modes)}")
    most = model.engine_config.max_num_seqs
    if not batch_sizes or not all(1 <= size <= most for size in batch_sizes):
        raise RequestError(
            f"batch_sizes: expected some of 1..{most}, the engine's max_num_seqs, got "
            f"{list(batch_sizes)}"
        )
    for policy in policies:
        if policy.calibration is not None:
            policy.calibration.check_model(model.network.source)
    num_layers = model.config.num_layers
    exits = model.config.exit_layers
    techniques: list[Exit] = [FixedExit(exits[max(1, len(exits) // 2) - 1])]
    techniques += [_in_mode(policy, mode) for policy in policies for mode in batch_modes]
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
        targets = [example.target for example in examples]
        rows += [_row(run, runs[0], runs[1], size, targets, metric) for run in runs]
    return CalmReport(
        num_layers=num_layers,
        num_examples=len(examples),
        num_targets=sum(example.target is not None for example in examples),
        metric=metric,
        max_tokens=max_tokens,
        rounds=rounds,
        batch_modes=tuple(batch_modes),
        batch_sizes=tuple(batch_sizes),
        rows=tuple(rows),
    )


def _in_mode(policy: ConfidentExit, mode: BatchMode) -> ConfidentExit:
    """The policy in a batch mode; outside the mode of its calibration it has no guarantee."""
    if policy.batch == mode:
        return policy
    return dataclasses.replace(policy, batch=mode, calibration=None)


# Rows


def _row(
    run: TimedRun,
    full: TimedRun,
    half: TimedRun,
    size: int,
    targets: Sequence[str | None],
    metric: str,
) -> CalmRow:
    policy, settings, batch = run.policy, None, None
    technique = "full" if isinstance(policy, Full) else "static-half"
    if isinstance(policy, ConfidentExit):
        technique, batch = policy.measure, policy.batch
        names = ("threshold", "thresholds", "decay_tau", "exit_points", "min_exit_layer")
        settings = {name: getattr(policy, name) for name in names}
        settings["thresholds"] = dict(policy.thresholds)
    full_texts = [output.text or "" for output in full.outputs]
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
        exit_rate=exit_rate(run.outputs),
        mean_exit_layer=run.mean_exit_layer,
        tokens=run.tokens,
        throughput=throughput(run, full, half),
        latency=inner_token_latency(run, full, half),
    )


# The work of a run, in layers


def exit_rate(outputs: Sequence[Output]) -> float | None:
    """Skipped layer executions / all, over the tokens after the first of each output.

    The first token comes from the prompt's pass, which confident exits run in full. None where
    there are no other tokens.
    """
    layers = sum(output.stats.num_layers * len(output.exit_layers[1:]) for output in outputs)
    return 1.0 - _decode_layers(outputs) / layers if layers else None


def _decode_layers(outputs: Sequence[Output]) -> int:
    """Layers run for the tokens after the first."""
    return sum(sum(output.exit_layers[1:]) for output in outputs)


def _prompt_share(outputs: Sequence[Output], full: Sequence[Output]) -> float:
    """Layers run for prompts over the same at full depth; 1 where prompts go through an encoder."""
    layers, all_layers = (
        sum(output.stats.prompt_layers_run for output in of) for of in (outputs, full)
    )
    decoded = sum(output.stats.num_layers * output.stats.prompt_tokens for output in full)
    return layers / all_layers if all_layers >= decoded else 1.0


# Speeds, and their ideals


def throughput(run: TimedRun, full: TimedRun, half: TimedRun) -> Speed:
    """Token generation throughput: generated tokens / total time (early-exit framework §5.1).

    In a round in which full depth takes ``F`` seconds until its batches have their first tokens and
    ``D`` seconds after that, two bounds:

    Ideal: the run's tokens in ``F * p / p_full + D * d / d_full`` seconds, where ``p`` are the
    layer executions for prompts and ``d`` those for tokens after the first. A confident exit runs
    prompts in full, p = p_full; with as many tokens as full depth, its d / d_full is 1 -
    :func:`exit_rate`. Prompts of an encoder, which has no exits, have p / p_full = 1. Work of full
    depth outside the layers, above all the head of each token, is scaled in the same way.

    Cut model: the seconds for each token are on the line, over the layers run for it, through full
    depth and half of the layers (a model without checks and without keys and values to fill). The
    cost of a token outside the layers, above all its head, is not scaled here.
    """
    layers, all_layers = _decode_layers(run.outputs), _decode_layers(full.outputs)
    to_full = run.speedup_over(full)
    if not all_layers:
        return Speed(run.tokens_per_s, to_full, None, None, None, None)
    decoding = [np.subtract(of.seconds, of.first_seconds) for of in (full, half)]
    firsts = _prompt_share(run.outputs, full.outputs) * np.array(full.first_seconds)
    ideal = firsts + decoding[0] * layers / all_layers
    cut = _on_line(run, full, half, decoding[0] / full.tokens, decoding[1] / half.tokens)
    return Speed(
        value=run.tokens_per_s,
        to_full=to_full,
        ideal=run.tokens / float(ideal.min()),
        ideal_to_full=run.tokens / full.tokens * median_ratio(full.seconds, ideal),
        share_of_ideal=median_ratio(ideal, run.seconds),
        share_of_cut=None if cut is None else median_ratio(firsts + run.tokens * cut, run.seconds),
    )


def inner_token_latency(run: TimedRun, full: TimedRun, half: TimedRun) -> Speed | None:
    """Sum over sequences of (finish - first token) / generated tokens (early-exit framework §5.2).

    Ideal: full depth's latency of the same round, times the layers run after the first tokens for
    each generated token over the same of full depth. Cut model: as for :func:`throughput`. None
    where full depth or the run has no token after the first.
    """
    layers = _decode_layers(run.outputs) / run.tokens
    all_layers = _decode_layers(full.outputs) / full.tokens
    if not layers or not all_layers:
        return None
    to_full = median_ratio(full.latencies, run.latencies)
    latencies = np.array(full.latencies), np.array(half.latencies)
    cut = _on_line(run, full, half, *latencies)
    return Speed(
        value=min(run.latencies),
        to_full=to_full,
        ideal=min(full.latencies) * layers / all_layers,
        ideal_to_full=all_layers / layers,
        share_of_ideal=to_full * layers / all_layers,
        share_of_cut=None if cut is None else median_ratio(cut, run.latencies),
    )


def _on_line(
    run: TimedRun, full: TimedRun, half: TimedRun, at_full: np.ndarray, at_half: np.ndarray
) -> np.ndarray | None:
    """Seconds a token by round, on the line at the run's layers a token; None where there is no
    line.
    """
    x, high, low = (_decode_layers(of.outputs) / of.tokens for of in (run, full, half))
    return None if high <= low else at_half + (at_full - at_half) * (x - low) / (high - low)
