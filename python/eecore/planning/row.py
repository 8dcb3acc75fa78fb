"""What one request does in an iteration, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import NamedTuple

from eecore.output import PromptLogprob
from eecore.planning.draft_stop import AdaptiveDraftStop
from eecore.planning.proposal import NOTHING, Ahead, Proposal
from eecore.planning.route import Route
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Counters, Sequence, TokenRecord

__all__ = ["Outcome", "Row"]


class Row(NamedTuple):
    """What one decoding request does."""

    work: Work
    route: Route
    given: Proposal = NOTHING
    """Drafts to verify."""
    ahead: int = 0
    """Maximum number of drafts that a draft head makes for the next round."""
    ahead_thresholds: Ordered[float] = ()
    """Probabilities below which the first, the second, ... of these is the last."""
    follows: int | None = None
    """The row in the program's last run that this one follows; None: it follows its last token."""
    pending: int = 0
    """Maximum number of tokens that it gets from that run."""

    @property
    def sequence(self) -> Sequence:
        return self.work.sequence

    @property
    def position(self) -> int:
        """The position of its next key and value."""
        return self.work.sequence.num_tokens - 1 + self.pending


@dataclass(slots=True)
class Outcome:
    """What an iteration did for one sequence; nothing of the sequence has changed yet."""

    sequence: Sequence
    num_computed: int
    """Positions with valid KV."""
    records: list[TokenRecord] = field(default_factory=list)
    kv_exit_layers: list[int] = field(default_factory=list)
    """Exit layer that the KV of each newly computed generated position comes from."""
    counters: Counters = field(default_factory=Counters)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    """Log-probabilities of more tokens of the prompt, after those that the sequence has."""
    draft_stop: AdaptiveDraftStop | None = None
    """The next adaptive draft threshold, of a round that had one."""
    ahead: Ahead | None = None
    """What a draft head drafted for the next round."""
    seconds: float = 0.0
    """The round's, from the end of the one before, where a pass of full depth is known; else 0."""
    full_depth_s: float = 0.0
    """Seconds that a pass of full depth takes, with as many requests as the round had."""
    is_cut: bool = False
    """Fewer tokens count than the device would go on from."""
    error: Exception | None = None
    """Why the sequence cannot go on; nothing else of the outcome counts then."""
