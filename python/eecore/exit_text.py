"""The list of exit modes, and policies as text: ``full``, ``confident:0.9``, ``auto``, ...

Command line, server, Python and documentation take names, fields and descriptions of the modes from
:data:`MODES`; :class:`Policies` reads what users say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eecore.calibration_file import Source, ThoughtCalibration
from eecore.errors import ExitError
from eecore.exits import (
    MEASURES,
    Auto,
    ConfidentExit,
    DraftAndVerify,
    Exit,
    ExitClassifier,
    FixedExit,
    Full,
    HeadDrafts,
    PromptLookup,
    SelfSpeculative,
)
from eecore.files.readable import beside_model, is_file
from eecore.thought_stop import ThoughtStop
from eecore.values import rules_of, shown

if TYPE_CHECKING:
    import torch


class ExitTextError(ExitError):
    """A text that names no exit policy."""


@dataclass(frozen=True)
class Mode:
    """An exit mode, as users call it.

    Attributes:
        name: the word before the colon of its text.
        policy: its class, whose fields have types, ranges, defaults and descriptions.
        summary: a short description.
        said: the fields in its text after the colon, with letters for them in help.
        example: an example of the text after the colon.
        is_partial: whether the text alone leaves required fields out.
        is_beside_model: whether fields that its text leaves out are in files beside the model.
    """

    name: str
    policy: type[Exit]
    summary: str
    said: Mapping[str, str] = field(default_factory=dict)
    example: str = ""
    is_partial: bool = False
    is_beside_model: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that JSON can express, with their defaults; ``MISSING`` where there is
        none.
        """
        rules = rules_of(self.policy)
        named = {name for name, rule in rules.items() if rule.is_plain}
        named &= set(self.said) if self.is_beside_model else named
        return {each.name: each.default for each in fields(self.policy) if each.name in named}

    @property
    def required(self) -> list[str]:
        """The fields that have no default."""
        return [name for name, default in self.fields.items() if default is MISSING]

    @property
    def form(self) -> str:
        """The text with letters for numbers: ``speculative:E,D``, ``lookup[:D]``."""
        letters = ":" * bool(self.said) + ",".join(self.said.values())
        return self.name + (letters if self.required or not letters else f"[{letters}]")

    def read(self, rest: str) -> dict[str, Any]:
        """The fields in the text after the colon; a ValueError where it does not fit."""
        given = rest.split(",") if rest else []
        if len(given) not in ((len(self.said),) if self.required else (0, len(self.said))):
            raise ValueError(rest)
        rules = rules_of(self.policy)
        return {name: rules[name].read(text) for name, text in zip(self.said, given, strict=False)}


_DRAFTS = {"num_drafts": "D"}
MODES = {
    mode.name: mode
    for mode in (
        Mode("full", Full, "every layer"),
        Mode("fixed", FixedExit, "always stop after layer E", {"exit_layer": "E"}, "12"),
        Mode(
            "confident",
            ConfidentExit,
            "stop once confident; 1 never",
            {"threshold": "THRESHOLD"},
            "0.8",
        ),
        Mode(
            "calibrated",
            ConfidentExit,
            "confident by the calibration beside the model",
            {"measure": "MEASURE"},
            "state",
            is_beside_model=True,
        ),
        Mode(
            "speculative",
            SelfSpeculative,
            "draft D tokens with E layers, verify with all",
            {"exit_layer": "E", "num_drafts": "D"},
            "8,6",
        ),
        Mode(
            "draft-verify",
            DraftAndVerify,
            "draft with some sublayers left out",
            _DRAFTS,
            "8",
            is_partial=True,
        ),
        Mode(
            "lookup",
            PromptLookup,
            "draft what followed the last tokens where they occurred before",
            _DRAFTS,
            "8",
        ),
        Mode("head", HeadDrafts, "draft with the model's draft head", _DRAFTS, "4"),
        Mode("auto", Auto, "the fastest of full, speculative, lookup and head", _DRAFTS, "10"),
    )
}
"""The list of modes, by name."""
FORMS = tuple(mode.form for mode in MODES.values() if not mode.is_partial)
"""The forms of texts that name a policy."""


def usual_exit(device: torch.device) -> str:
    """The policy of requests that name none; its text is that of ``full`` in any case.

    On a GPU it is not measured yet that ``auto`` is never slower.
    """
    return "auto" if device.type == "cpu" else "full"


def said_exit(text: str) -> tuple[Mode, dict[str, Any]]:
    """The mode in a text, and the fields that the text has.

    Raises:
        ExitTextError: the text names no policy.
    """
    name, _, rest = str.__str__(text).partition(":")  # whatever subclass of str
    mode = MODES.get(name)
    if mode is None:
        raise ExitTextError(f"exit: expected {', '.join(MODES)}, got {shown(text)}")
    try:
        return mode, mode.read(rest)
    except ValueError:
        example = f", such as {mode.name}:{mode.example}" if mode.example else ""
        raise ExitTextError(f"exit: expected {mode.form}{example}, got {shown(text)}") from None


class Policies:
    """The exit policies that users say, for one model.

    Args:
        directory: the model's, which may hold calibrations and a classifier; None where it was not
            loaded from one.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self._calibrated: dict[str, Exit] = {}
        self._thought_stop: ThoughtStop | None = None

    def of(self, said: str | Mapping[str, Any]) -> Exit:
        """The policy of a text, or of an object with ``mode`` and fields of its policy.

        Raises:
            ExitTextError: it is none of the modes, or lacks something.
            ExitError: it contradicts itself, or needs a file that is not beside the model.
        """
        if isinstance(said, str):
            mode, settings = said_exit(said)
            if mode.is_partial:
                missing = " or ".join(list(mode.fields)[:2])
                raise ExitTextError(
                    f"exit: expected {mode.name} with {missing}, as an object over HTTP or "
                    f"eecore.{mode.policy.__name__} in Python, got {shown(said)}"
                )
        else:
            mode, settings = _said_object(said)
        if mode.is_beside_model:
            return self.calibrated(settings.get("measure", "softmax"))
        if settings.get("measure") == "classifier" and "classifier" not in settings:
            settings["classifier"] = self._classifier()
        return mode.policy(**settings)

    def calibrated(self, measure: str) -> Exit:
        """The policy of the calibration that lies beside the model.

        Raises:
            ExitError: there is none for this measure.
        """
        if measure not in MEASURES:
            expected = ", ".join(MEASURES)
            raise ExitTextError(f"exit: expected a measure of {expected}, got {shown(measure)}")
        if measure not in self._calibrated:
            path = self._beside(f"calibration-{measure}.json", "calibrate")
            classifier = self._classifier() if measure == "classifier" else None
            self._calibrated[measure] = ConfidentExit.calibrated(path, classifier)
        return self._calibrated[measure]

    def thought_stop(self, source: Source | None, tokenizer_sha256: str) -> ThoughtStop:
        """The rule of the calibration of thoughts that lies beside the model.

        Args:
            source: the model's.
            tokenizer_sha256: the digest of its tokenizer.

        Raises:
            ExitError: there is none, or it was made for another model or tokenizer.
        """
        if self._thought_stop is None:
            if self.directory is None:
                raise ExitError("think: expected a model from a directory or file, got another")
            found = ThoughtCalibration.beside(self.directory)
            self._thought_stop = found.stop_for(source, tokenizer_sha256)
        return self._thought_stop

    def _classifier(self) -> ExitClassifier:
        return ExitClassifier.load(self._beside("classifier.safetensors", "train-classifier"))

    def _beside(self, name: str, command: str) -> Path:
        """A file beside the model, which a command writes."""
        if self.directory is None:
            raise ExitError(f"exit: expected a model from a directory with {name}, got another")
        path = beside_model(self.directory, name)
        if not is_file(path):
            raise ExitError(
                f"exit: expected {name} beside the model, got nothing (eecore {command} writes one)"
            )
        return path


def parse_exit(text: str, directory: Path | None = None) -> Exit:
    """The policy that a text says; see :meth:`Policies.of`."""
    return Policies(directory).of(text)


def _said_object(said: Mapping[str, Any]) -> tuple[Mode, dict[str, Any]]:
    """The mode of an object, and the fields that it says."""
    name = said.get("mode")
    mode = MODES.get(name) if isinstance(name, str) else None
    if mode is None:
        raise ExitTextError(f"exit.mode: expected {', '.join(MODES)}, got {shown(name)}")
    settings = {name: value for name, value in said.items() if name != "mode"}
    for name in settings:
        if name not in mode.fields:
            expected = ", ".join(mode.fields) or "nothing but the mode"
            raise ExitTextError(f"exit: expected {expected} for {mode.name}, got {shown(name)}")
    missing = [name for name in mode.required if name not in settings]
    if missing:
        expected = rules_of(mode.policy)[missing[0]].expected
        raise ExitTextError(f"exit.{missing[0]}: expected {expected} for {mode.name}, got none")
    return mode, settings


def exit_text(policy: Exit) -> str:
    """A policy as a short text; :func:`parse_exit` reads it back where it has all fields.

    Other fields are left out.
    """
    if isinstance(policy, ConfidentExit) and policy.calibration is not None:
        return f"calibrated:{policy.measure}"
    for mode in MODES.values():
        if type(policy) is mode.policy:
            values = [getattr(policy, name) for name in mode.said]
            if not values or None in values:  # None: as the model says
                return mode.name
            return f"{mode.name}:{','.join(f'{value:g}' for value in values)}"
    return type(policy).__name__
