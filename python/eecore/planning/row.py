"""One request's work in an iteration, and the outcome."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import NamedTuple

from eecore.output import PromptLogprob
from eecore.planning.draft_stop import AdaptiveDraftStop
from eecore.planning.proposal import NOTHING, Ahead, Proposal
from eecore.planning.route import Route
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Counters, Sequence


class Row(NamedTuple):
    """The work of one decoding request."""

    work: Work
    route: Route
    drafts: Ordered[int] = ()
    """Drafts to verify."""
    ahead: int = 0
    """Maximum number of drafts that a draft head makes for the next round."""
    ahead_thresholds: Ordered[float] = ()
    """A probability for each of these drafts: the head stops after a draft that is less likely."""
    proposed: Ordered[Proposal] = ()
    """What the sources have proposed for an ``Auto`` request."""
    follows: int | None = None
    """The row of the program's run in flight whose result this row continues; None: the row
    continues after the last token of its text.
    """
    pending: int = 0
    """Maximum number of tokens that the request gets from that run."""
    given: Proposal = NOTHING
    """The proposal that ``Auto`` has taken the drafts from."""

    @property
    def sequence(self) -> Sequence:
        return self.work.sequence

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens that the request gets from this work."""
        return 1 if self.route.path is None else 1 + self.work.max_drafts

    @property
    def position(self) -> int:
        """The position of the row's next key and value."""
        return self.work.sequence.num_tokens - 1 + self.pending


@dataclass(slots=True)
class Outcome:
    """What an iteration did for one sequence, which has not been updated yet."""

    sequence: Sequence
    num_computed: int
    """Positions with valid keys and values."""
    token_ids: list[int] = field(default_factory=list)
    exit_layers: list[int] = field(default_factory=list)
    """The exit layer of each token."""
    confidences: list[float] = field(default_factory=list)
    kv_exit_layers: list[int] = field(default_factory=list)
    """For each newly computed generated position, the exit layer of its keys and values."""
    counters: Counters = field(default_factory=Counters)
    """Counts of the work, which other outcomes may share."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the tokens, where the request asks for them."""
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    """Log-probabilities of further prompt tokens, after the ones that the sequence has."""
    draft_stop: AdaptiveDraftStop | None = None
    """The next adaptive draft threshold, after a round that had one."""
    ahead: Ahead | None = None
    """Drafts of a draft head for the next round."""
    of_parent: Outcome | None = None
    """The next token of the request that this sequence probes, where the same pass gives it."""
    seconds: float = 0.0
    """Seconds from the end of the previous round to this one's; 0 where ``full_depth_s`` is."""
    full_depth_s: float = 0.0
    """Seconds of a pass of full depth with as many requests as the round had; 0 where unknown."""
    is_cut: bool = False
    """Whether fewer tokens are valid than the device's next run continues from."""
    error: Exception | None = None
    """Why the sequence cannot go on; nothing else of the outcome counts then."""

    def keep(self, count: int) -> None:
        """Remove all tokens after the first ``count``, with which the text ends."""
        del self.token_ids[count:], self.exit_layers[count:], self.confidences[count:]
        del self.logprobs[count:], self.top_logprobs[count:]

    def cut(self, count: int) -> None:
        """Remove all tokens after the first ``count``, after which the request goes on."""
        surplus = len(self.token_ids) - count
        if surplus:
            self.keep(count)
            self.num_computed -= surplus
            del self.kv_exit_layers[-surplus:]
            self.ahead = None
