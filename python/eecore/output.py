"""What a user gets back: text, tokens, and for each token how deep it went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from eecore.errors import EecoreError

__all__ = ["Output", "RequestFailedError", "RequestStats", "StepOutput"]


@dataclass(frozen=True)
class RequestStats:
    """The work and the time of one request.

    A layer execution is one position through one layer; ``prompt_layers_run`` are those of the
    prompt (and of replays after a preemption), ``layers_run`` those of generation, drafts included.
    """

    contract: str
    """The promise under which the output was made."""
    num_layers: int
    prompt_tokens: int
    generated_tokens: int
    layers_run: int
    prompt_layers_run: int
    layers_filled: int
    """(position, layer) pairs whose KV was filled from an exit state."""
    fill_calls: int
    drafted: int
    accepted: int
    preemptions: int
    time_to_first_token_s: float
    total_s: float
    mean_exit_layer: float
    """Over the generated tokens; accepted drafts count with the depth that drafted them."""

    @property
    def draft_acceptance(self) -> float | None:
        """Accepted drafts / drafted tokens; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens / total time."""
        return self.generated_tokens / self.total_s if self.total_s > 0 else 0.0

    @property
    def inner_token_latency_s(self) -> float:
        """(finish - first token) / generated tokens (early-exit framework §5.2)."""
        if not self.generated_tokens:
            return 0.0
        return (self.total_s - self.time_to_first_token_s) / self.generated_tokens


@dataclass(frozen=True)
class Output:
    """One finished request. Lists have one entry per generated token."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    """New tokens only; a stop token is included."""
    text: str | None
    """Without the stop token or stop string; None for a model without a tokenizer."""
    finish_reason: str
    """``stop`` (end-of-sequence, stop token, stop string), ``length`` or ``cancelled``."""
    exit_layers: list[int]
    """How many layers the token had behind it; for an accepted draft the draft's."""
    confidences: list[float]
    """The policy's measure where it was taken, else the gap of the two largest probabilities."""
    logprobs: list[float] | None
    """Log-probability of each token before temperature and filters, when asked for."""
    top_logprobs: list[dict[int, float]] | None
    stats: RequestStats


@dataclass(frozen=True, eq=False)
class StepOutput:
    """What one engine step added to one request."""

    request_id: str
    token_ids: list[int]
    exit_layers: list[int]
    confidences: list[float]
    output: Output | None
    """The whole result, with the request's last step."""
    piece: Callable[[], str] | None = field(default=None, repr=False)
    """Decodes :attr:`text`, which nobody may ever ask for."""

    @cached_property
    def text(self) -> str:
        """New text; empty while a character or a possible stop string is incomplete.

        It is decoded when it is first asked for, with that of earlier steps that were not.
        """
        return "" if self.piece is None else self.piece()

    @property
    def finished(self) -> bool:
        return self.output is not None


class RequestFailedError(EecoreError, RuntimeError):
    """A request that failed on the way; it took nobody along.

    Attributes:
        output: what there was by then; its ``finish_reason`` is "error".
    """

    def __init__(self, output: Output) -> None:
        super().__init__(getattr(output, "error", None) or "the request failed")
        self.output = output
