"""What an iteration did for one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from eecore.scheduling.sequence import Sequence, TokenRecord

__all__ = ["Outcome"]


@dataclass
class Outcome:
    """What an iteration did for one sequence; nothing of the sequence has changed yet."""

    sequence: Sequence
    num_computed: int
    """Positions with valid KV."""
    records: list[TokenRecord] = field(default_factory=list)
    kv_exit_layers: list[int] = field(default_factory=list)
    """Exit layer behind the KV of each newly computed generated position."""
    layers_run: int = 0
    prompt_layers_run: int = 0
    layers_filled: int = 0
    fill_calls: int = 0
    drafted: int = 0
    accepted: int = 0
