"""When a draft with left-out sublayers stops: a threshold that follows the acceptance rate."""

from __future__ import annotations

from dataclasses import dataclass

from eecore.exits import DraftAndVerify
from eecore.scheduling.sequence import Sequence

__all__ = ["AdaptiveDraftStop", "stop_rule"]


@dataclass
class AdaptiveDraftStop:
    """The draft threshold of Zhang et al., which follows the acceptance rate."""

    threshold: float
    acceptance: float = 0.9

    def update(self, drafted: int, accepted: int, num_drafts: int) -> None:
        """After a verification: one step towards more or fewer drafts."""
        if drafted == 0:
            return
        self.acceptance = 0.5 * self.acceptance + 0.5 * accepted / drafted
        easy = 0.0 if drafted == num_drafts else -0.01
        step = 0.01 if self.acceptance < 0.9 else easy
        self.threshold = 0.9 * self.threshold + 0.1 * (self.threshold + step)


def stop_rule(sequence: Sequence) -> AdaptiveDraftStop:
    """The stop rule of a DraftAndVerify request, kept from round to round."""
    policy = sequence.exit
    assert isinstance(policy, DraftAndVerify)
    if sequence.draft_stop is None:
        start = policy.initial_threshold
        if start is None:
            start = 0.8 if sequence.sampling.temperature == 0.0 else 0.5
        sequence.draft_stop = AdaptiveDraftStop(start)
    rule: AdaptiveDraftStop = sequence.draft_stop
    return rule
