"""One request: its tokens, its pages, and how much of its KV is computed."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eecore.config import SamplingParams

if TYPE_CHECKING:
    from eecore.engine.text import TextStream
    from eecore.exits import Exit
    from eecore.output import PromptLogprob
    from eecore.planning.draft_state import DraftState
    from eecore.planning.probes import ThoughtProbes

# Maximum drafts of a round, whatever a policy says: among so many one is wrong anyway.
MAX_DRAFTS = 64


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    FINISHED = "finished"


@dataclass(slots=True)
class Counters:
    """Counts of a request's work. A layer execution is one position through one layer."""

    layers_run: int = 0
    prompt_layers_run: int = 0
    layers_filled: int = 0
    fill_calls: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    passes: int = 0
    rows_in_passes: int = 0
    probe_rows: int = 0


@dataclass(slots=True)
class Times:
    """When things happened to a request, in seconds of ``time.perf_counter``, and for how long."""

    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    finished: float | None = None
    timed_tokens: int = 0
    """Tokens of rounds for which the time of a pass of full depth was known."""
    timed_s: float = 0.0
    """Seconds of the rounds that gave ``timed_tokens``."""
    full_depth_s: float = 0.0
    """Seconds that passes of full depth take for these tokens, with as many requests."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A request inside the engine.

    ``num_computed`` positions have valid KV. While it is below :attr:`prefill_target` the sequence
    is in its prefill (or, after a preemption, in its replay); then it decodes. It has pages
    while it is running or on hold; a waiting or finished sequence has none, whatever its fields
    say. Full pages may be shared with other sequences: only positions from ``num_computed`` on are
    written.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    exit: Exit
    arrival: int
    eos_token_ids: frozenset[int]
    status: SequenceStatus = SequenceStatus.WAITING
    output_ids: list[int] = field(default_factory=list)
    exit_layers: list[int] = field(default_factory=list)
    """The layers that each generated token ran."""
    confidences: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the generated tokens, where asked for."""
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    kv_exit_layers: list[int] = field(default_factory=list)
    """Exit layer of each generated position whose KV is computed, for an identical replay."""
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    """Scores of the prompt's tokens after the first, where asked for, as far as computed."""
    input_ids: list[int] | None = None
    """The encoder's input; the decoder's prompt is then the start token. None: no encoder."""
    input_pages: list[int] = field(default_factory=list)
    """Pages of the keys and values that the encoder's states give the decoder."""
    is_encoded: bool = False
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    state: int = 0
    """The number of its state in layers with gated delta rules; 0: none."""
    keep_at: int = 0
    """A position of the prompt, the end of a page, up to which another text has begun alike: its
    state there is worth keeping."""
    page_keys: list[bytes] = field(default_factory=list)
    """Keys of its first full pages in the prefix cache, as far as they were needed."""
    cached_tokens: int = 0
    """Positions of the prompt that came from the prefix cache: no layer ran for them."""
    counters: Counters = field(default_factory=Counters)
    times: Times = field(default_factory=Times)
    draft: DraftState | None = None
    """How the request decodes; made when it is first planned."""
    is_resting: bool = False
    """Whether the next round drafts nothing, even where the policy allows drafts."""
    is_masked: bool = False
    """Whether only some tokens may be allowed next, or after some of the next drafts."""
    text: TextStream | None = None
    """The text of the tokens; None without a tokenizer."""
    parent: Sequence | None = None
    """The sequence whose thought this one probes; None for a request."""
    probes: ThoughtProbes | None = None
    """The probes of the request's thought, where a :class:`eecore.ThoughtStop` asks for them."""
    probe: Sequence | None = None
    """The probe that runs over the sequence's pages, before its next token."""
    stop_ids: list[int] = field(init=False)
    """Tokens that end the request, ascending."""
    stop_set: frozenset[int] = field(init=False)
    max_drafts: int = field(init=False)
    """Maximum tokens drafted per round; 0 for a request that does not speculate."""

    def __post_init__(self) -> None:
        stops = set(self.sampling.stop_token_ids)
        if not self.sampling.ignore_eos:
            stops |= self.eos_token_ids
        self.stop_ids, self.stop_set = sorted(stops), frozenset(stops)
        self.max_drafts = min(self.exit.max_drafts, MAX_DRAFTS)

    @property
    def state_at(self) -> tuple[int, int]:
        """The number of the state, and how many positions are certain: no call gives them again."""
        return self.state, (self.parent or self).num_computed

    @property
    def has_pages(self) -> bool:
        return bool(self.pages or self.input_pages)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the decoder's prompt."""
        return len(self.prompt_ids)

    @property
    def given_ids(self) -> list[int]:
        """The request's own tokens: the encoder's input, or without an encoder the prompt."""
        return self.prompt_ids if self.input_ids is None else self.input_ids

    @property
    def tokens_to_encode(self) -> int:
        """How many tokens the encoder still has to read before the decoder can start."""
        return 0 if self.is_encoded or self.input_ids is None else len(self.input_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def prefill_target(self) -> int:
        """Positions computed in chunks: the whole prompt, or all but the last token in a replay."""
        return self.num_tokens - 1 if self.output_ids else len(self.prompt_ids)

    @property
    def max_cached(self) -> int:
        """Leading positions that cached pages may replace: at most all but the last of a prefill,
        and none whose state is still needed to score the prompt's next token.
        """
        most, known = self.prefill_target - 1, len(self.prompt_logprobs)
        if self.sampling.prompt_logprobs is None or known == self.num_prompt_tokens - 1:
            return most
        return min(most, known)

    @property
    def is_decoding(self) -> bool:
        return bool(self.output_ids) and self.num_computed == self.num_tokens - 1

    @property
    def tokens_left(self) -> int:
        return self.sampling.max_tokens - len(self.output_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids of positions start..stop-1."""
        split = len(self.prompt_ids)
        if stop <= split:
            return self.prompt_ids[start:stop]
        return self.prompt_ids[start:split] + self.output_ids[max(start - split, 0) : stop - split]
