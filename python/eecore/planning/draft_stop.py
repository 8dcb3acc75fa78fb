"""When a draft with skipped sublayers stops: a threshold that follows the acceptance rate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdaptiveDraftStop:
    """The draft threshold of Zhang et al., which follows the acceptance rate.

    The outcome of a round counts from the second round after it on. The first may be launched
    before the outcome is known, and has the same threshold as if it were not.
    """

    threshold: float
    """The threshold after all rounds with a known outcome, for a round that follows one in flight.
    """
    before: float
    """The threshold before the last of these rounds, for a round that follows none in flight."""
    acceptance: float = 0.9

    def after(self, drafted: int, accepted: int, num_drafts: int) -> AdaptiveDraftStop:
        """The threshold after a verification: a step towards more or fewer drafts."""
        before = self.threshold
        if drafted == 0:
            return AdaptiveDraftStop(before, before, self.acceptance)
        acceptance = 0.5 * self.acceptance + 0.5 * accepted / drafted
        easy = 0.0 if drafted == num_drafts else -0.01
        step = 0.01 if acceptance < 0.9 else easy
        threshold = 0.9 * before + 0.1 * (before + step)
        return AdaptiveDraftStop(threshold, before, acceptance)
