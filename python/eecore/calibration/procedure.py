"""The search for a calibrated threshold: Learn then Test over descending thresholds (CALM §4, App.
E).

For prompts like those of the calibration set, the expected loss of the early-exiting model is at
most ``delta``, with probability at least ``1 - epsilon`` over the choice of the calibration set.
The loss of a prompt is either 1 - similarity to the full model's text (*textual consistency*), or
how much worse than the full model's the text is, compared with the label (*risk consistency*).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from eecore.calibration.examples import Example
from eecore.calibration.generated import generated
from eecore.calibration.similarity import SIMILARITIES
from eecore.calibration_file import Calibration, CalibrationStep, TextPart
from eecore.errors import RequestError
from eecore.exits import ConfidentExit, ExitClassifier, Full, Measure
from eecore.generation import Model
from eecore.models import ModelSource, Tokenizer
from eecore.values import as_real, is_whole

LossKind = Literal["textual", "risk"]
DEFAULT_GRID = tuple(round(1.0 - 0.05 * i, 2) for i in range(21))


# The statistics


def hoeffding_bentkus(mean_loss: float, num_prompts: int, delta: float) -> float:
    """The p-value of "the expected loss exceeds delta", from a mean of losses in [0, 1].

    ``min(exp(-n kl(min(E, delta) || delta)), e BinomCDF(ceil(n E); n, delta))`` with
    ``0 log 0 = 0`` (CALM App. E; Bates et al. 2021).
    """
    try:
        from scipy.stats import binom
    except ImportError:
        raise RequestError(
            "calibrate: expected the package scipy, got none (pip install '.[evaluate]' in a clone)"
        ) from None
    observed = min(mean_loss, delta)
    kl = (observed * math.log(observed / delta) if observed > 0.0 else 0.0) + (
        (1.0 - observed) * math.log((1.0 - observed) / (1.0 - delta)) if observed < 1.0 else 0.0
    )
    # A mean that is a whole number of prompts must not be rounded up past it.
    count = math.ceil(num_prompts * mean_loss - 1e-9)
    bentkus = math.e * float(binom.cdf(count, num_prompts, delta))
    return min(1.0, math.exp(-num_prompts * kl), bentkus)


def prompts_needed(delta: float, epsilon: float) -> float:
    """The fewest prompts with which a threshold can pass, if every loss is 0.

    A whole number, or infinity where a float is too coarse.
    """
    needed = math.log(epsilon) / math.log1p(-delta)
    return float(math.ceil(needed)) if math.isfinite(needed) else needed


def tried_thresholds(
    losses_at: Callable[[float], Sequence[float]],
    grid: Sequence[float],
    delta: float,
    epsilon: float,
) -> Iterator[CalibrationStep]:
    """Fixed-sequence testing: down the grid until a threshold's p-value exceeds epsilon.

    Args:
        losses_at: the losses in [0, 1] of all prompts with a threshold.
        grid: thresholds, descending.
        delta: the tolerated expected loss.
        epsilon: the tolerated probability that it is exceeded.
    """
    for threshold in grid:
        losses = losses_at(threshold)
        mean_loss = math.fsum(losses) / len(losses)
        p_value = hoeffding_bentkus(mean_loss, len(losses), delta)
        yield CalibrationStep(threshold, mean_loss, p_value, p_value <= epsilon)
        if p_value > epsilon:
            return


def lowest_passed(steps: Iterable[CalibrationStep], *, otherwise: float = 1.0) -> float:
    """The last threshold that passed; ``otherwise``, with which nothing ends early, if none did."""
    return min((step.threshold for step in steps if step.passed), default=otherwise)


# Making one


def calibrate(
    model: Model,
    examples: Sequence[Example],
    *,
    measure: Measure = "softmax",
    delta: float,
    epsilon: float = 0.05,
    loss: LossKind = "textual",
    similarity: str = "rougeL",
    grid: Sequence[float] = DEFAULT_GRID,
    max_tokens: int = 64,
    decay_tau: float = 0.0,
    exit_points: Sequence[int] | None = None,
    min_exit_layer: int = 1,
    classifier: ExitClassifier | None = None,
    part: TextPart = "all",
    progress: Callable[[CalibrationStep], None] | None = None,
) -> Calibration:
    """Find the lowest threshold that keeps the promise, by generating with one after the other.

    Args:
        model: from :func:`eecore.load`, with a tokenizer.
        examples: prompts drawn like those of the intended use; with targets for the ``risk`` loss.
        measure: as in :class:`eecore.ConfidentExit`.
        delta: the tolerated expected loss, between 0 and 1.
        epsilon: the tolerated probability that it is exceeded, between 0 and 1.
        loss: ``textual`` or ``risk``.
        similarity: ``rougeL``, ``rouge2`` or ``exact``.
        grid: descending thresholds, the first of them 1.
        max_tokens: new tokens a prompt.
        decay_tau: as in :class:`eecore.ConfidentExit`.
        exit_points: exit layers at which confidence is measured.
        min_exit_layer: the earliest exit.
        classifier: for the ``classifier`` measure.
        part: as in :class:`eecore.ConfidentExit`; the texts that are compared are answers without
            their thoughts, whatever it is.
        progress: called with the step of each threshold tried.

    Raises:
        RequestError: settings or examples cannot be used; nothing has run then.
    """
    check_settings(examples, delta, epsilon, loss, similarity, grid, max_tokens)
    _, source = parts_of(model)
    points = None if exit_points is None else tuple(exit_points)

    def policy_at(threshold: float) -> ConfidentExit:
        return ConfidentExit(
            threshold,
            measure,
            decay_tau=decay_tau,
            exit_points=points,
            min_exit_layer=min_exit_layer,
            classifier=classifier,
            part=part,
        )

    policy_at(1.0).check(model.config)
    check_number(len(examples), delta, epsilon)
    head = model.network.draft_head if measure == "cut" else None
    alike = SIMILARITIES[similarity]
    full_texts, _ = _generate(model, examples, Full(), max_tokens)
    depth: dict[float, float] = {}

    def losses_at(threshold: float) -> list[float]:
        texts, depth[threshold] = _generate(model, examples, policy_at(threshold), max_tokens)
        if loss == "textual":
            return [1.0 - alike(t, full) for t, full in zip(texts, full_texts, strict=True)]
        return [
            max(0.0, alike(full, example.target or "") - alike(text, example.target or ""))
            for text, full, example in zip(texts, full_texts, examples, strict=True)
        ]

    steps = []
    for step in tried_thresholds(losses_at, grid, delta, epsilon):
        steps.append(replace(step, mean_exit_layer=depth[step.threshold]))
        if progress is not None:
            progress(steps[-1])
    return Calibration(
        threshold=lowest_passed(steps),
        measure=measure,
        delta=delta,
        epsilon=epsilon,
        loss=loss,
        similarity=similarity,
        num_prompts=len(examples),
        max_tokens=max_tokens,
        decay_tau=decay_tau,
        exit_points=points,
        min_exit_layer=min_exit_layer,
        model_sha256=source.sha256,
        dtype=source.dtype,
        weights=source.weights,
        classifier_sha256=None if classifier is None else classifier.sha256,
        grid=tuple(grid),
        steps=tuple(steps),
        vocabulary_sha256=None if head is None else head.vocabulary_sha256,
        part=part,
    )


def parts_of(model: Model) -> tuple[Tokenizer, ModelSource]:
    """The tokenizer and the identity of a model that can be calibrated.

    Raises:
        RequestError: the model has none, or a KV cache of a dtype of its own.
    """
    if model.tokenizer is None:
        raise RequestError("calibrate: expected a model with a tokenizer, got one without")
    source = model.network.source
    if source is None:
        raise RequestError("calibrate: expected a model loaded from a directory, got another")
    kv_cache_dtype = model.engine_config.kv_cache_dtype
    if kv_cache_dtype != "auto":
        raise RequestError(
            f"kv_cache_dtype: expected 'auto' to calibrate with, got {kv_cache_dtype!r}"
        )
    return model.tokenizer, source


def check_number(num_prompts: int, delta: float, epsilon: float) -> None:
    """Refuse fewer prompts than any threshold can pass with.

    Raises:
        RequestError: there are too few; the message says how many it takes.
    """
    needed = prompts_needed(delta, epsilon)
    if num_prompts < needed:
        raise RequestError(
            f"examples: expected at least {needed:.0f} prompts, as fewer cannot show a loss below "
            f"{delta:g}, got {num_prompts}"
        )


def check_settings(
    examples: Sequence[Example],
    delta: float,
    epsilon: float,
    loss: str,
    similarity: str,
    grid: Sequence[float],
    max_tokens: int,
) -> None:
    """Refuse settings of :func:`calibrate` that are wrong for every model.

    Raises:
        RequestError: a setting is wrong, or a package is missing; the message names the first.
    """
    for name, value in (("delta", delta), ("epsilon", epsilon)):
        if as_real(value, 0.0, 1.0) in (None, 0.0, 1.0):
            raise RequestError(f"{name}: expected a number between 0 and 1, got {value!r}")
    for name, word, known in (
        ("loss", loss, ("textual", "risk")),
        ("similarity", similarity, tuple(SIMILARITIES)),
    ):
        if word not in known:
            raise RequestError(f"{name}: expected {' or '.join(known)}, got {word!r}")
    if not grid or grid[0] != 1.0 or any(a <= b for a, b in pairwise(grid)):
        raise RequestError(f"grid: expected descending thresholds from 1 on, got {list(grid)}")
    if not is_whole(max_tokens, 1):
        raise RequestError(f"max_tokens: expected 1 or more, got {max_tokens!r}")
    if not examples:
        raise RequestError("examples: expected at least one, got none")
    if loss == "risk":
        for number, example in enumerate(examples):
            if example.target is None:
                raise RequestError(
                    f"examples[{number}]: expected a target for the risk loss, got none"
                )
    hoeffding_bentkus(0.0, len(examples), delta)  # raises an error where scipy is missing
    SIMILARITIES[similarity]("", "")  # or rouge-score


def _generate(
    model: Model, examples: Sequence[Example], policy: ConfidentExit | Full, max_tokens: int
) -> tuple[list[str], float]:
    """The greedy texts, and the mean exit layer of their tokens."""
    prompts = [example.prompt for example in examples]
    outputs = generated(model, prompts, exit=policy, max_tokens=max_tokens)
    layers = [layer for output in outputs for layer in output.exit_layers]
    return [output.text or "" for output in outputs], sum(layers) / max(len(layers), 1)
