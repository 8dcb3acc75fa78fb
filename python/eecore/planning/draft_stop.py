"""When a draft with skipped sublayers stops: a threshold that follows the acceptance rate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdaptiveDraftStop:
    """The draft threshold of Zhang et al., which follows the acceptance rate."""

    threshold: float
    acceptance: float = 0.9

    def after(self, drafted: int, accepted: int, num_drafts: int) -> AdaptiveDraftStop:
        """The threshold after a verification: a step towards more or fewer drafts."""
        if drafted == 0:
            return self
        acceptance = 0.5 * self.acceptance + 0.5 * accepted / drafted
        easy = 0.0 if drafted == num_drafts else -0.01
        step = 0.01 if acceptance < 0.9 else easy
        threshold = 0.9 * self.threshold + 0.1 * (self.threshold + step)
        return AdaptiveDraftStop(threshold, acceptance)
