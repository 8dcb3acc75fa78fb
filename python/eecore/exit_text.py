"""Exit policies in words: ``full``, ``confident:0.9``, ``speculative:3,6``, ``auto``, ..."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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
from eecore.values import shown

__all__ = ["POLICIES", "ExitTextError", "exit_text", "parse_exit", "usual_exit"]


class ExitTextError(ExitError):
    """A text that says no exit policy."""


@dataclass(frozen=True)
class _Form:
    """What stands behind the name of one policy."""

    policy: type[Exit]
    form: str
    """As an error says it."""
    numbers: tuple[Callable[[str], Any], ...] = ()
    least: int = 0
    fields: tuple[str, ...] = ()
    """Of the policy, that the numbers are."""

    def values(self, rest: str) -> list[Any]:
        """What stands behind the colon; a ValueError where it does not fit."""
        given = rest.split(",") if rest else []
        if not self.least <= len(given) <= len(self.numbers):
            raise ValueError(rest)
        return [number(text) for number, text in zip(self.numbers, given, strict=False)]


DRAFTS = ("num_drafts",)
POLICIES = {
    "full": _Form(Full, "full"),
    "fixed": _Form(FixedExit, "fixed:E, such as fixed:12", (int,), 1, ("exit_layer",)),
    "confident": _Form(
        ConfidentExit,
        "confident or confident:THRESHOLD, such as confident:0.8",
        (float,),
        fields=("threshold",),
    ),
    "speculative": _Form(
        SelfSpeculative,
        "speculative:E,D, such as speculative:8,6",
        (int, int),
        2,
        ("exit_layer", "num_drafts"),
    ),
    "lookup": _Form(PromptLookup, "lookup or lookup:D, such as lookup:8", (int,), fields=DRAFTS),
    "head": _Form(HeadDrafts, "head or head:D, such as head:4", (int,), fields=DRAFTS),
    "auto": _Form(Auto, "auto or auto:D, such as auto:10", (int,), fields=DRAFTS),
}
"""By name; DraftAndVerify has none here, whose sets of sublayers no short text says."""


def usual_exit(device: torch.device) -> str:
    """The policy of requests that say none: the text is that of ``full`` in any case.

    A GPU is kept busy by rounds that are launched ahead; none that is chosen can be.
    """
    return "auto" if device.type == "cpu" else "full"


def parse_exit(text: str) -> Exit:
    """The policy that a text says.

    Raises:
        ExitTextError: it says none.
        ExitError: it says one that contradicts itself.
    """
    name, _, rest = str.__str__(text).partition(":")  # of any class of str
    form = POLICIES.get(name)
    if form is None:
        raise ExitTextError(f"exit: expected {', '.join(POLICIES)}, got {shown(text)}")
    try:
        values = form.values(rest)
    except ValueError:
        raise ExitTextError(f"exit: expected {form.form}, got {shown(text)}") from None
    return form.policy(*values)


def exit_text(policy: Exit) -> str:
    """A policy in a few words: those that :func:`parse_exit` takes, where they say all of it.

    What they have no room for is left out. ``calibrated:MEASURE`` is a threshold that was
    calibrated, ``draft-verify:D`` :class:`eecore.DraftAndVerify`.
    """
    if isinstance(policy, ConfidentExit) and policy.calibration is not None:
        return f"calibrated:{policy.measure}"
    if isinstance(policy, DraftAndVerify):
        return f"draft-verify:{policy.num_drafts}"
    for name, form in POLICIES.items():
        if type(policy) is form.policy:
            values = [getattr(policy, field) for field in form.fields]
            return ":".join(
                [name, *([",".join(f"{value:g}" for value in values)] if values else [])]
            )
    return type(policy).__name__
