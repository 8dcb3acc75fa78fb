"""The exit policies that requests may choose: as text, as an object, or in the model's name.

The text is read by :class:`eecore.exit_text.Policies`, as everywhere. A request cannot name a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eecore.errors import RequestError
from eecore.exit_text import MODES, Policies
from eecore.exits import MEASURES, Exit
from eecore.serving.refusals import invalid
from eecore.values import shown

AGREEMENT = 0.97
"""Agreement with the last layer from which on an exit layer is recommended for drafts."""
NUM_DRAFTS = 6
"""The draft length that is recommended with it."""


@dataclass(frozen=True)
class Depths:
    """The policies that a server lets requests choose.

    Args:
        default: the policy of requests that name none.
        allowed: modes and whole policies; None for all.
        aliases: policies that are listed as models of their own.
    """

    policies: Policies
    default: str
    allowed: tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()

    def chosen(self, said: str | dict[str, Any] | None) -> Exit:
        """The policy of a request; the server's default for None.

        Raises:
            ApiError: 400: this server does not let requests choose it.
            ExitError: there is no such policy.
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
        """Whether requests may choose a policy, given its text or object too."""
        if self.allowed is None:
            return True
        mode = said.partition(":")[0] if isinstance(said, str) else said["mode"]
        known = [self.default, *(each for each in self.allowed if each not in MODES)]
        return mode in self.allowed or any(policy == self.policies.of(each) for each in known)

    def of_name(self, suffix: str) -> str | None:
        """The policy that the part after the colon of a model's name says; None if it says none."""
        for mode in MODES:
            if suffix == mode or suffix.startswith(f"{mode}-"):
                numbers = suffix[len(mode) + 1 :].replace("-", ",")
                return f"{mode}:{numbers}" if numbers else mode
        return None

    @staticmethod
    def name_of(said: str) -> str:
        """The part of a model's name that names a policy."""
        return said.replace(":", "-").replace(",", "-")


def recommended(
    policies: Policies,
    exit_layers: range,
    source: Any,
    agreement: Sequence[float] | None,
    vocabulary: str | None,
) -> tuple[str, ...]:
    """The policies that suit a model; a server lists them where its settings name none.

    Args:
        exit_layers: the model's, the last one full depth.
        source: the model's identity; a calibration for another model is not listed.
        agreement: for each exit layer the share of tokens that are the last layer's, where the
            model reports it.
        vocabulary: SHA-256 of the tokens that the model's draft head knows; None without a head.
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
