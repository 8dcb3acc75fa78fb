"""The search for the threshold of a :class:`eecore.thought_stop.ThoughtStop`: Learn then Test on
thoughts that ran to their ends.

For questions like those of the calibration set, the expected loss of ending thoughts early is at
most ``max_loss``, with probability at least ``confidence`` over the choice of the set. The loss of
a question is 1 where its thought ends early with another answer than that of the whole thought; or
only where the whole thought's answer is right. Hopeless ends count as any other. (Angelopoulos et
al., Learn then Test, arXiv 2110.01052; Conformal Thinking, arXiv 2602.03814.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from eecore.calibration.examples import Example
from eecore.calibration.generated import generated
from eecore.calibration.procedure import (
    check_number,
    lowest_passed,
    parts_of,
    tried_thresholds,
)
from eecore.calibration_file import CalibrationStep, ThoughtCalibration
from eecore.errors import RequestError
from eecore.files.json_fields import JsonFields
from eecore.files.readable import path_of
from eecore.files.texts import JsonLine, json_lines
from eecore.generation import Model
from eecore.models import Tokenizer
from eecore.output import Output
from eecore.thought_stop import NUMBER, Probe, ThoughtStop, Verdict, normalised
from eecore.values import as_real

ThoughtLoss = Literal["different", "lost"]
LOSSES = ("different", "lost")
GRID = (
    *(1.0, 0.9999, 0.9998, 0.9997, 0.9994, 0.999, 0.998, 0.997, 0.994),
    *(i / 100 for i in range(99, -1, -1)),
)
"""The thresholds that are tried, in this order; many probes are almost certain."""
RULE = ThoughtStop(1.0)
"""The rule that is calibrated by default."""
USUAL_BUDGET = 2048
ROOM = 128
"""Tokens after the budget for the thought's last sentence, its closing and the answer."""


@dataclass(frozen=True)
class Trajectory:
    """A thought that ran to its end, and its probes on the way."""

    id: str
    full_tokens: int
    """Tokens of the whole thought."""
    full_answer: str
    """The answer after the whole thought, as :func:`eecore.thought_stop.normalised` writes it."""
    probes: tuple[Probe, ...]
    is_right: bool | None = None
    """Whether that answer is right; None where it is not known."""


class ThoughtEnd(NamedTuple):
    """The end of a thought under a rule."""

    num_tokens: int
    answer: str
    num_probes: int
    reason: Verdict | None
    """None where the thought ended by itself."""


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """Read JSON lines of ``{"id": text, "full_tokens": n, "full_answer": text, "is_right": true,
    "probes": [{"num_tokens": n, "answer": text, "confidence": p}, ...]}``; ``is_right`` may be
    missing.

    Raises:
        RequestError: the file cannot be read, has no trajectory, or a line is malformed; the
            message has its number.
    """
    path = path_of(path, RequestError)
    found = [_trajectory(line) for line in json_lines(path)]
    if not found:
        raise RequestError(f"{path}: expected at least one trajectory, got none")
    return found


def _trajectory(line: JsonLine) -> Trajectory:
    read = JsonFields.of(line.value, line.where, RequestError)
    read.only("id", "full_tokens", "full_answer", "probes", optional=("is_right",))
    full_tokens, before = read.integer("full_tokens", 1), 0
    probes = []
    for each in read.objects("probes"):
        each.only("num_tokens", "answer", "confidence")
        before = each.integer("num_tokens", before + 1, full_tokens)
        confidence = each.number("confidence", 0.0, 1.0)
        probes.append(Probe(before, normalised(each.text("answer")), confidence))
    return Trajectory(
        id=read.text("id"),
        full_tokens=full_tokens,
        full_answer=normalised(read.text("full_answer")),
        probes=tuple(probes),
        is_right=read.flag("is_right", None),
    )


def ended(trajectory: Trajectory, stop: ThoughtStop, budget: int | None = None) -> ThoughtEnd:
    """Where a thought ends under a rule.

    Args:
        budget: the budget that the thought ran with.
    """
    probes = trajectory.probes
    for count, probe in enumerate(probes, 1):
        reason = stop.verdict(probes[:count], budget)
        if reason is not None:
            return ThoughtEnd(probe.num_tokens, probe.answer, count, reason)
    return ThoughtEnd(trajectory.full_tokens, trajectory.full_answer, len(probes), None)


def loss_of(trajectory: Trajectory, end: ThoughtEnd, loss: ThoughtLoss) -> float:
    """1 where the end's answer is a loss, else 0."""
    counts = loss == "different" or bool(trajectory.is_right)
    return float(counts and end.answer != trajectory.full_answer)


def check_promise(num_questions: int, max_loss: float, confidence: float) -> None:
    """Refuse a bound or a confidence that is none, and fewer questions than they take.

    Raises:
        RequestError: the message names the first that is wrong.
    """
    for name, value in (("max_loss", max_loss), ("confidence", confidence)):
        if as_real(value, 0.0, 1.0) in (None, 0.0, 1.0):
            raise RequestError(f"{name}: expected a number between 0 and 1, got {value!r}")
    check_number(num_questions, max_loss, 1.0 - confidence)


def calibrated_stop(
    trajectories: Sequence[Trajectory],
    stop: ThoughtStop,
    *,
    max_loss: float,
    confidence: float = 0.9,
    loss: ThoughtLoss = "different",
    budget: int | None = None,
) -> tuple[ThoughtStop, list[CalibrationStep]]:
    """The rule with the lowest threshold that keeps the promise; infinity where none does.

    Args:
        trajectories: thoughts about questions drawn like those of the intended use.
        stop: the rule, apart from its threshold.
        max_loss: the tolerated expected loss, between 0 and 1.
        confidence: the least probability that it is not exceeded, between 0 and 1.
        loss: ``different``, or ``lost``: a right answer lost.
        budget: the budget that the thoughts ran with.

    Returns:
        The rule, and the thresholds that were tried.

    Raises:
        RequestError: a setting is wrong, there are too few trajectories, or, for the loss ``lost``,
            it is not known of one whether its answer is right.
    """
    if loss not in LOSSES:
        raise RequestError(f"loss: expected {' or '.join(LOSSES)}, got {loss!r}")
    unknown = [each.id for each in trajectories if each.is_right is None]
    if loss == "lost" and unknown:
        raise RequestError(
            f"trajectories: expected to know whether answers are right for the loss lost, got one "
            f"where it is not known: {unknown[0]!r}"
        )
    check_promise(len(trajectories), max_loss, confidence)

    def losses_at(threshold: float) -> list[float]:
        tried = replace(stop, threshold=threshold)
        return [loss_of(each, ended(each, tried, budget), loss) for each in trajectories]

    steps = list(tried_thresholds(losses_at, GRID, max_loss, 1.0 - confidence))
    return replace(stop, threshold=lowest_passed(steps, otherwise=math.inf)), steps


def calibrate_thoughts(
    model: Model,
    questions: Sequence[Example],
    stop: ThoughtStop = RULE,
    *,
    max_loss: float = 0.02,
    confidence: float = 0.9,
    thinking_budget: int | None = None,
) -> ThoughtCalibration:
    """Let a model think about all questions to the end, and find when its thoughts may end.

    The loss is a right answer lost where all questions have their answers, else another answer.

    Args:
        model: from :func:`eecore.load`; it has to think before it answers.
        questions: drawn like those of the intended use; their targets are the answers.
        stop: the rule, apart from its threshold.
        max_loss: the tolerated expected loss, between 0 and 1.
        confidence: the least probability that it is not exceeded, between 0 and 1.
        thinking_budget: of each thought, in tokens; None: 2048, or what the model's context leaves.

    Raises:
        RequestError: a setting is wrong, there are too few questions, or the model has no thoughts;
            nothing has run then, except where no thought was seen.
    """
    tokenizer, source = parts_of(model)
    check_promise(len(questions), max_loss, confidence)
    budget = thinking_budget
    if budget is None:
        longest = max(map(len, _prompts(tokenizer, questions)))
        budget = min(USUAL_BUDGET, model.config.max_position - longest - _room(stop))
    thoughts = record(model, questions, stop, thinking_budget=budget)
    loss: ThoughtLoss = "different" if any(t.is_right is None for t in thoughts) else "lost"
    rule, _ = calibrated_stop(
        thoughts, stop, max_loss=max_loss, confidence=confidence, loss=loss, budget=budget
    )
    full = sum(each.full_tokens for each in thoughts)
    kept = sum(ended(each, rule, budget).num_tokens for each in thoughts)
    return ThoughtCalibration(
        stop=rule,
        max_loss=max_loss,
        confidence=confidence,
        loss=loss,
        num_questions=len(thoughts),
        thinking_budget=budget,
        saved=1.0 - kept / full,
        model_sha256=source.sha256,
        tokenizer_sha256=tokenizer.sha256,
        dtype=source.dtype,
        weights=source.weights,
    )


def record(
    model: Model, questions: Sequence[Example], stop: ThoughtStop, *, thinking_budget: int
) -> list[Trajectory]:
    """The thoughts of a model about some questions, greedy, probed to their ends.

    Raises:
        RequestError: the model has no thoughts, or the budget is too large for it.
    """
    tokenizer, _ = parts_of(model)
    outputs = generated(
        model,
        _prompts(tokenizer, questions),
        max_tokens=thinking_budget + _room(stop),
        thinking_budget=thinking_budget,
        think=replace(stop, threshold=math.inf),
    )
    if not any(output.thought_probes for output in outputs):
        raise RequestError(
            "model: expected one that thinks before it answers these questions, got no thoughts"
        )
    return [
        _recorded(str(number), question, output)
        for number, (question, output) in enumerate(zip(questions, outputs, strict=True), 1)
    ]


def _prompts(tokenizer: Tokenizer, questions: Sequence[Example]) -> list[list[int]]:
    return [
        tokenizer.encode_chat([{"role": "user", "content": question.prompt}], enable_thinking=True)
        for question in questions
    ]


def _room(stop: ThoughtStop) -> int:
    """Tokens after the budget; a stem has no more tokens than bytes."""
    return ROOM + len(stop.stem.encode()) + stop.max_answer


def _recorded(name: str, question: Example, output: Output) -> Trajectory:
    """The thought of an output; its last probe comes when the thought has ended."""
    *probes, last = output.thought_probes or [Probe(0, "", 0.0)]
    known = question.target
    is_right = None if known is None else has_answer(last.answer, known)
    return Trajectory(name, last.num_tokens, last.answer, tuple(probes), is_right)


def has_answer(answer: str, known: str) -> bool:
    """Whether a normalised answer is the known one: the same text, or the only number in it."""
    known = normalised(known)
    return answer == known or [normalised(each) for each in NUMBER.findall(answer)] == [known]
