"""A calibration: a threshold, how it was found, and its guarantee.

:func:`eecore.calibrate` makes calibrations; :meth:`eecore.ConfidentExit.calibrated` makes a policy
from one. A :class:`ThoughtCalibration` has the rule that ends thoughts.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, get_args

from eecore.config import MAX_LAYERS
from eecore.errors import ExitError
from eecore.files.json_fields import JsonFields
from eecore.files.readable import beside_model, is_file, path_of
from eecore.files.whole import write_text
from eecore.thought_stop import ThoughtStop
from eecore.values import FLAG, Rule, check_fields, choice, real, reals, whole, wholes

Measure = Literal["softmax", "state", "classifier", "cut", "gate"]
MEASURES: tuple[Measure, ...] = get_args(Measure)

TextPart = Literal["all", "thought"]
TEXT_PARTS: tuple[TextPart, ...] = get_args(TextPart)
MAX_GRID = 1 << 16
SIMILARITY_NAMES = ("rougeL", "rouge2", "exact")
"""Similarities of two texts, defined in :mod:`eecore.calibration.similarity`."""


Share = Annotated[float, real(0.0, 1.0)]
Layer = Annotated[int, whole(1, MAX_LAYERS)]
SHA256 = Rule(
    lambda value: value if re.fullmatch("[0-9a-f]{64}", str(value)) else None,
    "64 hexadecimal digits",
)


class Source(Protocol):
    """The identity of a model, and the precision that it runs in."""

    @property
    def sha256(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def weights(self) -> str | None: ...


@dataclass(frozen=True)
class CalibrationStep:
    """A threshold that was tried."""

    threshold: Share
    mean_loss: Share
    p_value: Share
    passed: Annotated[bool, FLAG]
    mean_exit_layer: Annotated[float | None, real(0.0, MAX_LAYERS)] = None


class ForModel:
    """What holds for one model alone, in the number formats that it ran in."""

    model_sha256: str
    dtype: str
    weights: str | None

    def check_model(self, source: Source | None) -> None:
        """Raise :class:`eecore.ExitError` unless this is the model that was calibrated."""
        if source is None:
            raise ExitError("calibration: expected a model loaded from a directory, got another")
        for name, calibrated, got in (
            ("weights", self.weights, source.weights),
            ("dtype", self.dtype, source.dtype),
            ("model", _short(self.model_sha256), _short(source.sha256)),
        ):
            if calibrated != got:
                raise ExitError(
                    f"calibration: made for {name} {calibrated}, got {name} {got}: calibrate again"
                )


@dataclass(frozen=True)
class Calibration(ForModel):
    """A calibrated threshold, its settings, and all measurements."""

    threshold: Share
    measure: Annotated[Measure, choice(*MEASURES)]
    delta: Share
    epsilon: Share
    loss: Annotated[str, choice("textual", "risk")]
    similarity: Annotated[str, choice(*SIMILARITY_NAMES)]
    num_prompts: Annotated[int, whole(1)]
    max_tokens: Annotated[int, whole(1)]
    decay_tau: Annotated[float, real(0.0, 1e6)]
    exit_points: Annotated[tuple[int, ...] | None, wholes(1, MAX_LAYERS, most=MAX_LAYERS)]
    min_exit_layer: Layer
    model_sha256: Annotated[str, SHA256]
    dtype: Annotated[str, choice("float32", "bfloat16", "float16")]
    weights: Annotated[str | None, choice("int8", "int4")]
    classifier_sha256: Annotated[str | None, SHA256]
    grid: Annotated[tuple[float, ...], reals(0.0, 1.0, most=MAX_GRID)]
    steps: tuple[CalibrationStep, ...]
    vocabulary_sha256: Annotated[str | None, SHA256] = None
    """The digest of the tokens that the ``cut`` measure covers."""
    part: Annotated[TextPart, choice(*TEXT_PARTS)] = "all"

    @property
    def promise(self) -> str:
        """The guarantee in words."""
        return (
            f"calibrated (delta {self.delta:g}, epsilon {self.epsilon:g}, {self.loss} loss by "
            f"{self.similarity} on {self.num_prompts} prompts)"
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of ConfidentExit that the guarantee holds for."""
        return {
            "threshold": self.threshold,
            "measure": self.measure,
            "batch": "each",
            "decay_tau": self.decay_tau,
            "exit_points": self.exit_points,
            "min_exit_layer": self.min_exit_layer,
            "thresholds": {},
            "part": self.part,
        }

    def save(self, path: str | Path) -> None:
        write_text(path, json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Read a file of :meth:`save`.

        Raises:
            ExitError: the file cannot be read or is not a calibration.
        """
        read = JsonFields.read(path_of(path, ExitError), ExitError)
        names = [field.name for field in fields(Calibration)]
        read.only(*names, optional=("vocabulary_sha256", "part"))  # older files have neither
        values = read.values
        for name in ("exit_points", "grid"):
            if not isinstance(values[name], list | None):
                raise read.wrong(name, "a list", values[name])
        values["steps"] = tuple(_step(step) for step in read.objects("steps"))
        calibration = Calibration(**values)
        check_fields(calibration, ExitError, f"{read.where}: ")
        if calibration.exit_points == ():
            raise read.wrong("exit_points", "some layers, or null", [])
        for name, measure in (("classifier_sha256", "classifier"), ("vocabulary_sha256", "cut")):
            digest = getattr(calibration, name)
            if (calibration.measure == measure) != (digest is not None):
                raise read.wrong(name, f"one with measure {measure}, null without", digest)
        passed = {step.threshold for step in calibration.steps if step.passed}
        if calibration.steps and calibration.threshold not in {1.0, *passed}:
            raise read.wrong("threshold", "1 or that of a step that passed", calibration.threshold)
        return calibration

    def check_fits(self, policy: object) -> None:
        """Raise :class:`eecore.ExitError` unless the policy is the one that was calibrated."""
        for name, calibrated in self.settings.items():
            got = getattr(policy, name)
            if calibrated != got:
                raise ExitError(
                    f"ConfidentExit.{name}: expected {calibrated!r}, as calibrated, got {got!r} "
                    "(calibration=None drops the guarantee)"
                )

    def check_classifier(self, sha256: str | None) -> None:
        """Raise :class:`eecore.ExitError` unless this is the classifier of the calibration, or
        none.
        """
        if self.measure == "classifier" and sha256 is None:
            raise ExitError("calibration: expected the classifier it was made with, got none")
        if sha256 != self.classifier_sha256:
            raise ExitError(
                "calibration: expected the classifier it was made with "
                f"({_short(self.classifier_sha256)}), got another ({_short(sha256)})"
            )

    def check_vocabulary(self, sha256: str | None) -> None:
        """Raise :class:`eecore.ExitError` unless the draft head knows the tokens of the
        calibration.
        """
        if sha256 != self.vocabulary_sha256:
            raise ExitError(
                "calibration: expected the draft head's tokens that it was made with "
                f"({_short(self.vocabulary_sha256)}), got others ({_short(sha256)})"
            )


_RULE = [field.name for field in fields(ThoughtStop) if field.name != "contract"]


@dataclass(frozen=True)
class ThoughtCalibration(ForModel):
    """A calibrated rule for the ends of thoughts, and its guarantee."""

    stop: ThoughtStop
    """The rule; its threshold is infinity where none keeps the guarantee."""
    max_loss: Share
    confidence: Share
    loss: Annotated[str, choice("different", "lost")]
    num_questions: Annotated[int, whole(1)]
    thinking_budget: Annotated[int | None, whole()]
    saved: Share
    """The share of the thinking tokens that the rule saves on the questions."""
    model_sha256: Annotated[str, SHA256]
    tokenizer_sha256: Annotated[str, SHA256]
    dtype: Annotated[str, choice("float32", "bfloat16", "float16")]
    weights: Annotated[str | None, choice("int8", "int4")]

    @property
    def promise(self) -> str:
        """The guarantee in words."""
        loss = "other answers" if self.loss == "different" else "right answers lost"
        return (
            f"calibrated (at most {self.max_loss:g} {loss}, confidence {self.confidence:g}, on "
            f"{self.num_questions} questions, greedy)"
        )

    def save(self, path: str | Path) -> None:
        values = asdict(self)
        rule = {name: values["stop"][name] for name in _RULE}
        if self.stop.records:
            rule["threshold"] = None  # JSON has no infinity
        write_text(path, json.dumps(values | {"stop": rule}, indent=2) + "\n")

    @staticmethod
    def load(path: str | Path) -> ThoughtCalibration:
        """Read a file of :meth:`save`.

        Raises:
            ExitError: the file cannot be read or is not a calibration of thoughts.
        """
        read = JsonFields.read(path_of(path, ExitError), ExitError)
        read.only(*(field.name for field in fields(ThoughtCalibration)))
        inner = read.inner("stop")
        if inner is None:
            raise read.wrong("stop", "an object", None)
        inner.only(*_RULE)
        rule = inner.values
        rule["threshold"] = math.inf if rule["threshold"] is None else rule["threshold"]
        try:
            calibration = ThoughtCalibration(**read.values | {"stop": ThoughtStop(**rule)})
        except ExitError as error:
            raise ExitError(f"{read.where}: {error}") from None
        check_fields(calibration, ExitError, f"{read.where}: ")
        return calibration

    @staticmethod
    def file_of(model: Path) -> Path:
        """The place beside a model: in its directory, or next to a GGUF file."""
        name = "calibration-thoughts.json"
        return beside_model(model, name) if model.is_dir() else model.with_suffix(f".{name}")

    @staticmethod
    def beside(model: Path) -> ThoughtCalibration:
        """The calibration beside a model.

        Raises:
            ExitError: there is none, or it cannot be read.
        """
        path = ThoughtCalibration.file_of(model)
        if not is_file(path):
            raise ExitError(
                f"think: expected {path.name} beside the model, got nothing "
                "(eecore calibrate --think writes one)"
            )
        return ThoughtCalibration.load(path)

    def stop_for(self, source: Source | None, tokenizer_sha256: str) -> ThoughtStop:
        """The rule, for the model and the tokenizer that it was calibrated for.

        Raises:
            ExitError: it was calibrated for another model, tokenizer or chat template.
        """
        self.check_model(source)
        if tokenizer_sha256 != self.tokenizer_sha256:
            raise ExitError(
                "calibration: expected the tokenizer and chat template that it was made with "
                f"({_short(self.tokenizer_sha256)}), got others ({_short(tokenizer_sha256)}): "
                "calibrate again"
            )
        return replace(self.stop, contract=self.promise)


def _step(read: JsonFields) -> CalibrationStep:
    read.only(*(field.name for field in fields(CalibrationStep)))
    step = CalibrationStep(**read.values)
    check_fields(step, ExitError, f"{read.where}: {read.prefix}")
    return step


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]
