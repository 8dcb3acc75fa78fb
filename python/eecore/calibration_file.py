"""What a calibration is: a threshold, what it was found with, and the guarantee that it carries.

:func:`eecore.calibrate` makes one; :meth:`eecore.ConfidentExit.calibrated` is its policy.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, get_args

from eecore.config import MOST_LAYERS
from eecore.errors import ExitError
from eecore.files import write_text
from eecore.json_fields import JsonFields
from eecore.readable import path_of
from eecore.values import FLAG, Rule, check_fields, choice, real, reals, whole, wholes

__all__ = ["MEASURES", "SIMILARITY_NAMES", "Calibration", "CalibrationStep", "Measure"]

Measure = Literal["softmax", "state", "classifier", "cut", "gate"]
MEASURES: tuple[Measure, ...] = get_args(Measure)

MAX_GRID = 1 << 16
SIMILARITY_NAMES = ("rougeL", "rouge2", "exact")
"""How alike two texts are; what each means is said where calibrations are made."""


Share = Annotated[float, real(0.0, 1.0)]
Layer = Annotated[int, whole(1, MOST_LAYERS)]
SHA256 = Rule(
    lambda value: value if re.fullmatch("[0-9a-f]{64}", str(value)) else None,
    "64 hexadecimal digits",
)


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

    threshold: Share
    mean_loss: Share
    p_value: Share
    passed: Annotated[bool, FLAG]
    mean_exit_layer: Annotated[float | None, real(0.0, MOST_LAYERS)] = None


@dataclass(frozen=True)
class Calibration:
    """A calibrated threshold, what it was calibrated on, and all that was measured."""

    threshold: Share
    measure: Annotated[Measure, choice(*MEASURES)]
    delta: Share
    epsilon: Share
    loss: Annotated[str, choice("textual", "risk")]
    similarity: Annotated[str, choice(*SIMILARITY_NAMES)]
    num_prompts: Annotated[int, whole(1)]
    max_tokens: Annotated[int, whole(1)]
    decay_tau: Annotated[float, real(0.0, 1e6)]
    exit_points: Annotated[tuple[int, ...] | None, wholes(1, MOST_LAYERS, most=MOST_LAYERS)]
    min_exit_layer: Layer
    model_sha256: Annotated[str, SHA256]
    dtype: Annotated[str, choice("float32", "bfloat16", "float16")]
    weights: Annotated[str | None, choice("int8", "int4")]
    classifier_sha256: Annotated[str | None, SHA256]
    grid: Annotated[tuple[float, ...], reals(0.0, 1.0, most=MAX_GRID)]
    steps: tuple[CalibrationStep, ...]
    vocabulary_sha256: Annotated[str | None, SHA256] = None
    """Digest of the tokens over which the ``cut`` measure goes."""

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
    step = CalibrationStep(**read.values)
    check_fields(step, ExitError, f"{read.where}: {read.prefix}")
    return step


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]
