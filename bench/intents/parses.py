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
        kind: ``transformers`` at full depth, ``assisted`` (transformers' early exit), ``economize``
            (its early-exit drafts) or ``calm`` (economize's confident exit).
        exit_layer: the layer after which drafts exit.
        num_drafts: the maximum draft length of a round.
        threshold: the confidence above which ``calm`` exits.
    """

    kind: str
    exit_layer: int = 0
    num_drafts: int = 0
    threshold: float = 0.0

    @property
    def name(self) -> str:
        """The mode's name in the tables."""
        return {
            "transformers": "transformers `generate`",
            "assisted": f"transformers `assistant_early_exit={self.exit_layer}`, "
            f"{self.num_drafts} drafts",
            "economize": f"economize early exit ({self.exit_layer}, {self.num_drafts})",
            "calm": f"economize CALM (softmax, {self.threshold:g})",
        }[self.kind]
