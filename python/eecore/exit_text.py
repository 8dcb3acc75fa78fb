"""The list of exit modes, and policies in words: ``full``, ``confident:0.9``, ``auto``, ...

Command line, server and documentation take names, fields and words of a mode from :data:`MODES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from eecore.errors import ExitError
from eecore.exits import (
    Auto,
    ConfidentExit,
    DraftAndVerify,
    Exit,
    FixedExit,
    Full,
    HeadDrafts,
    PromptLookup,
    SelfSpeculative,
)
from eecore.values import rules_of, shown

if TYPE_CHECKING:
    import torch

__all__ = [
    "FORMS",
    "MODES",
    "ExitTextError",
    "Mode",
    "exit_text",
    "parse_exit",
    "said_exit",
    "usual_exit",
]


class ExitTextError(ExitError):
    """A text that says no exit policy."""


@dataclass(frozen=True)
class Mode:
    """One way to spend layers, as users call it.

    Attributes:
        name: the word that its text begins with.
        policy: its class, whose fields have types, ranges, defaults and descriptions.
        summary: what it does, in a few words.
        said: the fields that its text has after the colon, and what stands for them in help.
        example: such a text, after the colon.
        is_partial: a text alone does not say enough.
    """

    name: str
    policy: type[Exit]
    summary: str
    said: Mapping[str, str] = field(default_factory=dict)
    example: str = ""
    is_partial: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that JSON can say, and their defaults; ``MISSING`` where there is none."""
        rules = rules_of(self.policy)
        named = {name for name, rule in rules.items() if rule.is_plain}
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
        """The fields that are said after the colon; a ValueError where it does not fit."""
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
        Mode("head", HeadDrafts, "draft with a head that eecore train-exits made", _DRAFTS, "4"),
        Mode(
            "auto", Auto, "whatever is fastest of full, speculative, lookup and head", _DRAFTS, "10"
        ),
    )
}
"""The list of modes, by name."""
FORMS = tuple(mode.form for mode in MODES.values() if not mode.is_partial)
"""The texts that say a policy."""


def usual_exit(device: torch.device) -> str:
    """The policy of requests that say none: the text is that of ``full`` in any case.

    A GPU is kept busy by rounds that are launched ahead; none that is chosen can be.
    """
    return "auto" if device.type == "cpu" else "full"


def said_exit(text: str) -> tuple[Mode, dict[str, Any]]:
    """The mode of a text, and the fields that it says.

    Raises:
        ExitTextError: it says none.
    """
    name, _, rest = str.__str__(text).partition(":")  # of any class of str
    mode = MODES.get(name)
    if mode is None:
        raise ExitTextError(f"exit: expected {', '.join(MODES)}, got {shown(text)}")
    try:
        return mode, mode.read(rest)
    except ValueError:
        example = f", such as {mode.name}:{mode.example}" if mode.example else ""
        raise ExitTextError(f"exit: expected {mode.form}{example}, got {shown(text)}") from None


def parse_exit(text: str) -> Exit:
    """The policy that a text says. Of ``draft-verify`` a text alone does not say enough.

    Raises:
        ExitTextError: it says none.
        ExitError: it says one that contradicts itself.
    """
    mode, settings = said_exit(text)
    return mode.policy(**settings)


def exit_text(policy: Exit) -> str:
    """A policy in a few words: those that :func:`parse_exit` takes, where they say all of it.

    What they have no room for is left out. ``calibrated:MEASURE`` is a threshold that was
    calibrated.
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
