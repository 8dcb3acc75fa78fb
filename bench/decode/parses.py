"""What one mode made of one prompt, and how a peer is told to decode.

It runs in the environments of peers too, so it takes nothing but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parse:
    """What one mode made of one prompt, and when."""

    tokens: list[int]
    """New ones, the model's end token included."""
    seconds: float
    """From the prompt's tokens to the last new one."""
    first_seconds: float
    """To the end of the step that gave the first new tokens."""
    first_tokens: int
    """How many these were: drafts may have been accepted with the prompt."""
    drafted: int = 0
    accepted: int = 0
    depth: int | None = None
    """Exit layers summed over the new tokens, where the mode tells."""


@dataclass(frozen=True)
class PeerMode:
    """How a peer decodes.

    Attributes:
        kind: ``full`` (transformers), ``assisted`` (transformers' early exit), of economize
            ``economize`` (early-exit drafts), ``lookup`` (n-grams), ``hybrid`` (these, early-exit
            drafts where there are none) or ``calm`` (its confident exit).
        exit_layer: of the drafts.
        num_drafts: most of them a round.
        threshold: of confidence; drafts stop below it, and ``calm`` exits above it.
    """

    kind: str
    exit_layer: int = 0
    num_drafts: int = 0
    threshold: float | None = None

    @property
    def name(self) -> str:
        """As in the tables."""
        rest = "" if self.threshold is None else f", {self.threshold:g}"
        return {
            "full": "transformers `generate`",
            "assisted": f"transformers `assistant_early_exit={self.exit_layer}`, "
            f"{self.num_drafts} drafts",
            "economize": f"economize early exit ({self.exit_layer}, {self.num_drafts}{rest})",
            "lookup": f"economize lookup ({self.num_drafts})",
            "hybrid": f"economize hybrid ({self.exit_layer}, {self.num_drafts}{rest})",
            "calm": f"economize CALM (softmax{rest})",
        }[self.kind]
