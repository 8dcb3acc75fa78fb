"""The exit policies that requests may ask for: as text, as an object, as part of a model's name.

Text is that of ``eecore generate --exit``, and ``calibrated:MEASURE`` besides: the threshold that
lies beside the model. Nothing that a request says names a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eecore import exit_text
from eecore.errors import ExitError, RequestError
from eecore.exit_text import parse_exit
from eecore.exits import MEASURES, ConfidentExit, Exit, ExitClassifier
from eecore.readable import beside_model
from eecore.serving.refusals import invalid
from eecore.values import rules_of, shown

__all__ = ["MODES", "Depths", "Policies", "recommended"]

# An exit layer is recommended for drafts where so many of its tokens are the last layer's, of a
# model that says so.
AGREEMENT, NUM_DRAFTS = 0.97, 6
CALIBRATED = "calibrated"
MODES = (*exit_text.MODES, CALIBRATED)


class Policies:
    """Policies as they are said.

    Args:
        directory: of the model, which may hold calibrations and a classifier.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._calibrated: dict[str, Exit] = {}

    def of(self, said: str | dict[str, Any]) -> Exit:
        """The policy.

        Raises:
            ExitError: there is none such, or it contradicts itself.
        """
        if isinstance(said, str):
            return self._of_text(said)
        mode, settings = _of_object(said)
        if mode == CALIBRATED:
            return self.calibrated(settings.get("measure", "softmax"))
        if settings.get("measure") == "classifier":
            settings["classifier"] = self._classifier()
        return exit_text.MODES[mode].policy(**settings)

    def _of_text(self, said: str) -> Exit:
        mode, _, rest = said.partition(":")
        if mode == CALIBRATED:
            return self.calibrated(rest or "softmax")
        if mode not in MODES:
            raise ExitError(f"exit: expected {', '.join(MODES)}, got {shown(said)}")
        if exit_text.MODES[mode].is_partial:
            names = " and ".join(list(exit_text.MODES[mode].fields)[:2])
            raise ExitError(f"exit: expected an object with {names}, got {shown(said)}")
        return parse_exit(said)

    def calibrated(self, measure: Any) -> Exit:
        """The policy of a calibration that lies beside the model.

        Raises:
            ExitError: there is none for this measure.
        """
        if measure not in MEASURES:
            raise ExitError(f"exit: expected a measure of {', '.join(MEASURES)}, got {measure!r}")
        if measure not in self._calibrated:
            path = self.directory / f"calibration-{measure}.json"
            if not path.is_file():
                raise ExitError(f"exit: expected {path.name} beside the model, got nothing")
            classifier = self._classifier() if measure == "classifier" else None
            self._calibrated[measure] = ConfidentExit.calibrated(path, classifier)
        return self._calibrated[measure]

    def _classifier(self) -> ExitClassifier:
        path = beside_model(self.directory, "classifier.safetensors")
        if not path.is_file():
            raise ExitError(f"exit: expected {path.name} beside the model, got nothing")
        return ExitClassifier.load(path)


@dataclass(frozen=True)
class Depths:
    """What one server lets requests choose.

    Args:
        policies: as they are said.
        default: that of requests that say nothing.
        allowed: modes, and whole policies; None for all.
        aliases: policies that are listed as models of their own, as they are said.
    """

    policies: Policies
    default: str
    allowed: tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()

    def chosen(self, said: str | dict[str, Any] | None) -> Exit:
        """The policy of a request.

        Raises:
            ApiError: 400: it is one that this server does not let requests choose.
            ExitError: there is none such.
        """
        if said is None:
            return self.policies.of(self.default)
        policy = self.policies.of(said)
        if self.allows(said, policy):
            return policy
        raise invalid(
            f"exit: expected one of {', '.join((self.default, *(self.allowed or ())))}, "
            f"got {shown(said)}",
            param="exit",
            code="exit_not_allowed",
        )

    def allows(self, said: str | dict[str, Any], policy: Exit) -> bool:
        """Whether requests may choose a policy, as it is said."""
        if self.allowed is None:
            return True
        mode = said.partition(":")[0] if isinstance(said, str) else said["mode"]
        known = [self.default, *(each for each in self.allowed if each not in MODES)]
        return mode in self.allowed or any(policy == self.policies.of(each) for each in known)

    def of_name(self, suffix: str) -> str | None:
        """What the part of a model's name behind the colon says; None if that is no policy."""
        for mode in MODES:
            if suffix == mode or suffix.startswith(f"{mode}-"):
                numbers = suffix[len(mode) + 1 :].replace("-", ",")
                return f"{mode}:{numbers}" if numbers else mode
        return None

    @staticmethod
    def name_of(said: str) -> str:
        """The part of a model's name that says a policy."""
        return said.replace(":", "-").replace(",", "-")


def recommended(
    policies: Policies,
    exit_layers: range,
    source: Any,
    agreement: Sequence[float] | None,
    vocabulary: str | None,
) -> tuple[str, ...]:
    """Policies that a model was made for: those that are listed where nobody says which.

    Args:
        policies: of the model.
        exit_layers: of the model, the last one full depth.
        source: which model this is; a calibration for another is not listed.
        agreement: of each exit layer with the last one, where the model says so.
        vocabulary: SHA-256 of the tokens that its draft head knows; None without one.
    """
    names = ["full", "auto"]
    if vocabulary is not None:
        names.append("head")
    for layer, share in zip(exit_layers[:-1], agreement or (), strict=False):
        if share >= AGREEMENT:
            names.append(f"speculative:{layer},{NUM_DRAFTS}")
            break
    for measure in MEASURES:
        try:
            policies.calibrated(measure).check_request(source, vocabulary, 0.0)
        except RequestError:
            continue
        names.append(f"calibrated:{measure}")
    return tuple(names)


def _of_object(said: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    mode = said.get("mode")
    if not isinstance(mode, str) or mode not in MODES:
        raise ExitError(f"exit.mode: expected {', '.join(MODES)}, got {shown(mode)}")
    settings = {name: value for name, value in said.items() if name != "mode"}
    known = exit_text.MODES.get(mode)
    fields = ["measure"] if known is None else list(known.fields)
    for name in settings:
        if name not in fields:
            expected = ", ".join(fields) or "nothing but the mode"
            raise ExitError(f"exit: expected {expected} for {mode}, got {shown(name)}")
    missing = [] if known is None else [name for name in known.required if name not in settings]
    if known is not None and missing:
        expected = rules_of(known.policy)[missing[0]].expected
        raise ExitError(f"exit.{missing[0]}: expected {expected} for {mode}, got none")
    return mode, settings
