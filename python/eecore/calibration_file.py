"""What a calibration is: a threshold, what it was found with, and the guarantee that it carries.

:func:`eecore.calibrate` makes one; :meth:`eecore.ConfidentExit.calibrated` is its policy.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from eecore.errors import ExitError
from eecore.files import write_text

__all__ = ["Calibration", "CalibrationStep"]


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
    measure: str
    """``softmax``, ``state`` or ``classifier``"""
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
        try:
            stored: Any = json.loads(Path(path).read_text())
        except OSError as error:
            raise ExitError(f"{path}: {error.strerror}") from None
        except ValueError as error:
            raise ExitError(f"{path}: expected the JSON of a calibration, got: {error}") from None
        names = {field.name for field in fields(Calibration)}
        if not isinstance(stored, dict) or set(stored) != names:
            got = sorted(stored) if isinstance(stored, dict) else type(stored).__name__
            raise ExitError(f"{path}: expected a calibration with {sorted(names)}, got {got}")
        try:
            points = stored["exit_points"]
            stored["exit_points"] = None if points is None else tuple(points)
            stored["grid"] = tuple(stored["grid"])
            stored["steps"] = tuple(CalibrationStep(**step) for step in stored["steps"])
        except TypeError as error:
            raise ExitError(f"{path}: expected the JSON of a calibration, got: {error}") from None
        return Calibration(**stored)

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


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]
