"""The results of a request: text, tokens, and for each token its exit layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from eecore.errors import EecoreError
from eecore.thought_stop import Probe


class PromptLogprob(NamedTuple):
    """The model's log-probabilities for a token of the prompt, given the tokens before it."""

    token_id: int
    logprob: float
    """The log-softmax of the raw logits: without temperature, penalties or guide."""
    rank: int
    """The token's rank: 1 for the most probable one; of equal ones the lower id comes first."""
    top_logprobs: dict[int, float]
    """The most probable tokens, as many as were asked for, best first."""


class Piece(NamedTuple):
    """What a step adds to the text of a request."""

    text: str = ""
    thought: str = ""


@dataclass(frozen=True)
class RequestStats:
    """The work and the time of one request.

    A layer execution is one position through one layer. ``prompt_layers_run`` counts the prompt's
    (and those of replays after a preemption), ``layers_run`` those of generation, drafts included.
    """

    contract: str
    """The promise of the request's exit policy."""
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
    """Mean over the generated tokens; an accepted draft counts with all layers, which verified it.
    """
    full_passes: int
    """Passes of all layers after the prompt's; drafts that are verified together share one."""
    fingerprint: str | None = None
    """What the text depends on beside its request: see :meth:`eecore.Engine.fingerprint`."""
    thought_tokens: int = 0
    """Generated tokens of the thought, its closing marker included."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache: no layer ran for them."""
    passes: int = 0
    """Passes of one loop of a looped model, which requests in other loops may have shared."""
    rows_in_passes: int = 0
    """Rows of all requests in these passes."""
    thought_end: str | None = None
    """What ended the thought: ``model``, ``budget``, or the verdict of a
    :class:`eecore.ThoughtStop`, ``confident`` or ``hopeless``; None where there was none, or no end
    of one, or nothing but the model could end it.
    """
    thought_contract: str | None = None
    """The promise of the rule that may end the thought early; None without one."""
    probe_rows: int = 0
    """Positions that probes of the thought ran; ``layers_run`` counts their layers, too."""
    full_depth_s: float | None = None
    """Seconds that as many tokens would have taken at full depth among the same requests. Passes
    count as they were measured on this model, and other work, mainly prompts, as it was. None where
    too little is known.
    """

    @property
    def draft_acceptance(self) -> float | None:
        """Acceptance rate: accepted drafts / drafted tokens; None when nothing was drafted."""
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

    @property
    def is_lossless(self) -> bool:
        """Whether full depth gives the same text, or one of the same distribution."""
        return self.is_full or self.contract.endswith("lossless")

    @property
    def is_full(self) -> bool:
        """Whether the request ran at full depth, and nothing drafted for it."""
        return self.contract.startswith("full:")


@dataclass(frozen=True)
class Saved:
    """The speed of requests, compared with full depth."""

    tokens_per_s: float
    full_depth_tokens_per_s: float | None
    """Tokens/s at full depth, from measured passes; None where it is not known, and for requests
    that ran at full depth.
    """
    layers_run: float | None
    """Layer executions for each token after a request's first, drafts included; None without such a
    token.
    """
    num_layers: int
    """Layer executions of a token at full depth."""
    is_lossless: bool
    """Whether full depth gives the same text, or one of the same distribution."""

    @property
    def speedup(self) -> float | None:
        """Speed over full depth's; None where that is not known."""
        full = self.full_depth_tokens_per_s
        return None if full is None else self.tokens_per_s / full

    @classmethod
    def of(cls, stats: Sequence[RequestStats], seconds: float | None = None) -> Saved:
        """The speed of some requests together.

        Args:
            stats: the requests' statistics, one or more, of one model.
            seconds: the time in which all of them were served; the longest request's when None.
        """
        tokens = sum(each.generated_tokens for each in stats)
        after_first = sum(max(each.generated_tokens - 1, 0) for each in stats)
        run = sum(each.layers_run for each in stats)
        took = full = 0.0
        known = 0
        for each in stats:
            if each.full_depth_s is not None and not each.is_full:
                took, full = took + each.total_s, full + each.full_depth_s
                known += each.generated_tokens
        seconds = max(each.total_s for each in stats) if seconds is None else seconds
        speed = tokens / seconds if seconds > 0.0 else 0.0
        return cls(
            tokens_per_s=speed,
            full_depth_tokens_per_s=speed * took / full if 0 < known >= tokens / 2 else None,
            layers_run=run / after_first if after_first else None,
            num_layers=stats[0].num_layers,
            is_lossless=all(each.is_lossless for each in stats),
        )


@dataclass(frozen=True)
class Output:
    """A finished request. Lists have one entry for each generated token."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    """New tokens only; a stop token is included."""
    text: str | None
    """The text without the stop token or stop string, and without the thought; None for a model
    without a tokenizer.
    """
    finish_reason: str
    """``stop`` (end-of-sequence, stop token, stop string), ``length``, ``cancelled``, ``error``."""
    exit_layers: list[int]
    """Layers that each token ran; for an accepted draft the layers that drafted it, 0 where it was
    looked up or made by a draft head.
    """
    confidences: list[float]
    """The policy's measure where it was taken, otherwise the gap of the two largest
    probabilities.
    """
    logprobs: list[float] | None
    """Log-probability of each token before temperature and filters, when asked for."""
    top_logprobs: list[dict[int, float]] | None
    stats: RequestStats
    prompt_logprobs: list[PromptLogprob | None] | None = None
    """Log-probabilities of each prompt token, when asked for; None for the first. There are fewer
    where the request ended before its prompt did.
    """
    error: str | None = None
    """The error of this request, where ``finish_reason`` is ``error``; what it had generated by
    then is in the other fields. Other requests are not affected.
    """
    thought: str | None = None
    """The text in which the model reasoned before its answer, without its markers and the line ends
    around them; None where there is none. ``token_ids`` have its tokens, too.
    """
    thought_probes: list[Probe] = field(default_factory=list)
    """The probes of the thought, where a :class:`eecore.ThoughtStop` asked for them."""


@dataclass(frozen=True, eq=False)
class StepOutput:
    """The tokens that one engine step added to one request."""

    request_id: str
    token_ids: list[int]
    exit_layers: list[int]
    confidences: list[float]
    output: Output | None
    """The whole result, in the request's last step."""
    logprobs: list[float] | None = None
    """Log-probabilities of each token, as in :class:`Output`, when asked for."""
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[PromptLogprob | None] | None = None
    """As in :class:`Output`, in the request's first step, when asked for."""
    piece: Callable[[], Piece] | None = field(default=None, repr=False)
    """Decodes the new text at its first use."""

    @cached_property
    def added(self) -> Piece:
        """New text, decoded when it is first asked for, together with that of earlier steps."""
        return Piece() if self.piece is None else self.piece()

    @property
    def text(self) -> str:
        """New text of the answer; empty while a character or stop string may be incomplete."""
        return self.added.text

    @property
    def thought(self) -> str:
        """New text of the thought before the answer."""
        return self.added.thought

    @property
    def finished(self) -> bool:
        return self.output is not None


class RequestFailedError(EecoreError, RuntimeError):
    """A request failed while it ran; other requests are not affected.

    Attributes:
        output: what the request had generated; its ``finish_reason`` is "error".
    """

    def __init__(self, output: Output) -> None:
        super().__init__(getattr(output, "error", None) or "the request failed")
        self.output = output


COLOURS = ((56, 189, 248), (167, 139, 250), (251, 146, 60))
"""Colours of exit layers: sky blue is the lowest possible exit, orange all layers."""


def depth_colour(layer: int, lowest: int, num_layers: int) -> str:
    """``rgb(r,g,b)`` for a token that exited after ``layer`` layers."""
    share = (layer - lowest) / max(num_layers - lowest, 1)
    at = min(max(share, 0.0), 1.0) * (len(COLOURS) - 1)
    low = min(int(at), len(COLOURS) - 2)
    red, green, blue = (
        round(a + (b - a) * (at - low)) for a, b in zip(COLOURS[low], COLOURS[low + 1], strict=True)
    )
    return f"rgb({red},{green},{blue})"
