"""What a calibration is: a threshold, what it was found with, and the guarantee that it carries.

:func:`eecore.calibrate` makes one; :meth:`eecore.ConfidentExit.calibrated` is its policy.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from eecore.config import MOST_LAYERS
from eecore.errors import ExitError
from eecore.files import write_text
from eecore.json_fields import JsonFields
from eecore.readable import path_of
from eecore.values import INT32_MAX

__all__ = ["MEASURES", "SIMILARITY_NAMES", "Calibration", "CalibrationStep", "Measure"]

Measure = Literal["softmax", "state", "classifier", "cut"]
MEASURES: tuple[Measure, ...] = get_args(Measure)

SIMILARITY_NAMES = ("rougeL", "rouge2", "exact")
"""How alike two texts are; what each means is said where calibrations are made."""


class Source(Protocol):
    """A model that can be told from others, and the numbers that it is run in."""

    @property
    def sha256(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def weights(self) -> str | None: ...


@dataclass(frozen=True)
class CalibrationStep:
    """One threshold that was tried."""

    threshold: float
    mean_loss: float
    p_value: float
    passed: bool
    mean_exit_layer: float | None = None


@dataclass(frozen=True)
class Calibration:
    """A calibrated threshold, what it was calibrated on, and all that was measured."""

    threshold: float
    measure: Measure
    delta: float
    epsilon: float
    loss: str
    """``textual`` or ``risk``"""
    similarity: str
    num_prompts: int
    max_tokens: int
    decay_tau: float
    exit_points: tuple[int, ...] | None
    min_exit_layer: int
    model_sha256: str
    dtype: str
    weights: str | None
    classifier_sha256: str | None
    grid: tuple[float, ...]
    steps: tuple[CalibrationStep, ...]
    vocabulary_sha256: str | None = None
    """Of the tokens over which the ``cut`` measure goes."""

    @property
    def promise(self) -> str:
        """The guarantee in words."""
        return (
            f"calibrated (delta {self.delta:g}, epsilon {self.epsilon:g}, {self.loss} loss by "
            f"{self.similarity} on {self.num_prompts} prompts)"
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What the policy must say for the guarantee to hold: fields of ConfidentExit."""
        return {
            "threshold": self.threshold,
            "measure": self.measure,
            "batch": "each",
            "decay_tau": self.decay_tau,
            "exit_points": self.exit_points,
            "min_exit_layer": self.min_exit_layer,
            "thresholds": {},
        }

    def save(self, path: str | Path) -> None:
        write_text(path, json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Read what :meth:`save` wrote.

        Raises:
            ExitError: the file cannot be read or is not a calibration.
        """
        read = JsonFields.read(path_of(path, ExitError), ExitError)
        names = [field.name for field in fields(Calibration)]
        read.only(*names, optional=("vocabulary_sha256",))  # files from before it have none
        measure = read.text("measure", one_of=MEASURES)
        points = read.integers("exit_points", 1, MOST_LAYERS, None, most=MOST_LAYERS)
        if points == ():
            raise read.wrong("exit_points", "some layers, or null", [])
        classifier = _digest(read, "classifier_sha256")
        if (measure == "classifier") != (classifier is not None):
            raise read.wrong(
                "classifier_sha256", "one with measure classifier, null without", classifier
            )
        vocabulary = _digest(read, "vocabulary_sha256")
        if (measure == "cut") != (vocabulary is not None):
            raise read.wrong("vocabulary_sha256", "one with measure cut, null without", vocabulary)
        calibration = Calibration(
            threshold=read.number("threshold", 0.0, 1.0),
            measure=measure,
            delta=read.number("delta", 0.0, 1.0),
            epsilon=read.number("epsilon", 0.0, 1.0),
            loss=read.text("loss", one_of=("textual", "risk")),
            similarity=read.text("similarity", one_of=SIMILARITY_NAMES),
            num_prompts=read.integer("num_prompts", 1),
            max_tokens=read.integer("max_tokens", 1, INT32_MAX),
            decay_tau=read.number("decay_tau", 0.0, 1e6),
            exit_points=points,
            min_exit_layer=read.integer("min_exit_layer", 1, MOST_LAYERS),
            model_sha256=_digest(read, "model_sha256") or "",
            dtype=read.text("dtype", one_of=("float32", "bfloat16", "float16")),
            weights=read.text("weights", None, one_of=("int8", "int4")),
            classifier_sha256=classifier,
            grid=read.numbers("grid", 0.0, 1.0),
            steps=tuple(_step(step) for step in read.objects("steps")),
            vocabulary_sha256=vocabulary,
        )
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
        """Raise :class:`eecore.ExitError` unless this is the classifier, or none, of then."""
        if self.measure == "classifier" and sha256 is None:
            raise ExitError("calibration: expected the classifier it was made with, got none")
        if sha256 != self.classifier_sha256:
            raise ExitError(
                "calibration: expected the classifier it was made with "
                f"({_short(self.classifier_sha256)}), got another ({_short(sha256)})"
            )

    def check_vocabulary(self, sha256: str | None) -> None:
        """Raise :class:`eecore.ExitError` unless the draft head knows the tokens of then."""
        if sha256 != self.vocabulary_sha256:
            raise ExitError(
                "calibration: expected the draft head's tokens that it was made with "
                f"({_short(self.vocabulary_sha256)}), got others ({_short(sha256)})"
            )

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


def _step(read: JsonFields) -> CalibrationStep:
    read.only(*(field.name for field in fields(CalibrationStep)))
    return CalibrationStep(
        threshold=read.number("threshold", 0.0, 1.0),
        mean_loss=read.number("mean_loss", 0.0, 1.0),
        p_value=read.number("p_value", 0.0, 1.0),
        passed=read.flag("passed"),
        mean_exit_layer=read.number("mean_exit_layer", 0.0, MOST_LAYERS, None),
    )


def _digest(read: JsonFields, name: str) -> str | None:
    """A SHA-256 in hexadecimal digits; None where there is none."""
    digest: str | None = read.text(name, None)
    if digest is None or re.fullmatch("[0-9a-f]{64}", digest):
        return digest
    raise read.wrong(name, "64 hexadecimal digits", digest)


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]
