"""The exit policies that requests may ask for: as text, as an object, as part of a model's name.

They are read as everywhere, by :class:`eecore.exit_text.Policies`. Nothing that a request says
names a file.
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

__all__ = ["Depths", "recommended"]

# An exit layer is recommended for drafts where so many of its tokens are the last layer's, of a
# model that says so.
AGREEMENT, NUM_DRAFTS = 0.97, 6


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
    num_layers: int,
    source: Any,
    agreement: Sequence[float] | None,
    vocabulary: str | None,
) -> tuple[str, ...]:
    """Policies that a model was made for: those that are listed where nobody says which.

    Args:
        policies: of the model.
        num_layers: it has.
        source: which model this is; a calibration for another is not listed.
        agreement: of each exit layer with the last one, where the model says so.
        vocabulary: SHA-256 of the tokens that its draft head knows; None without one.
    """
    names = ["full", "auto"]
    if vocabulary is not None:
        names.append("head")
    for layer, share in enumerate(agreement or (), 1):
        if share >= AGREEMENT and layer < num_layers:
            names.append(f"speculative:{layer},{NUM_DRAFTS}")
            break
    for measure in MEASURES:
        try:
            policies.calibrated(measure).check_request(source, vocabulary, 0.0)
        except RequestError:
            continue
        names.append(f"calibrated:{measure}")
    return tuple(names)
