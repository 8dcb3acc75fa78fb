"""The result of one mode for one prompt, and the modes of peers.

This module also runs in the environments of peers, so it imports only the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parse:
    """The tokens that one mode generated for one prompt, and their times."""

    tokens: list[int]
    """New tokens, the model's end token included."""
    seconds: float
    """Seconds from the prompt's tokens to the last new token."""
    first_seconds: float
    """Seconds to the end of the step that gave the first new tokens."""
    first_tokens: int
    """The number of tokens of that step, which may include accepted drafts."""
    drafted: int = 0
    accepted: int = 0
    depth: int | None = None
    """The sum of the exit layers of the new tokens, if the mode reports them."""


@dataclass(frozen=True)
class PeerMode:
    """A mode of a peer.

    Attributes:
        kind: ``full`` (transformers), ``assisted`` (transformers' early exit), or a mode of
            economize: ``economize`` (early-exit drafts), ``lookup`` (n-grams), ``hybrid``
            (n-grams, else early-exit drafts) or ``calm`` (its confident exit).
        exit_layer: the layer after which drafts exit.
        num_drafts: the maximum draft length of a round.
        threshold: a confidence; drafts stop below it, and ``calm`` exits above it.
    """

    kind: str
    exit_layer: int = 0
    num_drafts: int = 0
    threshold: float | None = None

    @property
    def name(self) -> str:
        """The mode's name in the tables."""
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
