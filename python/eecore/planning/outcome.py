"""What an iteration did for one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eecore.output import PromptLogprob
from eecore.scheduling.sequence import Counters, Sequence, TokenRecord

__all__ = ["Outcome"]


@dataclass(slots=True)
class Outcome:
    """What an iteration did for one sequence; nothing of the sequence has changed yet."""

    sequence: Sequence
    num_computed: int
    """Positions with valid KV."""
    records: list[TokenRecord] = field(default_factory=list)
    kv_exit_layers: list[int] = field(default_factory=list)
    """Exit layer behind the KV of each newly computed generated position."""
    counters: Counters = field(default_factory=Counters)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    """Of tokens of the prompt, behind those that the sequence has."""
    draft_stop: Any = None
    """The next adaptive draft threshold, of a round that had one."""
    ahead: Any = None
    """What a draft head drafted behind it, for the next round."""
    is_cut: bool = False
    """Less of it stands than what the device would go on from."""
    error: Exception | None = None
    """Why the sequence cannot go on; nothing else of the outcome stands then."""
